"""The SHAPE properties hold for a right decode, and each rejects one that is wrong for some heads or dimensions."""

from __future__ import annotations

from collections.abc import Callable
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
from pagedmla.conformance.properties.shape import PROPERTIES
from pagedmla.conformance.subject import Subject

Raw = tuple[Tensor, Tensor | None]

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


class Faulty(Ours):
    """The torch backend with one fault: in what it makes of a call, or in what it makes of the result."""

    def __init__(
        self, change: Callable[[Call], Call] | None = None, spoil: Callable[[Call, Raw], Raw] | None = None
    ) -> None:
        super().__init__("torch")
        self.change, self.spoil = change, spoil

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        prepared = super().prepare(self.change(call) if self.change else call, options, out, lse)
        spoil = self.spoil
        return prepared if spoil is None else PreparedCall(lambda: spoil(call, prepared.run()))


def tail_heads_lost(call: Call, result: Raw) -> Raw:
    """Above 16 heads, those past a multiple of 16."""
    heads = call.q.shape[1]
    if heads > 16 and heads % 16:
        result[0][:, heads // 16 * 16 :] = 0.0
    return result


def only_request_zero(call: Call) -> Call:
    return replace(call, q=call.q[:1].expand_as(call.q))


def rotated_part_ignored_at_256(call: Call) -> Call:
    if call.kv_lora_rank != 256:
        return call
    q = call.q.clone()
    q[..., 256:] = 0.0
    return replace(call, q=q)


def one_head_is_another_kernel(call: Call, result: Raw) -> Raw:
    if call.q.shape[1] <= 2:
        result[0].zero_()
    return result


FAULTS = [
    ("head-counts", Faulty(spoil=tail_heads_lost)),
    ("head-counts", Faulty(only_request_zero)),
    ("dimensions", Faulty(rotated_part_ignored_at_256)),
    ("head-ranges", Faulty(spoil=one_head_is_another_kernel)),
]


@pytest.mark.parametrize(
    ("name", "faulty"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_fault_is_rejected(name: str, faulty: Faulty) -> None:
    found = verdict(faulty, BY_NAME[name], examples=100)
    assert found.status == "failed", found
    assert found.detail
    assert found.steps


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)
