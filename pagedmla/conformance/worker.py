"""A child process as its parent sees it: its pipe, the last that it said, and how it is ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from pagedmla.conformance.child import Job
from pagedmla.conformance.reproducer import ShownCall, last_words


@dataclass
class Worker:
    """A child process, and the last that it said.

    Attributes:
        process, connection, log: the child, its pipe, and the file that it prints into.
        place, job: what it does, or is to do when it is ready, and the job's place in the list; None: nothing.
        sign: when it last said something, or was last given something.
        printed_before: bytes that it had printed when it was given its job.
        listens, ready: whether it can be asked where it is, and whether it has loaded the implementation.
        closed: whether its end of the pipe is gone.
        index: of the property that is being asked, or comes next.
        since, done, example, call: of that property: its begin, examples done, the running one, its last call.
    """

    process: SpawnProcess
    connection: Connection
    log: Path
    place: int = 0
    job: Job | None = None
    sign: float = field(default_factory=time.monotonic)
    printed_before: int = 0
    listens: bool = False
    ready: bool = False
    closed: bool = False
    index: int = 0
    since: float = 0.0
    done: int = 0
    example: str = ""
    call: ShownCall | None = None

    def give(self, place: int, job: Job) -> None:
        """Gives it a job, now or when it is ready."""
        self.place, self.job, self.sign = place, job, time.monotonic()
        self.printed_before = self._printed()
        self.turn_to(job.first)
        if self.ready:
            try:
                self.connection.send(job)
            except OSError:
                self.closed = True

    def turn_to(self, index: int) -> None:
        """It asks a property now, or will next."""
        self.index, self.since = index, time.monotonic()
        self.done, self.example, self.call = 0, "", None

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What it has said since."""
        while not self.closed:
            try:
                if not self.connection.poll():
                    return
                message = self.connection.recv()
            except Exception:  # noqa: BLE001  (one that dies in mid-sentence leaves no whole pickle)
                self.closed = True
                return
            self.sign = time.monotonic()
            yield message

    def kill(self) -> None:
        """Kills it with all that it has started, which is in its process group."""
        if self.process.is_alive():
            try:
                os.killpg(self.process.pid or 0, signal.SIGKILL)
            except ProcessLookupError:
                # it has no group of its own yet
                self.process.kill()
        self.process.join()
        self.connection.close()

    def ask_where(self) -> None:
        """Makes it print its stack: of one that is to be killed next."""
        before = self._printed()
        if self.listens and self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            end = time.monotonic() + 0.5
            while self._printed() == before and time.monotonic() < end:
                time.sleep(0.02)

    def last_words(self) -> str:
        """What matters of what it printed for its job."""
        printed = self.log.read_bytes() if self.log.exists() else b""
        return last_words(printed[self.printed_before :].decode(errors="replace"))

    def _printed(self) -> int:
        """Bytes."""
        return self.log.stat().st_size if self.log.exists() else 0
