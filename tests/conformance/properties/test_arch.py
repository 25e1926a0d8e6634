"""The ARCH properties hold for a right decode, and each rejects one that answers what it should refuse."""

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
from pagedmla.conformance.properties.arch import PROPERTIES
from pagedmla.conformance.properties.property import Property, Scope
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


def odd_parts_are_cut(call: Call) -> Call:
    """An odd rotated part loses its last number, without a word."""
    width = call.q.shape[-1]
    if (width - call.kv_lora_rank) % 2 == 0:
        return call
    return replace(call, q=call.q[..., : width - 1], kv_cache=call.kv_cache[..., : width - 1])


class FewerSplitsThanOne(Ours):
    """No splits, no work: the result is never written."""

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        splits = options.get("num_kv_splits")
        if isinstance(splits, int) and not isinstance(splits, bool) and splits < 1:
            shape = (*call.q.shape[:2], call.kv_lora_rank)
            return PreparedCall(lambda: (torch.empty(shape), torch.empty(shape[:2])))
        return super().prepare(call, options, out, lse)


def rows_come_from_the_shorter(call: Call) -> Call:
    """Sizes that differ are cut to the smaller one."""
    if call.block_table.dim() != 2 or len(call.block_table) >= len(call.seq_lens):
        return call
    count = len(call.block_table)
    return replace(call, q=call.q[:count], seq_lens=call.seq_lens[:count])


def sign_of_the_scale_ignored(call: Call) -> Call:
    return replace(call, softmax_scale=abs(call.softmax_scale))


def device_fault(call: Call) -> Call:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


FAULTS = [
    ("wild-shapes", Faulty(odd_parts_are_cut)),
    ("absurd-options", FewerSplitsThanOne("torch")),
    ("wrong-arguments", Faulty(rows_come_from_the_shorter)),
    ("wrong-arguments", Faulty(sign_of_the_scale_ignored)),
    ("wrong-arguments", Faulty(device_fault)),
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


def test_any_exception_is_an_answer() -> None:
    def assertion(call: Call) -> Call:
        raise AssertionError("num_heads")

    assert verdict(Faulty(assertion), BY_NAME["wrong-arguments"]).status == "passed"
    assert verdict(Faulty(assertion), BY_NAME["absurd-options"]).status == "passed"
