"""Examines an implementation: jobs in child processes, so that a crash or a hang is a finding like any other.

One job asks all properties of a kind for one configuration.  A process does many jobs, since importing torch is slow and what
was compiled stays compiled; one that crashed, hung or lost its device is replaced, and the job goes on with its next property.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path

import torch

from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.child import Description, Job, Setup, serve
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.findings import Finding, Report, blame_nan_once
from pagedmla.conformance.properties import KINDS, properties_of
from pagedmla.conformance.reproducer import exit_in_words, reproducer
from pagedmla.conformance.worker import Worker
from pagedmla.contract.errors import InvalidArgument

Told = Callable[[Finding, int, int], None]
"""Is told of each finding as it comes: (finding, how many there are, how many there will be)."""

DEFAULT_EXAMPLES = 20
DEFAULT_TIME_LIMIT_S = 300.0

_STARTUP_LIMIT_S = (
    120.0  # at least: for torch, a context on the card and huge shared objects, from a cold disk
)
_LOOK_EVERY_S = 1.0


def default_processes(device: torch.device) -> int:
    """Two on a CPU, of one thread each; on a GPU one for each processor that may compile kernels, 16 at most."""
    return min(2 if device.type == "cpu" else 16, os.cpu_count() or 1)


def run_kit(
    impl: str | Adapter,
    device: torch.device | str = "cpu",
    kinds: Sequence[str] | None = None,
    configurations: Sequence[Configuration] | None = None,
    *,
    examples: int = DEFAULT_EXAMPLES,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    processes: int | None = None,
    seed: int = 0,
    folder: Path | None = None,
    report: Told = lambda finding, done, total: None,
) -> Report:
    """Asks ``impl`` for every property of ``kinds`` in each of ``configurations``.

    A script that calls this needs ``if __name__ == "__main__":`` around it, since its children import it.

    Args:
        impl: what ``make_adapter`` takes, or an adapter that can be pickled.
        device: where.
        kinds: keys of ``KINDS``; None: all.
        configurations: None: those of the kit's own that the implementation takes.
        examples: most examples of a property.
        time_limit_s: a job begins no new example after so long, and is killed when one example takes longer than that.
        processes: how many at a time; None: ``default_processes``.
        seed: of the draws: the same seed draws the same examples.
        folder: of the software's files, where it is not installed.
        report: is told of each finding as it comes.

    Raises:
        InvalidArgument: an unknown kind or implementation, one that cannot be loaded, or a number out of range.
        Unsupported: the implementation's software is not here.
    """
    properties = {kind: len(properties_of(kind)) for kind in (KINDS if kinds is None else kinds)}
    for name, value in (("examples", examples), ("time_limit_s", time_limit_s), ("processes", processes)):
        if value is not None and value <= 0:
            raise InvalidArgument("range", name, "more than 0", repr(value))
    device = torch.device(device)
    began = time.monotonic()
    many = processes or default_processes(device)
    with tempfile.TemporaryDirectory(prefix="pagedmla-") as logs:
        setup = Setup(impl, folder, str(device), many > 1, Path(logs))
        examination = _Examination(setup, time_limit_s, report)
        try:
            described = examination.describe()
            columns = described.configurations if configurations is None else tuple(configurations)
            pairs = [(kind, column) for kind in properties for column in columns]
            jobs = [Job(kind, column, 0, examples, seed, time_limit_s) for kind, column in pairs]
            examination.total = sum(properties[job.kind] for job in jobs)
            findings = blame_nan_once(examination.run(jobs, many))
        finally:
            examination.kill()
    return Report(
        impl=impl if isinstance(impl, str) else described.name,
        version=described.version,
        declared=described.declared,
        device=str(device),
        seed=seed,
        examples=examples,
        findings=tuple(findings),
        seconds=time.monotonic() - began,
    )


@dataclass
class _Examination:
    """The parent's side: hands jobs out, and turns what the children say, or how they end, into findings."""

    setup: Setup
    time_limit_s: float
    report: Told
    total: int = 0
    _workers: list[Worker] = field(default_factory=list)
    _waiting: deque[tuple[int, Job]] = field(default_factory=deque)
    _found: dict[tuple[int, int], Finding] = field(default_factory=dict)
    _started: int = 0

    @property
    def _impl(self) -> str:
        impl = self.setup.impl
        return impl if isinstance(impl, str) else impl.name

    def describe(self) -> Description:
        """Starts the first process, which says what the implementation is.

        Raises:
            PagedMLAError: it cannot be loaded.
        """
        worker = self._start()
        while True:
            wait([worker.connection], timeout=_LOOK_EVERY_S)
            gone = worker.process.exitcode is not None
            for word, value in worker.messages():
                if word == "unusable":
                    raise value
                if word == "ready":
                    worker.ready = True
                    return value
                worker.listens = True
            end = self._end_of(worker, gone)
            if end is not None:
                worker.ask_where()
                got = f"{self._impl}: the process that loaded it {end[1]}; {worker.last_words()}"
                raise InvalidArgument("impl", "impl", "an implementation that can be loaded", got)

    def run(self, jobs: Sequence[Job], processes: int) -> list[Finding]:
        """Does all jobs; findings are in the order of ``jobs`` and their properties."""
        self._waiting.extend(enumerate(jobs))
        while self._waiting or any(worker.job for worker in self._workers):
            self._hand_out(processes)
            wait([worker.connection for worker in self._workers], min(_LOOK_EVERY_S, self.time_limit_s / 4))
            for worker in list(self._workers):
                self._attend(worker)
        return [self._found[key] for key in sorted(self._found)]

    def kill(self) -> None:
        """Ends every child."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _start(self) -> Worker:
        self._started += 1
        log = self.setup.log / f"{self._started}.log"
        # a forked child cannot use a CUDA device that its parent has touched
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, replace(self.setup, log=log)))
        process.start()
        # or the end of the child would not close the pipe
        theirs.close()
        worker = Worker(process, ours, log)
        self._workers.append(worker)
        return worker

    def _hand_out(self, processes: int) -> None:
        idle = [worker for worker in self._workers if worker.job is None]
        while self._waiting and (idle or len(self._workers) < processes):
            worker = idle.pop() if idle else self._start()
            worker.give(*self._waiting.popleft())

    def _attend(self, worker: Worker) -> None:
        """Hears what a child has to say, and sees whether it is still there."""
        # looked at before its messages are read: what it said before its end counts
        gone = worker.process.exitcode is not None
        end = None
        for word, value in worker.messages():
            if word == "loading":
                worker.listens = True
            elif word == "ready":
                worker.ready = True
                if worker.job is not None:
                    worker.give(worker.place, worker.job)
            elif word == "unusable":
                end = ("died", f"could not load the implementation again: {value}")
            elif word == "asked":
                worker.turn_to(value)
            elif word == "example":
                (worker.done, worker.example), worker.call = value, None
            elif word == "call":
                worker.call = value
            elif word == "finding":
                self._record(worker.place, *value)
                worker.turn_to(value[0] + 1)
            elif word == "done":
                worker.job = None
            elif word == "lost":
                self._replace(worker, worker.index)
                return
        end = end or self._end_of(worker, gone)
        if end is not None:
            self._bury(worker, *end)

    def _end_of(self, worker: Worker, gone: bool) -> tuple[str, str] | None:
        """(status, how) of a child that has ended, or that is silent for too long."""
        if gone or worker.closed:
            # the pipe goes a moment before the process
            worker.process.join(_LOOK_EVERY_S)
            code = worker.process.exitcode
            return "died", "closed its pipe and stayed" if code is None else exit_in_words(code)
        limit = self.time_limit_s if worker.ready else max(self.time_limit_s, _STARTUP_LIMIT_S)
        busy = worker.job is not None or not worker.ready
        if busy and time.monotonic() - worker.sign > limit:
            return "hung", f"was killed: nothing had moved for {limit:g} s"
        return None

    def _bury(self, worker: Worker, status: str, how: str) -> None:
        """A finding for what the child did when it ended; the rest of its job goes to another."""
        job = worker.job
        if job is None:
            self._replace(worker, 0)
            return
        if status == "hung":
            worker.ask_where()
        detail = f"the process {how}\n{worker.last_words()}".rstrip()
        calls = [] if worker.call is None else [worker.call]
        properties = properties_of(job.kind)
        # one that cannot even load the implementation again leaves its whole job, or there would be no end
        following = worker.index + 1 if worker.ready else len(properties)
        for index, prop in list(enumerate(properties))[worker.index : following]:
            script = reproducer(
                calls, impl=self._impl, prop=prop, detail=detail, example=worker.example,
                device=self.setup.device, ending=how,
            )  # fmt: skip
            finding = Finding(
                prop.kind, prop.name, prop.promise, job.configuration.name, status, worker.done, detail,
                worker.example, script, time.monotonic() - worker.since,
            )  # fmt: skip
            self._record(worker.place, index, finding)
        self._replace(worker, following)

    def _replace(self, worker: Worker, following: int) -> None:
        """Ends a child; what is left of its job waits for another, first in the line."""
        if worker.job is not None and following < len(properties_of(worker.job.kind)):
            self._waiting.appendleft((worker.place, replace(worker.job, first=following)))
        worker.kill()
        self._workers.remove(worker)

    def _record(self, place: int, index: int, finding: Finding) -> None:
        self._found[place, index] = finding
        self.report(finding, len(self._found), self.total)
