"""The SYNC properties hold for a right decode, and each rejects one whose bits change, or that shares or keeps a state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Adapter, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration, configurations_for
from pagedmla.conformance.examine import Verdict, examine
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.properties.sync import PROPERTIES
from pagedmla.conformance.subject import Subject

CPU = torch.device("cpu")
SMALL = Configuration(
    "small", {"num_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "page_size": 16}, most_keys=150
)
BY_NAME = {prop.name: prop for prop in PROPERTIES}


def verdict(
    adapter: Adapter, prop: Property, configuration: Configuration = SMALL, examples: int = 30
) -> Verdict:
    scope = Scope(adapter, configuration, CPU)
    return examine(prop, Subject(adapter, CPU), scope, max_examples=examples, shrink_seconds=0.0)


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
@pytest.mark.parametrize("configuration", configurations_for(Ours("torch"), CPU), ids=lambda c: c.name)
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    found = verdict(Ours("torch"), prop, configuration, 2)
    assert found.status == "passed", f"{found.detail}\n{found.example}"


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    found = verdict(Ours("torch"), prop)
    assert found.status == "passed", f"{found.detail}\n{found.example}"
    assert found.examples > 3


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


CAUGHT = [
    ("many-times", EverySeventhRun("torch")),
    ("two-calls", OneForAll("torch")),
    ("late-inputs", ReadsEarly("torch")),
]


@pytest.mark.parametrize(("name", "adapter"), CAUGHT)
def test_a_fault_is_caught(name: str, adapter: Adapter) -> None:
    found = verdict(adapter, BY_NAME[name])
    assert found.status == "failed", found
    assert found.steps


def test_every_property_can_fail() -> None:
    assert {name for name, _ in CAUGHT} == set(BY_NAME)


@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.name)
def test_outputs_that_are_made_once_are_no_fault(prop: Property) -> None:
    found = verdict(OneOutput("torch"), prop)
    assert found.status == "passed", found
