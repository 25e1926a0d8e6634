"""``pagedmla compile``: the Triton kernels for GPUs that are not here, and what they need of each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedmla.cli.console import EXIT_FAILED, fail, user_errors
from pagedmla.contract.errors import InvalidArgument

if TYPE_CHECKING:
    from rich.table import Table

    from pagedmla.contract.target import Target
    from pagedmla.kernels.compile_gate import Compiled, TargetReport

GATE_ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "gfx950")
"""What continuous integration compiles for."""


def compile(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCH", help="sm_90, gfx942, ..., repeatable; left out: " + ", ".join(GATE_ARCHS)
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--all", help="Every distinct variant: hours; left out: every pair of what variants differ in."
        ),
    ] = False,
    kernel: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Such as decode, repeatable; left out: all.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every variant's figures there.")
    ] = None,
) -> None:
    """Compile the Triton kernels for GPUs, present or not; exit 1 if a variant fails or needs more than its GPU has."""
    with user_errors():
        targets = _targets(arch or GATE_ARCHS)
        _check_kernels(kernel or ())
        if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
            fail(f"--json: {json_file} cannot be written")
        began = time.perf_counter()
        reports = _run(targets, whole, kernel or [])
        seconds = time.perf_counter() - began
    _print(reports)
    typer.echo(_summary(reports, seconds))
    if json_file is not None:
        from pagedmla.bench.results import write_result

        write_result(json_file, _document(reports, whole, seconds), command=_command(arch, whole, kernel))
    if any(report.failures for report in reports):
        raise typer.Exit(EXIT_FAILED)


def _targets(archs: Iterable[str]) -> list[Target]:
    """The records of ``archs``, each once.

    Raises:
        InvalidArgument: one of them is unknown.
    """
    from pagedmla.contract.target import KNOWN_TARGETS

    for name in archs:
        if name not in KNOWN_TARGETS:
            raise InvalidArgument("arch", "arch", "one of " + ", ".join(KNOWN_TARGETS), repr(name))
    return [KNOWN_TARGETS[name] for name in dict.fromkeys(archs)]


def _check_kernels(names: Iterable[str]) -> None:
    from pagedmla.kernels.compile_gate import KERNEL_NAMES

    for name in names:
        if name not in KERNEL_NAMES:
            raise InvalidArgument("kernel", "kernel", "some of " + ", ".join(KERNEL_NAMES), repr(name))


def _run(targets: list[Target], whole: bool, kernels: Sequence[str]) -> list[TargetReport]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from pagedmla.kernels.compile_gate import run_gate

    console = Console(stderr=True, highlight=False)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def done(target: Target, compiled: Compiled, total: int) -> None:
            progress.update(task, advance=1, total=total, description=f"{target.arch} {compiled.kernel}")

        return run_gate(targets, whole, done, kernels)


def _print(reports: list[TargetReport]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for report in reports:
        console.print(_table(report))
        for one in report.failures:
            console.print(
                f"FAILED {report.target.arch} {one.variant}: {one.failure}", markup=False, soft_wrap=True
            )


def _table(report: TargetReport) -> Table:
    """One line a kernel."""
    from rich.table import Table

    target = report.target
    table = Table(
        title=f"{target.arch} ({target.name}): {target.shared_memory_bytes:,} bytes of shared memory",
        title_justify="left",
    )
    table.add_column("kernel")
    for name in (
        "variants",
        "most shared, bytes",
        "most registers",
        "spill",
        "most spilled, bytes",
        "failed",
    ):
        table.add_column(name, justify="right")
    for kernel in report.kernels:
        table.add_row(
            kernel.kernel,
            str(kernel.variants),
            f"{kernel.largest_shared_bytes:,}",
            str(kernel.most_registers),
            str(kernel.variants_that_spill),
            str(kernel.most_spilled_bytes),
            str(kernel.failures),
        )
    return table


def _summary(reports: list[TargetReport], seconds: float) -> str:
    compiled = sum(len(report.compiled) for report in reports)
    failures = sum(len(report.failures) for report in reports)
    return f"{compiled - failures} compiled and fit, {failures} failed in {seconds:.0f} s; nothing was run"


def _document(reports: list[TargetReport], whole: bool, seconds: float) -> dict[str, Any]:
    return {
        "what": "Compiled without the hardware; nothing was run.",
        "variants": "all" if whole else "pairwise",
        "seconds": round(seconds, 1),
        "targets": {report.target.arch: report.document() for report in reports},
    }


def _command(archs: list[str] | None, whole: bool, kernels: list[str] | None) -> list[str]:
    """The words after ``python`` that print the same again."""
    words = ["-m", "pagedmla.cli", "compile"]
    for option, values in (("--arch", archs), ("--kernel", kernels)):
        words += [word for value in values or () for word in (option, value)]
    return [*words, "--all"] if whole else words
