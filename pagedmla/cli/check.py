"""``pagedmla check``: every accepted configuration of this machine, against the fp64 oracle; or any implementation."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedmla.cli.check_impl import ImplOptions, check_impl
from pagedmla.cli.check_runs import Job, default_processes, run_jobs
from pagedmla.cli.console import EXIT_FAILED, fail, usable_device, user_errors

if TYPE_CHECKING:
    import torch

    from pagedmla.conformance.runner import CaseResult


def check(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; left out: cuda if there is one.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Check this backend only; left out: every one that may be chosen here.")
    ] = None,
    name_filter: Annotated[
        str, typer.Option("--filter", "-k", metavar="TEXT", help="Only cases whose name contains TEXT.")
    ] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many cases, spread evenly over the list.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Run so many at a time; left out: 1 on a CPU (--impl: 2), one a processor on a GPU."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
    impl: Annotated[
        str, typer.Option(metavar="NAME", help="Examine this implementation; module:function for your own.")
    ] = "",
    kind: Annotated[
        str,
        typer.Option(metavar="KINDS", help="With --impl: kinds of fault, such as PAGE,LSE; left out: all."),
    ] = "",
    config: Annotated[
        str, typer.Option(metavar="TEXT", help="With --impl: configurations with TEXT in their name.")
    ] = "",
    examples: Annotated[
        int | None, typer.Option(min=1, help="With --impl: most examples of a property; left out: 20.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(min=1, help="With --impl: seconds until what does not move is killed; left out: 300."),
    ] = None,
    peers: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --impl: folder of the software's files.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --impl: of the examples; left out: 0.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --impl: write the report as a page there.")
    ] = None,
) -> None:
    """Run every accepted configuration of this machine against the oracle, or ask an implementation; exit 1 if any fails."""
    of_impl = ImplOptions(kind, config, examples, time_limit, peers, seed, html)
    if impl:
        others = {"--backend": backend, "--filter": name_filter, "--limit": limit}
        _only_with("without --impl", [name for name, value in others.items() if value not in (None, "")])
        check_impl(impl, of_impl, device, processes, as_json)
        return
    _only_with("with --impl NAME", of_impl.given())
    with user_errors():
        chosen_device = usable_device(device)
        jobs = select_jobs(chosen_device, backend, name_filter, limit)
        if not jobs:
            fail(f"no case is selected (filter {name_filter!r}, device {chosen_device}): nothing was checked")
        began = time.perf_counter()
        count = processes or default_processes(chosen_device)
        if as_json:
            results = run_jobs(jobs, chosen_device, count, lambda backend, result: None)
        else:
            results = _run_with_progress(jobs, chosen_device, count)
        seconds = time.perf_counter() - began
    failed = [(name, result) for name, result in results if not result.passed]
    if as_json:
        typer.echo(json.dumps(_document(chosen_device, results, seconds), indent=2, allow_nan=False))
    else:
        _print_summary(results, failed, seconds)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _only_with(condition: str, given: list[str]) -> None:
    if given:
        fail(f"{', '.join(given)}: only {condition}")


def select_jobs(device: torch.device, backend: str | None, name_filter: str, limit: int | None) -> list[Job]:
    """The cases to run on ``device``, each with the backend to run it; without a name, those that may be chosen there.

    Raises:
        InvalidArgument: no backend is called ``backend``.
    """
    from pagedmla.conformance.cases import cases_for
    from pagedmla.contract.support import backends_to_choose_from, check_backend_name
    from pagedmla.contract.target import Target

    check_backend_name(backend)
    target = Target.detect(device)
    names = backends_to_choose_from(target) if backend is None else [backend]
    jobs = [(name, case) for name in names for case in cases_for(target, name) if name_filter in case.name]
    if limit is None or len(jobs) <= limit:
        return jobs
    return [jobs[index * len(jobs) // limit] for index in range(limit)]


def _run_with_progress(jobs: list[Job], device: torch.device, processes: int) -> list[tuple[str, CaseResult]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from pagedmla.bench.machine import machine_line
    from pagedmla.cli.devices import device_line

    console = Console(highlight=False)
    console.print(
        f"{machine_line()}\nchecking {len(jobs)} configurations on {device_line(device)}", markup=False
    )
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(jobs))

        def report(backend: str, result: CaseResult) -> None:
            progress.update(task, advance=1, description=f"{backend} {result.case.name}")
            if not result.passed:
                console.print(f"FAILED {backend} {result.case.name}: {result.detail}", markup=False)

        return run_jobs(jobs, device, processes, report)


def _worst(results: list[tuple[str, CaseResult]]) -> tuple[str, CaseResult]:
    return max(results, key=lambda item: _worse_when_nan(item[1].out_bound_ratio))


def _worse_when_nan(error: float) -> float:
    """NaN compares false with everything, and no error is worse."""
    return math.inf if math.isnan(error) else error


def _print_summary(
    results: list[tuple[str, CaseResult]], failed: list[tuple[str, CaseResult]], seconds: float
) -> None:
    backend, worst = _worst(results)
    lse = max(_worse_when_nan(result.lse_error) for _, result in results)
    typer.echo(
        f"worst error: out {_worse_when_nan(worst.out_bound_ratio):.3f} of its bound, lse {lse:.1e}"
        f" ({backend} {worst.case.name})"
    )
    for name, result in failed:
        typer.echo(f"FAILED {name} {result.case.name}: {result.detail}")
    typer.echo(f"{len(results) - len(failed)} passed, {len(failed)} failed in {seconds:.1f} s")


def _document(device: torch.device, results: list[tuple[str, CaseResult]], seconds: float) -> dict[str, Any]:
    from pagedmla.bench.machine import machine_line, versions
    from pagedmla.cli.devices import device_line

    backend, worst = _worst(results)
    passed = sum(result.passed for _, result in results)
    return {
        "machine": machine_line(),
        "versions": versions(),
        "device": str(device),
        "target": device_line(device),
        "seconds": round(seconds, 3),
        "selected": len(results),
        "passed": passed,
        "failed": len(results) - passed,
        "worst": {
            "backend": backend,
            "case": worst.case.name,
            "out_bound_ratio": _number(worst.out_bound_ratio),
        },
        "cases": [_case_fields(name, result) for name, result in results],
    }


def _case_fields(backend: str, result: CaseResult) -> dict[str, Any]:
    return {
        "backend": backend,
        "name": result.case.name,
        "passed": result.passed,
        "out_error": _number(result.out_error),
        "out_bound_ratio": _number(result.out_bound_ratio),
        "lse_error": _number(result.lse_error),
        "detail": result.detail,
    }


def _number(value: float) -> float | str:
    """``value`` itself, or its name where JSON has no number for it."""
    return value if math.isfinite(value) else str(value)
