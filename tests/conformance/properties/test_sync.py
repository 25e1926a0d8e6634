"""The SYNC properties hold for a right decode, and each rejects one whose bits change, or that shares or keeps a state."""

from __future__ import annotations

from dataclasses import replace

import torch
from conformance.properties.questions import each, each_configuration, each_fault, expect_broken, expect_kept
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Adapter, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.properties.sync import PROPERTIES

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


class EverySeventhRun(Ours):
    """A race that is lost now and then."""

    runs = 0

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        prepared = super().prepare(call, options, out, lse)

        def run() -> tuple[Tensor, Tensor | None]:
            self.runs += 1
            made, made_lse = prepared.run()
            return made, made_lse if self.runs % 7 else torch.nextafter(made_lse, made_lse + 1)  # type: ignore[type-var]

        return PreparedCall(run)


class OneForAll(Ours):
    """What was prepared last is what every prepared call of its shape runs with: a state of the whole process."""

    last: Call | None = None

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        self.last = call

        def run() -> tuple[Tensor, Tensor | None]:
            now = self.last if self.last is not None and self.last.q.shape == call.q.shape else call
            return super(OneForAll, self).prepare(now, options, out, lse).run()

        return PreparedCall(run)


class ReadsEarly(Ours):
    """Reads the queries when it is prepared."""

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        return super().prepare(replace(call, q=call.q.clone()), options, out, lse)


class OneOutput(Ours):
    """Writes to the same outputs every time, as a captured graph does: no fault."""

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        made, made_lse = super().prepare(call, options).run()
        return super().prepare(
            call, options, out if out is not None else made, lse if lse is not None else made_lse
        )


FAULTS = [
    ("many-times", EverySeventhRun("torch")),
    ("two-calls", OneForAll("torch")),
    ("late-inputs", ReadsEarly("torch")),
]


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Adapter) -> None:
    expect_broken(faulty, BY_NAME[name])


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)


@each(PROPERTIES)
def test_outputs_that_are_made_once_are_no_fault(prop: Property) -> None:
    expect_kept(OneOutput("torch"), prop)
