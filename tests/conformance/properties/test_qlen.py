"""The QLEN properties hold for a right decode, and each rejects one whose query tokens see the wrong keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conformance.properties.questions import (
    SMALL,
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
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.properties.qlen import PROPERTIES, one_by_one
from pagedmla.conformance.spec import BatchSpec

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


def no_mask(call: Call, options: Options) -> Decoded:
    return right(call, options, causal=False)


def always_masked(call: Call, options: Options) -> Decoded:
    return right(call, options, causal=True)


def last_query_seen_by_all(call: Call, options: Options) -> Decoded:
    """Planned for one query token: the newest one stands for its sequence."""
    rows = torch.arange(len(call.q))
    starts = torch.tensor(call.spec.starts)
    owner = torch.bucketize(rows, starts[1:], right=True)
    last = torch.where(owner < len(starts) - 1, starts[1:][owner.clamp(max=len(starts) - 2)] - 1, rows)
    return right(call, options, q=call.q[last])


def square_mask(call: Call, options: Options) -> Decoded:
    """Aligned at the top left: query j of n sees keys 0 .. j, whatever came before."""
    out, lse = right(call, options)
    for place, q_len in enumerate(call.spec.query_counts):
        length = call.seq_lens[place : place + 1]
        if not call.causal or q_len < 2:
            continue
        for query in range(q_len):
            row = call.spec.starts[place] + query
            out[row], lse[row] = (
                result[0]
                for result in right(
                    call,
                    options,
                    q=call.q[row : row + 1],
                    block_table=call.block_table[place : place + 1],
                    seq_lens=length.clamp(max=query + 1),
                    cu_seqlens_q=None,
                )
            )
    return out, lse


def other_bits_for_several_queries(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out, torch.nextafter(lse, lse + 1) if max(call.spec.query_counts) > 1 else lse


FAULTS = [
    ("even-queries", no_mask),
    ("even-queries", always_masked),
    ("even-queries", square_mask),
    ("ragged-queries", no_mask),
    ("ragged-queries", last_query_seen_by_all),
    ("unrolled-queries", square_mask),
    ("unrolled-queries", last_query_seen_by_all),
    ("unrolled-bits", other_bits_for_several_queries),
]


class EvenOnly(Ours):
    """Takes as many query tokens for each sequence, and no other batch."""

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        return "ragged" if spec.ragged else super().refuses(spec, options, device)


@pytest.mark.parametrize("name", ["even-queries", "unrolled-queries"])
def test_one_that_takes_even_batches_only_is_examined_with_those(name: str) -> None:
    assert expect_kept(EvenOnly("torch"), BY_NAME[name]).examples > 3


def test_queries_one_by_one_see_the_keys_up_to_their_own() -> None:
    call = one_by_one(SMALL.spec((131, 2, 0, 5), q_lens=(2, 4, 1, 0)))
    assert call.seq_lens.tolist() == [130, 131, 0, 0, 1, 2, 0]
    assert call.cu_seqlens_q is None
    call = one_by_one(SMALL.spec((131, 2), q_lens=(2, 4), causal=False))
    assert call.seq_lens.tolist() == [131, 131, 2, 2, 2, 2]


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Callable[[Call, Options], Decoded]) -> None:
    expect_broken(Answering(faulty), BY_NAME[name])


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)
