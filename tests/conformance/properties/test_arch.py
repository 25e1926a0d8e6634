"""The ARCH properties hold for a right decode, and each rejects one that answers what it should refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.properties.questions import (
    Faulty,
    each,
    each_configuration,
    each_fault,
    expect_broken,
    expect_kept,
    verdict,
)
from torch import Tensor

import pagedmla
from pagedmla.conformance.adapters.adapter import Adapter, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.function import FunctionAdapter
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.arch import PROPERTIES
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.subject import Refused

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


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


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Adapter) -> None:
    assert expect_broken(faulty, BY_NAME[name], examples=100).detail


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)


def test_any_exception_is_an_answer() -> None:
    def assertion(call: Call) -> Call:
        raise AssertionError("num_heads")

    assert verdict(Faulty(assertion), BY_NAME["wrong-arguments"]).status == "passed"
    assert verdict(Faulty(assertion), BY_NAME["absurd-options"]).status == "passed"


@pytest.mark.parametrize("name", ["wrong-arguments", "absurd-options"])
def test_a_no_is_an_answer_too(name: str) -> None:
    def refusing(call: Call) -> Call:
        raise Refused("NotImplementedError: such a call")

    found = verdict(Faulty(refusing), BY_NAME[name])
    assert (found.status, found.examples > 3) == ("passed", True)


def test_a_function_that_refuses_what_it_does_not_know_keeps_the_promises() -> None:
    def decode(*tensors: Tensor, **given: Any) -> Any:
        try:
            return pagedmla.decode(*tensors, **given)
        except (ValueError, TypeError, RuntimeError) as error:
            raise NotImplementedError("not taken") from error

    decode.features = ("validates",)  # type: ignore[attr-defined]
    for prop in PROPERTIES:
        expect_kept(FunctionAdapter(decode, "somebodys:decode"), prop)
