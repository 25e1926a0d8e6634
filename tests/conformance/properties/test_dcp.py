"""The DCP properties hold for a right decode, and each rejects one whose results of shards do not merge."""

from __future__ import annotations

import math
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
from pagedmla.conformance.properties.dcp import PROPERTIES, _owned
from pagedmla.conformance.properties.property import Property, Scope
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


def base_two(call: Call, options: Options) -> Raw:
    out, lse = right(call, options)
    return out, lse / math.log(2)


def empty_ranks_have_a_finite_lse(call: Call, options: Options) -> Raw:
    out, lse = right(call, options)
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


def lse_of_the_longest_sequence(call: Call, options: Options) -> Raw:
    """Normalised by the batch's longest length, as if every rank had as many tokens."""
    out, lse = right(call, options)
    return out, lse + torch.log(call.seq_lens.max() / call.seq_lens.clamp(min=1))[:, None]


CAUGHT = [
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


@pytest.mark.parametrize(("name", "fault"), CAUGHT)
def test_a_fault_is_caught(name: str, fault: Callable[[Call, Options], Raw]) -> None:
    found = verdict(Faulty(fault), BY_NAME[name])
    assert found.status == "failed", found
    assert found.steps


def test_every_property_can_fail() -> None:
    assert {name for name, _ in CAUGHT} == set(BY_NAME)
