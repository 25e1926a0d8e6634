"""The QLEN properties hold for a right decode, and each rejects one whose query tokens see the wrong keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla.conformance.adapters.adapter import Adapter, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration, configurations_for
from pagedmla.conformance.examine import Verdict, examine
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.properties.qlen import PROPERTIES, one_by_one
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Subject

Raw = tuple[Tensor, Tensor]
TENSORS = ("q", "kv_cache", "block_table", "seq_lens")

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


def right(call: Call, options: Options, **changes: Any) -> Raw:
    """The torch backend on a call of which some arguments are changed."""
    tensors = {name: changes.pop(name, getattr(call, name)) for name in TENSORS}
    return pagedmla.decode(
        *tensors.values(), **{**call.semantics(), **options, "backend": "torch", **changes}
    )


class Faulty(Ours):
    """The torch backend with one fault."""

    def __init__(self, fault: Callable[[Call, Options], Raw]) -> None:
        super().__init__("torch")
        self.fault = fault

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        def run() -> Raw:
            own_out, own_lse = self.fault(call, options)
            return own_out if out is None else out.copy_(own_out), own_lse if lse is None else lse.copy_(
                own_lse
            )

        return PreparedCall(run)


def no_mask(call: Call, options: Options) -> Raw:
    return right(call, options, causal=False)


def always_masked(call: Call, options: Options) -> Raw:
    return right(call, options, causal=True)


def last_query_seen_by_all(call: Call, options: Options) -> Raw:
    """Planned for one query token: the newest one stands for its sequence."""
    rows = torch.arange(len(call.q))
    starts = torch.tensor(call.spec.starts)
    owner = torch.bucketize(rows, starts[1:], right=True)
    last = torch.where(owner < len(starts) - 1, starts[1:][owner.clamp(max=len(starts) - 2)] - 1, rows)
    return right(call, options, q=call.q[last])


def square_mask(call: Call, options: Options) -> Raw:
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


def other_bits_for_several_queries(call: Call, options: Options) -> Raw:
    out, lse = right(call, options)
    return out, torch.nextafter(lse, lse + 1) if max(call.spec.query_counts) > 1 else lse


CAUGHT = [
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
    found = verdict(EvenOnly("torch"), BY_NAME[name])
    assert found.status == "passed", found
    assert found.examples > 3


def test_queries_one_by_one_see_the_keys_up_to_their_own() -> None:
    call = one_by_one(SMALL.spec((131, 2, 0, 5), q_lens=(2, 4, 1, 0)))
    assert call.seq_lens.tolist() == [130, 131, 0, 0, 1, 2, 0]
    assert call.cu_seqlens_q is None
    call = one_by_one(SMALL.spec((131, 2), q_lens=(2, 4), causal=False))
    assert call.seq_lens.tolist() == [131, 131, 2, 2, 2, 2]


@pytest.mark.parametrize(("name", "fault"), CAUGHT)
def test_a_fault_is_caught(name: str, fault: Callable[[Call, Options], Raw]) -> None:
    found = verdict(Faulty(fault), BY_NAME[name])
    assert found.status == "failed", found
    assert found.steps


def test_every_property_can_fail() -> None:
    assert {name for name, _ in CAUGHT} == set(BY_NAME)
