"""The process in which an implementation runs: it says what it is about to do, so that its end has a name.

A kernel under test may crash, hang, corrupt memory or lose its device's context.  All of that happens in here; the parent
(``kit.py``) only reads plain values from a pipe.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pagedmla.conformance.adapters.adapter import Adapter, Options
from pagedmla.conformance.configurations import Configuration, configurations_for
from pagedmla.conformance.examine import examine
from pagedmla.conformance.findings import Finding
from pagedmla.conformance.properties import properties_of
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.reproducer import ShownCall, reproducer, show
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Broken, Refused, Step, Subject, unwritten_memory_is_nan
from pagedmla.contract.errors import InvalidArgument, PagedMLAError, Unsupported

_SHRINK_SECONDS = 20.0
_NAN_KIND = "MEM"
_CALM = "kept with finite numbers around the tokens, and broken by nan there: see MEM"
_MOST_REFUSALS = 100
"""From the first example on; hypothesis by itself would try a thousand."""


@dataclass(frozen=True)
class Setup:
    """What a process is started with.

    Attributes:
        impl: what ``make_adapter`` takes, or an adapter that can be pickled.
        folder: of the software's files, or None.
        device: in torch's words.
        one_thread: whether other processes share the processors.
        log: file for what the implementation prints, C code's last words included.
    """

    impl: str | Adapter
    folder: Path | None
    device: str
    one_thread: bool
    log: Path


@dataclass(frozen=True)
class Description:
    """What the parent must know of an implementation, which it never loads itself.

    Attributes:
        name: of the adapter.
        version: of the software.
        configurations: of the kit's own, those that the implementation takes.
    """

    name: str
    version: str
    configurations: tuple[Configuration, ...]


@dataclass(frozen=True)
class Job:
    """All properties of a kind for one configuration.

    Attributes:
        kind: whose properties.
        configuration: what their examples are drawn for.
        first: index of the first property; those before it have been asked.
        examples: most examples of a property.
        seed: of the draws.
        time_limit_s: properties share it: past its share a property begins no new example.
    """

    kind: str
    configuration: Configuration
    first: int
    examples: int
    seed: int
    time_limit_s: float


def load_adapter(impl: str | Adapter, folder: Path | None = None) -> Adapter:
    """The adapter of ``impl``, its software loaded.

    Raises:
        InvalidArgument: there is no such implementation.
        Unsupported: its software is not here.
    """
    if isinstance(impl, str):
        from pagedmla.conformance.adapters import make_adapter

        adapter = make_adapter(impl)
    else:
        adapter = impl
    reason = adapter.load(folder)
    if reason is not None:
        raise Unsupported(
            "software", "impl", f"{adapter.name}'s software, installed or in the folder", reason
        )
    return adapter


def ask(
    prop: Property,
    subject: Subject,
    configuration: Configuration,
    *,
    examples: int,
    seed: int,
    seconds: float = float("inf"),
    begin: Callable[[int, str], None] = lambda done, example: None,
) -> Finding:
    """Asks ``subject`` for one property.

    Args:
        prop: what to ask.
        subject: whom.
        configuration: what examples are drawn for.
        examples: most examples.
        seed: of the draws.
        seconds: after so long no new example begins; one runs in any case.
        begin: is told of each example before it runs: how many are done, and its repr.

    Returns:
        What came of it.  "died" when the device's context was lost, after which the process is of no use, or when the
        check itself raised an error.
    """
    finding = _ask(prop, subject, configuration, examples, seed, seconds, begin)
    if finding.status != "failed" or prop.kind == _NAN_KIND or configuration.is_calm:
        return finding
    # nan around the tokens may spoil every kind for the one reason, which is that kind's
    calm = _ask(prop, subject, configuration.calm(), examples, seed, seconds, begin)
    if calm.status == "passed":
        calm = replace(calm, detail=_CALM)
    return replace(calm, seconds=finding.seconds + calm.seconds)


def _ask(
    prop: Property,
    subject: Subject,
    configuration: Configuration,
    examples: int,
    seed: int,
    seconds: float,
    begin: Callable[[int, str], None],
) -> Finding:
    finding = Finding(prop.kind, prop.name, prop.promise, configuration.name, "not applied")
    objection = prop.objection(subject.adapter, subject.device)
    if objection is not None:
        return replace(finding, detail=objection)
    started = time.monotonic()
    watch = _Watch(prop, subject.device, started + seconds, begin)
    try:
        verdict = examine(
            replace(prop, test=watch.test),
            subject,
            Scope(subject.adapter, configuration, subject.device),
            max_examples=examples,
            seed=seed,
            shrink_seconds=min(_SHRINK_SECONDS, seconds),
        )
        status, detail, example, steps = verdict.status, verdict.detail, verdict.example, verdict.steps
    except _Stopped as stopped:
        status, detail, example, steps = stopped.status, stopped.detail, stopped.example, stopped.steps
    except Exception as error:  # noqa: BLE001  (a fault of the check's own must not end the other checks)
        where = "".join(traceback.format_tb(error.__traceback__)[-1:]).strip()
        detail = f"the check itself raised {type(error).__name__}: {error}\n{where}"
        status, example, steps = "died", watch.example, ()
    finding = replace(finding, status=status, examples=watch.done, detail=detail, example=example)
    if finding.bad:
        script = reproducer(
            [show(subject.adapter, step, subject.device) for step in steps],
            impl=subject.adapter.name,
            prop=prop,
            detail=detail,
            example=example,
            device=subject.device,
        )
        finding = replace(finding, reproducer=script)
    return replace(finding, seconds=time.monotonic() - started)


class _Stopped(BaseException):
    """Ends a property before hypothesis would; no Exception, which hypothesis would catch and go on."""

    def __init__(self, status: str, detail: str, example: str = "", steps: tuple[Step, ...] = ()) -> None:
        super().__init__(detail)
        self.status, self.detail, self.example, self.steps = status, detail, example, steps


class _Watch:
    """A property's test, stopped when its time is over or all is refused, and looked after when it ends."""

    def __init__(
        self, prop: Property, device: torch.device, deadline: float, begin: Callable[[int, str], None]
    ) -> None:
        self.done = self.refused = 0
        self.broken = False
        self.example = ""
        self._prop, self._device, self._deadline, self._begin = prop, device, deadline, begin

    def test(self, subject: Subject, example: Any) -> None:
        """``Property.test``.

        Raises:
            Broken, Refused: what the property's own test says.
            _Stopped: the time is over, nothing is taken, or the device is lost.
        """
        # a broken promise is made smaller within a time of its own
        if self.done and not self.broken and time.monotonic() > self._deadline:
            raise _Stopped("passed", f"stopped after {self.done} examples: its time was over")
        self.example = repr(example)
        self._begin(self.done, self.example)
        try:
            self._prop.test(subject, example)
        except Broken as broken:
            self.broken = True
            self._check_context(broken.detail, broken.steps)
            raise
        except Refused as refused:
            self.refused += 1
            if not self.done and not self.broken and self.refused >= _MOST_REFUSALS:
                raise _Stopped("refused", str(refused)) from refused
            raise
        except SystemExit as error:
            self.broken = True
            raise Broken(f"raised SystemExit: {error.code}", *_last_step(subject)) from error
        self._check_context("", _last_step(subject))
        self.done += 1

    def _check_context(self, detail: str, steps: tuple[Step, ...]) -> None:
        """An error on the device shows late: it is looked for here, so that the next example is not blamed."""
        reason = lost_context(self._device)
        if reason:
            text = "; ".join(part for part in (detail, f"the device's context is lost: {reason}") if part)
            raise _Stopped("died", text, self.example, steps)


