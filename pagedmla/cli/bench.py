"""``pagedmla bench``: decode on a GPU against the machine's limit and against other projects' kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedmla.cli.console import EXIT_FAILED, fail, usable_device, user_errors
from pagedmla.contract.errors import InvalidArgument

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from pagedmla.bench.decode_bench import BenchPlan, BenchResult, Measurement, Row

DTYPES = ("bf16", "fp16", "fp32")


def bench(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...; cpu times with a wall clock.")] = "cuda",
    shapes: Annotated[
        str,
        typer.Option(
            metavar="SETS", help="std (even, ragged and mtp), small or tiny; left out: std, small on a CPU."
        ),
    ] = "",
    heads: Annotated[
        str, typer.Option(metavar="COUNTS", help="Such as 16,128; left out: the ones of each batch.")
    ] = "",
    name_filter: Annotated[
        str, typer.Option("--filter", "-k", metavar="TEXT", help="Only shapes whose name contains TEXT.")
    ] = "",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of queries and cache: bf16, fp16 or fp32.")] = "bf16",
    backend: Annotated[
        list[str] | None, typer.Option(help="Of ours, repeatable; left out: the best that takes the shapes.")
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(help="split, persistent or auto, repeatable; left out: split and persistent."),
    ] = None,
    peers: Annotated[str, typer.Option(metavar="NAMES", help="all, none, or some, with commas.")] = "all",
    peers_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of peers' files; see docs/benchmarks.md.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the median counts.")] = 7,
    eager: Annotated[bool, typer.Option("--eager", help="Also time what a call costs the host.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there, after each shape.")
    ] = None,
) -> None:
    """Time decode on a GPU against the limit and against peers; a result that is wrong gets no number and exit status 1."""
    with user_errors():
        chosen = _device(device)
        plan, absent = make_plan(
            device=chosen,
            shapes=shapes or ("std" if chosen.type == "cuda" else "small"),
            heads=heads,
            name_filter=name_filter,
            page_size=page_size,
            dtype=dtype,
            backends=_words(backend),
            schedules=_words(schedule),
            peers=peers,
            peers_path=peers_path,
            rounds=rounds,
            eager=eager,
        )
        command = _command(
            device=device,
            shapes=shapes,
            heads=heads,
            filter=name_filter,
            page_size=page_size,
            dtype=dtype,
            backend=_words(backend),
            schedule=_words(schedule),
            peers=peers,
            # where somebody keeps the files says nothing about the figures
            peers_path="DIR" if peers_path else "",
            rounds=rounds,
            eager=eager,
        )
        _check_destination(json_file)
        result = _run(plan, absent, json_file, command)
    _print_result(result)
    if any(
        m.status in ("wrong", "failed") for row in result.rows for m in row.measurements[: len(plan.ours)]
    ):
        raise typer.Exit(EXIT_FAILED)


def make_plan(
    *,
    device: torch.device,
    shapes: str,
    heads: str,
    name_filter: str,
    page_size: int,
    dtype: str,
    backends: Sequence[str],
    schedules: Sequence[str],
    peers: str,
    peers_path: Path | None,
    rounds: int,
    eager: bool,
) -> tuple[BenchPlan, dict[str, str]]:
    """What the options ask for, and why a contender of theirs is not in it.

    Raises:
        InvalidArgument: an option's word is unknown, or no shape is left.
        Unsupported: every contender of ours refuses every shape.
    """
    import torch

    from pagedmla.bench.contenders import load_peers, our_contenders
    from pagedmla.bench.decode_bench import BenchPlan
    from pagedmla.bench.shapes import named_shapes

    dtypes = dict(zip(DTYPES, (torch.bfloat16, torch.float16, torch.float32), strict=True))
    if dtype not in dtypes:
        raise InvalidArgument("dtype", "dtype", "one of " + ", ".join(DTYPES), repr(dtype))
    chosen = named_shapes(_words([shapes]), _numbers("heads", heads), name_filter)
    if not chosen:
        raise InvalidArgument(
            "filter", "filter", f"text in a shape's name (shapes {shapes})", repr(name_filter)
        )
    ours, refused = our_contenders(device, chosen, page_size, dtypes[dtype], backends, schedules)
    loaded, absent = load_peers(_peer_names(peers), peers_path)
    plan = BenchPlan(device, chosen, ours, loaded, page_size, dtypes[dtype], rounds, eager)
    return plan, refused | absent


def _device(name: str) -> torch.device:
    import torch

    if name.startswith("cuda") and not torch.cuda.is_available():
        fail(
            "bench measures a GPU, and torch finds none on this machine; --device cpu times small shapes with a wall clock"
        )
    device = usable_device(name)
    if device.type not in ("cuda", "cpu"):
        raise InvalidArgument("device", "device", "cuda, cuda:1, ... or cpu", name)
    return device


def _run(plan: BenchPlan, absent: dict[str, str], json_file: Path | None, command: list[str]) -> BenchResult:
    from rich.console import Console

    from pagedmla.bench.decode_bench import run_bench
    from pagedmla.bench.machine import machine_line
    from pagedmla.bench.report import document
    from pagedmla.bench.results import write_result

    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    names = ", ".join(contender.name for contender in plan.contenders)
    progress.print(f"{machine_line(plan.device)}\n{len(plan.shapes)} shapes; {names}", markup=False)

    def row_done(result: BenchResult) -> None:
        progress.print(_progress_line(result.rows[-1]), markup=False)
        if json_file is not None:
            write_result(json_file, document(result), plan.device, command)

    return run_bench(plan, absent, row_done)


def _progress_line(row: Row) -> str:
    if row.floor is None:
        return f"{row.shape.name}: {row.detail}"
    times = (
        f"{m.contender} {m.status if m.time is None else format(m.time.median_us, '.1f')}"
        for m in row.measurements
    )
    return f"{row.shape.name}: floor {row.floor.us:.1f} us ({row.floor.bound}); {', '.join(times)}"


def _print_result(result: BenchResult) -> None:
    from rich.console import Console
    from rich.measure import Measurement as Width

    from pagedmla.bench.report import caption, summarise, summary_line

    console = Console(highlight=False)
    table = _table(result)
    if not console.is_terminal:
        # a file has no edge: nothing is cut or wrapped
        console.width = max(
            console.width, Width.get(console, console.options.update(max_width=2000), table).maximum
        )
    console.print(table)
    console.print(caption(result), markup=False, soft_wrap=True)
    for contender in result.plan.contenders:
        console.print(f"{contender.name}: {contender.version}", markup=False, soft_wrap=True)
    _print_notes(console, result)
    for ours in result.plan.ours:
        console.print(summary_line(summarise(result, ours.name)), markup=False, soft_wrap=True)


def _table(result: BenchResult) -> Table:
    from rich.table import Table

    from pagedmla.bench.machine import machine_line

    table = Table(title=machine_line(result.plan.device))
    table.add_column("shape", no_wrap=True)
    table.add_column("floor, us", justify="right", no_wrap=True)
    for contender in result.plan.contenders:
        table.add_column(contender.name, justify="right", no_wrap=True)
    for row in result.rows:
        floor = "-" if row.floor is None else f"{row.floor.us:.1f} {row.floor.bound}"
        table.add_row(row.shape.name, floor, *(_cell(result, row, m) for m in row.measurements))
    return table


def _cell(result: BenchResult, row: Row, measurement: Measurement) -> str:
    from pagedmla.bench.report import REFERENCE_PEER, floor_ratio, peer_ratios

    if measurement.time is None:
        return measurement.status
    name = measurement.contender
    lines = [f"{measurement.time.median_us:.1f} ({floor_ratio(row, name):.2f})"]
    if name in {ours.name for ours in result.plan.ours}:
        ratios = peer_ratios(row, name, [peer.name for peer in result.plan.peers])
        if ratios:
            lines.append(f"{min(ratios.values()):.2f}x best")
        if REFERENCE_PEER in ratios:
            lines.append(f"{ratios[REFERENCE_PEER]:.2f}x {REFERENCE_PEER}")
    if measurement.host is not None:
        lines.append(f"host {measurement.host.median_us:.1f}")
    return "\n".join(lines)


def _print_notes(console: Console, result: BenchResult) -> None:
    """Why a number is missing, each reason once."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in result.rows:
        if row.detail:
            console.print(f"{row.shape.name}: {row.detail}", markup=False, soft_wrap=True)
        for m in row.measurements:
            if m.detail:
                reasons.setdefault((m.contender, m.status, m.detail), []).append(row.shape.name)
    for (name, status, detail), where in reasons.items():
        console.print(f"{name} {status}: {detail} ({'; '.join(where)})", markup=False, soft_wrap=True)
    for name, reason in result.absent.items():
        console.print(f"{name} not measured: {reason}", markup=False, soft_wrap=True)


