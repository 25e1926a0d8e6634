"""Asks an implementation for one property: it stops in time, looks after the device, and writes down what came of it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pagedmla.conformance.adapters.adapter import Adapter, Options
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.examine import examine
from pagedmla.conformance.findings import NAN_KIND, ONLY_WITH_NAN, Finding
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.reproducer import ShownCall, reproducer, show
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Broken, Refused, Step, Subject

_SHRINK_SECONDS = 20.0
_MOST_REFUSALS = 100
"""From the first example on; hypothesis by itself would try a thousand."""


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
        What came of it.  What fails with nan around the tokens alone says so in ``only_with_nan``.  "died" when the
        device's context was lost, after which the process is of no use, or when the check itself raised an error.
    """
    started = time.monotonic()

    def once(asked: Configuration) -> Finding:
        return _ask(prop, subject, asked, examples, seed, seconds, begin)

    finding = once(configuration)
    may_be_nan = finding.status == "failed" and prop.kind != NAN_KIND and not configuration.is_calm
    # nan around the tokens may break every kind for one reason; a fault that does not come again has another
    if may_be_nan and once(configuration).status == "failed":
        calm = once(configuration.calm())
        if calm.bad:
            finding = calm
        elif calm.status == "passed":
            finding = replace(finding, only_with_nan=True, detail=f"{finding.detail}; {ONLY_WITH_NAN}")
    return replace(finding, seconds=time.monotonic() - started)


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
