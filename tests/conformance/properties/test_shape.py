"""The SHAPE properties hold for a right decode, and each rejects one that is wrong for some heads or dimensions."""

from __future__ import annotations

from dataclasses import replace

from conformance.properties.questions import (
    Faulty,
    Raw,
    each,
    each_configuration,
    each_fault,
    expect_broken,
    expect_kept,
)

from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.properties.shape import PROPERTIES

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


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


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Adapter) -> None:
    assert expect_broken(faulty, BY_NAME[name], examples=100).detail


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)