def lost_context(device: torch.device) -> str:
    """Why ``device`` takes no more work from this process, or an empty string; waits for the device."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


class WatchedSubject(Subject):
    """A subject that tells of every call before it is made, and remembers the last."""

    def __init__(
        self, adapter: Adapter, device: torch.device, called: Callable[[ShownCall], None] = lambda call: None
    ) -> None:
        super().__init__(adapter, device)
        self.last: Step | None = None
        self._called = called

    def require(self, spec: BatchSpec, options: Options) -> None:
        """As ``Subject.require``, which is asked before every call."""
        super().require(spec, options)
        self.last = Step(spec, options)
        self._called(show(self.adapter, self.last, self.device))


def _last_step(subject: Subject) -> tuple[Step, ...]:
    return (subject.last,) if isinstance(subject, WatchedSubject) and subject.last else ()


def serve(connection: Connection, setup: Setup) -> None:
    """The whole life of the process: loads the implementation, and does jobs until the pipe is closed.

    Sends (word, value): first ("ready", Description) or ("unusable", error); for each property of a job ("asked", its index),
    for each example ("example", (how many are done, its repr)) and for each call ("call", ShownCall), then
    ("finding", (index, Finding)); at the end of a job ("done", None), or ("lost", None) when this process can do no more.
    """
    _leave_the_terminal(setup.log)
    if setup.one_thread:
        torch.set_num_threads(1)
    try:
        adapter = load_adapter(setup.impl, setup.folder)
        device = torch.device(setup.device)
        with unwritten_memory_is_nan():
            # what torch imports for it at the first time takes seconds, which are no example's
            torch.empty(1, device=device)
        description = Description(adapter.name, adapter.version, tuple(configurations_for(adapter, device)))
    except PagedMLAError as error:
        connection.send(("unusable", error))
    except Exception as error:  # noqa: BLE001  (whatever somebody's module raises when it is imported)
        what = f"{type(error).__name__}: {error}"
        connection.send(
            ("unusable", InvalidArgument("impl", "impl", "an implementation that can be loaded", what))
        )
    else:
        connection.send(("ready", description))
        _do_jobs(connection, adapter, device)
    connection.close()
    # without the exit handlers of whatever was loaded: they may hang on a lost device
    os._exit(0)


def _do_jobs(connection: Connection, adapter: Adapter, device: torch.device) -> None:
    subject = WatchedSubject(adapter, device, lambda call: connection.send(("call", call)))
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        if not _do_job(connection, subject, job):
            connection.send(("lost", None))
            return
        if device.type == "cuda":
            # other processes share the card
            torch.cuda.empty_cache()
        connection.send(("done", None))


def _do_job(connection: Connection, subject: Subject, job: Job) -> bool:
    """Whether the process can go on."""
    end = time.monotonic() + job.time_limit_s
    properties = properties_of(job.kind)
    for index in range(job.first, len(properties)):
        connection.send(("asked", index))
        # what a quick one leaves goes to the others
        share = max(0.0, end - time.monotonic()) / (len(properties) - index)
        finding = ask(
            properties[index],
            subject,
            job.configuration,
            examples=job.examples,
            seed=job.seed,
            seconds=share,
            begin=lambda done, example: connection.send(("example", (done, example))),
        )
        connection.send(("finding", (index, finding)))
        if finding.status == "died" and lost_context(subject.device):
            return False
    return True


def _leave_the_terminal(log: Path) -> None:
    """Output goes to ``log``; ctrl-C is the parent's, which kills this process with all that it has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable(file=2)
    # the parent asks for the stack before it kills what hangs
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
