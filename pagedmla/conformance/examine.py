"""Asks one property of one implementation: draws examples, and makes the first one that breaks it small."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, reject, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.errors import Flaky, Unsatisfiable

from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.subject import Broken, Refused, Step, Subject


@dataclass(frozen=True)
class Verdict:
    """What came of a property.

    Attributes:
        status: "passed", "failed", or "refused" when the implementation took no example.
        examples: how many were run to their end.
        detail: what is wrong, or the last refusal.
        example: repr of the smallest failing example.
        steps: the calls that show the failure.
        seconds: how long it took.
    """

    status: str
    examples: int
    detail: str = ""
    example: str = ""
    steps: tuple[Step, ...] = ()
    seconds: float = 0.0


def examine(
    prop: Property,
    subject: Subject,
    scope: Scope,
    *,
    max_examples: int = 20,
    seed: int = 0,
    shrink_seconds: float = 20.0,
    begin: Callable[[str], None] = lambda example: None,
) -> Verdict:
    """Draws up to ``max_examples`` examples of ``prop`` and runs them.

    Args:
        prop: the property.
        subject: whom to ask.
        scope: what to draw for.
        max_examples: most examples that are drawn; refused ones do not count.
        seed: of the draws; the same seed draws the same examples.
        shrink_seconds: how long a failing example is made smaller for.
        begin: is told of each example before it runs, so that a crash has a name.
    """
    started = time.monotonic()
    run = _Run(prop, subject, shrink_seconds, begin)
    test = given(prop.examples(scope))(run.one)
    test = hypothesis_seed(seed)(test)
    test = settings(
        max_examples=max(1, round(max_examples * prop.share)),
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )(test)
    # flaky: a fault with a memory, which did not come again; the example that showed it is kept
    with suppress(Broken, Unsatisfiable, Flaky):
        test()
    seconds = time.monotonic() - started
    if run.smallest is not None:
        example, broken = run.smallest
        return Verdict("failed", run.done, broken.detail, example, broken.steps, seconds)
    if run.done == 0:
        return Verdict("refused", 0, run.refusal or "no example could be drawn", seconds=seconds)
    return Verdict("passed", run.done, seconds=seconds)


class _Run:
    """The state of an examination: hypothesis calls ``one`` again and again."""

    def __init__(
        self, prop: Property, subject: Subject, shrink_seconds: float, begin: Callable[[str], None]
    ) -> None:
        self.done = 0
        self.refusal = ""
        self.smallest: tuple[str, Broken] | None = None
        self._prop, self._subject, self._begin = prop, subject, begin
        self._shrink_seconds = shrink_seconds
        self._failing: dict[str, Broken] = {}
        self._first_failure = 0.0

    def one(self, example: Any) -> None:
        text = repr(example)
        if text in self._failing:
            # known: hypothesis shows its smallest example once more at the end
            self.smallest = (text, self._failing[text])
            raise self._failing[text]
        if self._failing and time.monotonic() - self._first_failure > self._shrink_seconds:
            # time for making it smaller is over: nothing new fails any more
            return
        self._begin(text)
        try:
            self._prop.test(self._subject, example)
        except Refused as refused:
            self.refusal = str(refused)
            reject()
        except Broken as broken:
            if not self._failing:
                self._first_failure = time.monotonic()
            self._failing[text] = broken
            self.smallest = (text, broken)
            raise
        self.done += 1
