"""``pagedmla bench``: decode on a GPU against the machine's limit and against other projects' kernels."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedmla.cli.bench_print import print_result, progress_line
from pagedmla.cli.console import EXIT_FAILED, fail, usable_device, user_errors
from pagedmla.contract.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

    from pagedmla.bench.decode_bench import BenchPlan, BenchResult, How

DTYPES = ("bf16", "fp16", "fp32")


def bench(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ...; cpu times with a wall clock.")] = "cuda",
    shapes: Annotated[
        str,
        typer.Option(
            metavar="SETS",
            help="std (even, ragged, mtp), extra (long, pages, queries, heads), small or tiny; left out: std, small on a CPU.",
        ),
    ] = "",
    heads: Annotated[
        str, typer.Option(metavar="COUNTS", help="Such as 16,128; left out: the ones of each batch.")
    ] = "",
    name_filter: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            "-k",
            metavar="TEXT",
            help="The shape of this name, or all whose name contains it, repeatable; without --shapes, of extra too.",
        ),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page, for shapes that name none.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of queries and cache: bf16, fp16 or fp32.")] = "bf16",
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Of ours, repeatable; left out or auto: the best for each shape."),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="split, persistent or auto, repeatable; left out: auto, the first two for a named backend."
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="all, none, or some, with commas; also module:function, called as decode is.",
        ),
    ] = "all",
    peers_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of peers' files; see docs/performance.md.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the median counts.")] = 7,
    eager: Annotated[
        bool, typer.Option("--eager", help="Also time eager calls, and what they cost the host.")
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Also time with nothing of the input in the L2 cache.")
    ] = False,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Also print the kernels of each decode and their times.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there, after each shape.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measure nothing: draw the figures of FILE as PNG and SVG."),
    ] = None,
    plot_to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where --plot draws; left out: beside FILE.")
    ] = None,
) -> None:
    """Time decode on a GPU against the limit and against peers; a result that is wrong gets no number and exit status 1."""
    if plot is not None:
        _draw(plot, plot_to or plot.parent)
        return
    with user_errors():
        from pagedmla.bench.decode_bench import How

        chosen = _device(device)
        plan, absent = make_plan(
            device=chosen,
            shapes=shapes,
            heads=heads,
            name_filter=name_filter or (),
            page_size=page_size,
            dtype=dtype,
            backends=_words(backend),
            schedules=_words(schedule),
            peers=peers,
            peers_path=peers_path,
            how=How(rounds, cold, eager, breakdown),
        )
        command = _command(
            device=device,
            shapes=shapes,
            heads=heads,
            filter=name_filter or [],
            page_size=page_size,
            dtype=dtype,
            backend=_words(backend),
            schedule=_words(schedule),
            peers=peers,
            # where somebody keeps the files says nothing about the figures
            peers_path="DIR" if peers_path else "",
            rounds=rounds,
            eager=eager,
            cold=cold,
            breakdown=breakdown,
        )
        _check_destination(json_file)
        result = _run(plan, absent, json_file, command)
    print_result(result)
    if any(
        m.status in ("wrong", "failed") for row in result.rows for m in row.measurements[: len(plan.ours)]
    ):
        raise typer.Exit(EXIT_FAILED)


def make_plan(
    *,
    device: torch.device,
    shapes: str,
    heads: str,
    name_filter: Sequence[str],
    page_size: int,
    dtype: str,
    backends: Sequence[str],
    schedules: Sequence[str],
    peers: str,
    peers_path: Path | None,
    how: How,
) -> tuple[BenchPlan, dict[str, str]]:
    """What the options ask for, and why a contender of theirs is not in it.

    Raises:
        InvalidArgument: an option's word is unknown, or no shape is left.
        Unsupported: every contender of ours refuses every shape.
    """
    import torch

    from pagedmla.bench.contenders import load_peers, our_contenders
    from pagedmla.bench.decode_bench import BenchPlan
    from pagedmla.bench.shapes import find_shapes, named_shapes

    dtypes = dict(zip(DTYPES, (torch.bfloat16, torch.float16, torch.float32), strict=True))
    if dtype not in dtypes:
        raise InvalidArgument("dtype", "dtype", "one of " + ", ".join(DTYPES), repr(dtype))
    counts = _numbers("heads", heads)
    if shapes:
        chosen = named_shapes(_words([shapes]), counts, name_filter)
    else:
        chosen = find_shapes("std" if device.type == "cuda" else "small", counts, name_filter)
    if not chosen:
        wanted = f"text in a shape's name (shapes {shapes or 'std and extra'})"
        raise InvalidArgument("filter", "filter", wanted, ", ".join(map(repr, name_filter)))
    ours, refused = our_contenders(device, chosen, page_size, dtypes[dtype], backends, schedules)
    loaded, absent = load_peers(_peer_names(peers), peers_path)
    plan = BenchPlan(device, chosen, ours, loaded, page_size, dtypes[dtype], how)
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
        progress.print(progress_line(result.rows[-1]), markup=False)
        if json_file is not None:
            write_result(json_file, document(result), plan.device, command)

    return run_bench(plan, absent, row_done)


def _peer_names(text: str) -> list[str]:
    from pagedmla.bench.peers import PEER_NAMES

    if text == "none":
        return []
    return [name for word in _words([text]) for name in (PEER_NAMES if word == "all" else (word,))]


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


def _draw(file: Path, folder: Path) -> None:
    from pagedmla.bench.figures import Figures

    try:
        from pagedmla.bench.plot import draw
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        fail("--plot needs matplotlib: pip install 'pagedmla[plot]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figures = Figures(json.loads(file.read_text(encoding="utf-8")))
        written = draw(figures, folder, file.stem)
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"--plot: {file} has no figures of pagedmla bench: {type(error).__name__}: {error}")
    for path in written:
        typer.echo(path)
