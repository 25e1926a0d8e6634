"""The DCP properties hold for a right decode, and each rejects one whose results of shards do not merge."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from conformance.properties.questions import (
    Answering,
    Decoded,
    each,
    each_configuration,
    each_fault,
    expect_broken,
    expect_kept,
    right,
)

from pagedmla.conformance.adapters.adapter import Options
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.dcp import PROPERTIES, _owned
from pagedmla.conformance.properties.property import Property

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


def base_two(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out, lse / math.log(2)


def empty_ranks_have_a_finite_lse(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


def lse_of_the_longest_sequence(call: Call, options: Options) -> Decoded:
    """Normalised by the batch's longest length, as if every rank had as many tokens."""
    out, lse = right(call, options)
    return out, lse + torch.log(call.seq_lens.max() / call.seq_lens.clamp(min=1))[:, None]


FAULTS = [
    ("sharded-keys", base_two),
    ("sharded-keys", lse_of_the_longest_sequence),
    ("idle-ranks", base_two),
    ("idle-ranks", empty_ranks_have_a_finite_lse),
]


@pytest.mark.parametrize("length", [0, 1, 7, 64, 131])
@pytest.mark.parametrize("interleave", [None, 1, 3, 16])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_token_has_one_owner(ranks: int, interleave: int | None, length: int) -> None:
    owned = [_owned(length, rank, ranks, interleave) for rank in range(ranks)]
    assert torch.cat(owned).sort().values.tolist() == list(range(length))
    if interleave is None:
        assert torch.cat(owned).tolist() == list(range(length))
    for rank, tokens in enumerate(owned):
        if interleave is not None:
            assert all(token // interleave % ranks == rank for token in tokens.tolist())


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Callable[[Call, Options], Decoded]) -> None:
    expect_broken(Answering(faulty), BY_NAME[name])


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)
