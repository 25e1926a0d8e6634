"""The MODEL properties hold for a right decode, and each rejects one with another scale or another rotated part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.properties.questions import (
    CPU,
    SMALL,
    Faulty,
    each,
    each_configuration,
    each_fault,
    expect_broken,
    expect_kept,
)
from torch import Tensor

from pagedmla import reference
from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call, build
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.model import PROPERTIES, _unabsorbed
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.subject import Subject, blind_rows

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


def scale_guessed(call: Call) -> Call:
    return replace(call, softmax_scale=call.q.shape[-1] ** -0.5)


def scale_at_most_one(call: Call) -> Call:
    return replace(call, softmax_scale=min(call.softmax_scale, 1.0))


def rotated(call: Call, name: str, order: Callable[[Tensor], Tensor]) -> Call:
    tensor = getattr(call, name)
    parts = tensor[..., : call.kv_lora_rank], order(tensor[..., call.kv_lora_rank :])
    return replace(call, **{name: torch.cat(parts, -1)})


def pairs_taken_apart(call: Call) -> Call:
    """(2i, 2i + 1) is read as (i, i + d/2) in the cache alone."""
    return rotated(call, "kv_cache", lambda rope: torch.cat([rope[..., ::2], rope[..., 1::2]], -1))


def rotated_part_left_out(call: Call) -> Call:
    return rotated(call, "q", torch.zeros_like)


FAULTS = [
    ("scale", Faulty(scale_guessed)),
    ("scale", Faulty(scale_at_most_one)),
    ("absorbed", Faulty(pairs_taken_apart)),
    ("absorbed", Faulty(rotated_part_left_out)),
    ("rotated-order", Faulty(pairs_taken_apart)),
    ("rotated-order", Faulty(rotated_part_left_out)),
]


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Adapter) -> None:
    assert expect_broken(faulty, BY_NAME[name], examples=100).detail


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)


@pytest.mark.parametrize(
    "fields", [{}, {"q_lens": (3, 3)}, {"dtype": "e4m3fn"}, {"q_lens": (4, 1), "rows_after": 2}], ids=str
)
def test_the_unabsorbed_queries_are_the_stored_ones(fields: dict[str, Any]) -> None:
    """W_UK^T q_nope is the query that the kernel gets, to float64's roundings."""
    call = build((5, 2), num_heads=3, kv_lora_rank=32, qk_rope_head_dim=8, **fields)
    q_nope, q_pe, w_uk = _unabsorbed(call, seed=4)
    live = ~blind_rows(call.spec)
    stored = call.q.double() * (1.0 if call.q_scale is None else torch.tensor(call.q_scale).double())
    absorbed = torch.cat([reference.absorb_query(q_nope, w_uk), q_pe], -1)
    torch.testing.assert_close(absorbed[live], stored[live], rtol=1e-13, atol=1e-13)


def test_rows_without_keys_may_hold_anything() -> None:
    """Three queries over two keys: the first sees none, and what it holds is poison."""
    example = (SMALL.spec((2, 40), q_lens=(3, 3)), 0, {})
    BY_NAME["absorbed"].test(Subject(Ours("torch"), CPU), example)
