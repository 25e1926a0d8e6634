"""Runs the cases of ``pagedmla check``, in this process or in several.

On a GPU nearly all of the time goes into compiling a kernel for each configuration, seconds apiece on one processor; several
processes share one card well, since each of its runs takes milliseconds.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pagedmla.conformance.cases import Case
    from pagedmla.conformance.runner import CaseResult

Job = tuple[str, "Case"]
"""(backend, case)."""

Report = Callable[[str, "CaseResult"], None]
"""Is told of each result as it comes: (backend, result)."""

_MOST_PROCESSES = 16


def default_processes(device: torch.device) -> int:
    """One on a CPU, whose threads a case may use; on a GPU one for each processor that may compile, 16 at most."""
    return 1 if device.type == "cpu" else min(_MOST_PROCESSES, os.cpu_count() or 1)


def run_jobs(
    jobs: list[Job], device: torch.device, processes: int, report: Report
) -> list[tuple[str, CaseResult]]:
    """Runs every job; results are in the order of ``jobs``, reports in the order in which they are done."""
    results: dict[int, CaseResult] = {}
    one_by_one = processes == 1 or len(jobs) == 1
    for place, result in _here(jobs, device) if one_by_one else _in_processes(jobs, device, processes):
        results[place] = result
        report(jobs[place][0], result)
    return [(backend, results[place]) for place, (backend, _) in enumerate(jobs)]


def _here(jobs: list[Job], device: torch.device) -> Iterator[tuple[int, CaseResult]]:
    from pagedmla.conformance import runner

    for place, (backend, case) in enumerate(jobs):
        try:
            result = runner.run_case(case, device, backend)
        except Exception as error:  # noqa: BLE001  (a compiler's error fails its case, not the check)
            result = _without_result(case, error)
        yield place, result


def _in_processes(jobs: list[Job], device: torch.device, processes: int) -> Iterator[tuple[int, CaseResult]]:
    # a forked child cannot use a CUDA device that its parent has touched
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context)
    try:
        running: dict[Future[CaseResult], int] = {}
        for place, (backend, case) in enumerate(jobs):
            try:
                running[pool.submit(_run_one, backend, case, str(device))] = place
            except BrokenProcessPool as error:
                yield place, _without_result(case, error)
        for done in as_completed(running):
            place = running[done]
            try:
                yield place, done.result()
            except BrokenProcessPool as error:
                # a process died: what it ran, and what was still to be run, has no result, and says so
                yield place, _without_result(jobs[place][1], error)
    finally:
        # whoever stops in the middle does not want to wait for the rest
        pool.shutdown(cancel_futures=True)


def _run_one(backend: str, case: Case, device: str) -> CaseResult:
    import torch

    # the processes are the parallelism
    torch.set_num_threads(1)
    return next(_here([(backend, case)], torch.device(device)))[1]


def _without_result(case: Case, error: Exception) -> CaseResult:
    from pagedmla.conformance.runner import CaseResult

    return CaseResult(case, False, math.nan, math.inf, math.nan, f"{type(error).__name__}: {error}")
