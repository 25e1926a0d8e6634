"""The process in which an implementation runs: it says what it is about to do, so that its end has a name.

A kernel under test may crash, hang, corrupt memory or lose its device's context.  All of that happens in here; the parent
(``kit.py``) only reads plain values from a pipe.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.asking import WatchedSubject, ask, lost_context
from pagedmla.conformance.configurations import Configuration, configurations_for
from pagedmla.conformance.properties import properties_of
from pagedmla.conformance.subject import Subject, unwritten_memory_is_nan
from pagedmla.contract.errors import InvalidArgument, PagedMLAError, Unsupported

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
        declared: what of its answers is not as in the contract, in words.
    """

    name: str
    version: str
    configurations: tuple[Configuration, ...]
    declared: tuple[str, ...] = ()


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


def serve(connection: Connection, setup: Setup) -> None:
    """The whole life of the process: loads the implementation, and does jobs until the pipe is closed.

    Sends (word, value): first ("loading", None), then ("ready", Description) or ("unusable", error); for each property of a
    job ("asked", its index), for each example ("example", (how many are done, its repr)) and for each call
    ("call", ShownCall), then ("finding", (index, Finding)); at the end of a job ("done", None), or ("lost", None) when this
    process can do no more.
    """
    _leave_the_terminal(setup.log)
    connection.send(("loading", None))
    if setup.one_thread:
        torch.set_num_threads(1)
    try:
        adapter = load_adapter(setup.impl, setup.folder)
        device = torch.device(setup.device)
        with unwritten_memory_is_nan():
            # what torch imports for it at the first time takes seconds, which are no example's
            torch.empty(1, device=device)
        taken, declared = tuple(configurations_for(adapter, device)), adapter.conventions.deviations()
        description = Description(adapter.name, adapter.version, taken, declared)
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
    _end_with_the_parent()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable(file=2)
    # the parent asks for the stack before it kills what hangs
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)


def _end_with_the_parent() -> None:
    """A parent that is killed cannot kill what hangs in here; Linux does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
