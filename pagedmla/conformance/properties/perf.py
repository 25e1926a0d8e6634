"""PERF: a step launches its kernels and does nothing else: it waits for nothing and allocates nothing.

No time is measured here: whether a step is fast is for benchmarks.  Values are checked in the same run, since a kernel that
does nothing waits for nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from hypothesis import strategies as st

from pagedmla.conformance.adapters.adapter import Prepared
from pagedmla.conformance.properties.mem import nan_outputs
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import specs
from pagedmla.conformance.subject import Broken, Step, Subject, raised_errors_are_broken

_STEPS = 5

Example = tuple[BatchSpec, Any]


class Watch(Protocol):
    """What is known of a device while calls are made."""

    def no_waiting(self) -> Any:
        """A context in which whoever waits for the device gets a RuntimeError."""

    def allocations(self) -> int:
        """Allocations on the device so far."""


class CudaWatch:
    """What torch knows of a CUDA device: waits and allocations that go through torch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """See ``Watch``."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def allocations(self) -> int:
        """See ``Watch``."""
        return int(torch.cuda.memory_stats(self.device)["allocation.all.allocated"])


watch_of: Callable[[torch.device], Watch] = CudaWatch
"""What watches a device."""


@st.composite
def _one(draw: st.DrawFn, scope: Scope) -> Example:
    spec = specs(scope.configuration, max_q_len=2, even=draw(st.booleans()))
    return draw(spec.filter(lambda spec: sum(spec.query_counts) > 0)), draw(scope.options())


def _warm(subject: Subject, example: Example, step: Step) -> Prepared:
    """A prepared call that ran twice, on given outputs, and was right: what is compiled or made once is there by now."""
    spec, options = example
    subject.require(spec, options)
    out, lse = nan_outputs(subject, spec, options)
    call = subject.build(spec)
    with raised_errors_are_broken(step):
        prepared = subject.adapter.prepare(call, options, out, lse)
        prepared.run()
        raw = prepared.run()
    subject.check(subject.normalise(*raw, spec, options), spec, options)
    return prepared


def _waits_for_nothing(subject: Subject, example: Example) -> None:
    step = Step(*example, "a prepared call with out and lse given, run for the third time")
    prepared = _warm(subject, example, step)
    with raised_errors_are_broken(step), watch_of(subject.device).no_waiting():
        try:
            for _ in range(_STEPS):
                prepared.run()
        except RuntimeError as error:
            raise Broken(f"run() waits for the device: {error}", step) from error


def _allocates_nothing(subject: Subject, example: Example) -> None:
    step = Step(*example, "a prepared call with out and lse given, run for the third time")
    prepared = _warm(subject, example, step)
    watch = watch_of(subject.device)
    before = watch.allocations()
    with raised_errors_are_broken(step):
        for _ in range(_STEPS):
            prepared.run()
    made = watch.allocations() - before
    if made:
        raise Broken(f"{_STEPS} runs made {made} allocations on the device", step)


_NEEDS, _WHERE = frozenset({"no_sync", "out"}), frozenset({"cuda"})

PROPERTIES = (
    Property(
        "PERF",
        "no-waiting",
        "run() of a prepared call with out and lse given never waits for the device",
        _one,
        _waits_for_nothing,
        needs=_NEEDS,
        device_types=_WHERE,
    ),
    Property(
        "PERF",
        "no-allocation",
        "run() of a prepared call with out and lse given allocates nothing on the device",
        _one,
        _allocates_nothing,
        needs=_NEEDS,
        device_types=_WHERE,
    ),
)
