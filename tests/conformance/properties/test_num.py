"""The NUM properties hold for a right decode, and each rejects low precision, or bits that are not a row's own."""

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
from pagedmla.conformance.properties.num import PROPERTIES, _shift
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


class ACounter:
    """Other bits in every second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Call, options: Options) -> Raw:
        out, lse = right(call, options)
        self.calls += 1
        return out, torch.nextafter(lse, lse + 1) if self.calls % 2 else lse


def bits_depend_on_the_batch(call: Call, options: Options) -> Raw:
    out, lse = right(call, options)
    return out, torch.nextafter(lse, lse + 1) if len(call.seq_lens) % 2 else lse


def bits_depend_on_the_row(call: Call, options: Options) -> Raw:
    out, lse = right(call, options)
    lse[2:] = torch.nextafter(lse[2:], lse[2:] + 1)
    return out, lse


def scores_in_half_precision(call: Call, options: Options) -> Raw:
    out, lse = right(call, options)
    lost = (lse > 65504 * call.softmax_scale)[..., None]
    return out.masked_fill(lost, torch.nan), lse


def maximum_starts_at_minus_ten_thousand(call: Call, options: Options) -> Raw:
    out, lse = right(call, options)
    lost = (lse < -1e4) & (lse != -torch.inf)
    return out.masked_fill(lost[..., None], 0.0), lse


def sums_in_bfloat16(call: Call, options: Options) -> Raw:
    """Flat weights, which is what it is asked with: the values are added up one by one."""
    out, lse = right(call, options)
    for row, length in enumerate(call.spec.seq_lens):
        tokens = torch.arange(length)
        pages = call.block_table[row, tokens // call.page_size].long()
        values = call.kv_cache[pages, tokens % call.page_size, : call.kv_lora_rank]
        total = torch.zeros(call.kv_lora_rank, dtype=torch.bfloat16)
        for value in values:
            total = total + value
        out[row] = total.float() / length
    return out, lse


CAUGHT = [
    ("same-bits-again", ACounter()),
    ("batch-invariance", bits_depend_on_the_batch),
    ("batch-invariance", bits_depend_on_the_row),
    ("large-scores", scores_in_half_precision),
    ("large-scores", maximum_starts_at_minus_ten_thousand),
    ("long-sums", sums_in_bfloat16),
]


def test_scores_are_moved_past_half_precision() -> None:
    """What is asked is what is meant, in every dtype that can hold it."""
    for dtype, least in (("bf16", 2.9e5), ("fp32", 2.9e5), ("fp16", 2.9e5)):
        for sign in (1, -1):
            call = _shift(SMALL.spec((40,), dtype=dtype), sign * 3e5)
            _, lse = pagedmla.reference.decode(*(getattr(call, name) for name in TENSORS), **call.semantics())
            assert bool((sign * lse > least).all())


@pytest.mark.parametrize(("name", "fault"), CAUGHT)
def test_a_fault_is_caught(name: str, fault: Callable[[Call, Options], Raw]) -> None:
    found = verdict(Faulty(fault), BY_NAME[name])
    assert found.status == "failed", found
    assert found.steps


def test_every_property_can_fail() -> None:
    assert {name for name, _ in CAUGHT} == set(BY_NAME)
