"""The MEM properties hold for a right decode, and each rejects one that reads or writes what is not its own."""

from __future__ import annotations

import torch
from conformance.properties.questions import (
    Faulty,
    Raw,
    each,
    each_configuration,
    each_fault,
    expect_broken,
    expect_kept,
    nudged,
)
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Adapter, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.mem import PROPERTIES
from pagedmla.conformance.properties.property import Property

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


def poison_counts(call: Call, result: Raw) -> Raw:
    return result if call.kv_cache.isnan().any() else nudged(result)


def last_row_spills(call: Call, result: Raw) -> Raw:
    out, lse = result
    end = out.storage_offset() + out.numel()
    if end < out.untyped_storage().nbytes() // out.element_size():
        out.as_strided((1,), (1,), end)[0] = 0.0
    return out, lse


def table_cleaned_in_place(call: Call) -> Call:
    call.block_table.clamp_(0, len(call.kv_cache) - 1)
    return call


def queries_scaled_in_place(call: Call, result: Raw) -> Raw:
    call.q.mul_(2.0)
    return result


class PlanOfAnAddressIsKept(Ours):
    """A plan is found again by its queries, though another call has used its memory in between."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.planned: list[Tensor] = []

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        prepared = super().prepare(call, options, out, lse)
        stale = any(q is call.q for q in self.planned) and self.planned[-1] is not call.q
        self.planned.append(call.q)
        return PreparedCall(lambda: nudged(prepared.run())) if stale and len(call.q) else prepared


def bad_values_raise(call: Call) -> Call:
    owned = torch.arange(call.block_table.shape[1]) * call.page_size < call.seq_lens[:, None]
    bad = owned & ((call.block_table < 0) | (call.block_table >= len(call.kv_cache)))
    if bool(bad.any()):
        raise IndexError("a page outside the pool")
    return call


def lengths_are_trusted(call: Call, result: Raw) -> Raw:
    """A length past the table runs into the rows of the next sequence."""
    too_long = (call.seq_lens > call.block_table.shape[1] * call.page_size) | (call.seq_lens < 0)
    for place in too_long.nonzero().flatten().tolist():
        result[0][place + 1 :] = 0.0
    return result


FAULTS = [
    ("poison", Faulty(spoil=poison_counts)),
    ("guard-bands", Faulty(spoil=last_row_spills)),
    ("inputs-stay", Faulty(table_cleaned_in_place)),
    ("inputs-stay", Faulty(spoil=queries_scaled_in_place)),
    ("earlier-calls", PlanOfAnAddressIsKept()),
    ("bad-values", Faulty(bad_values_raise)),
    ("bad-values", Faulty(spoil=lengths_are_trusted)),
]


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Adapter) -> None:
    assert expect_broken(faulty, BY_NAME[name], examples=100).detail


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)