def _peer_names(text: str) -> list[str]:
    from pagedmla.bench.peers import PEER_NAMES

    if text in ("all", "none"):
        return list(PEER_NAMES) if text == "all" else []
    return _words([text])


def _words(given: Sequence[str] | None) -> list[str]:
    """The words of a repeatable option that also takes commas."""
    return [word.strip() for part in given or () for word in part.split(",") if word.strip()]


def _numbers(name: str, text: str) -> list[int] | None:
    try:
        return [int(word) for word in _words([text])] or None
    except ValueError:
        raise InvalidArgument(name, name, "whole numbers with commas between", repr(text)) from None


def _check_destination(json_file: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if json_file is None:
        return
    try:
        json_file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--json: {error}")
    if json_file.is_dir() or not os.access(json_file.parent, os.W_OK):
        fail(f"--json: {json_file} cannot be written")


def _command(**options: object) -> list[str]:
    """The words after ``python`` that measure the same again; options left at their defaults are left out."""
    import inspect

    defaults = {name: parameter.default for name, parameter in inspect.signature(bench).parameters.items()}
    words = ["-m", "pagedmla.cli", "bench"]
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words += [word for item in value for word in (option, item)]
        elif value not in ("", False, defaults.get(name)):
            words += [option, str(value)]
    return words
