"""The PAGE properties hold for a right decode, and each rejects one that misreads pages, their sizes or their table."""

from __future__ import annotations

from dataclasses import replace

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

from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.page import PROPERTIES
from pagedmla.conformance.properties.property import Property

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


def page_of_an_odd_id_counts(call: Call, result: Raw) -> Raw:
    return nudged(result) if int(call.block_table[0, 0]) % 2 else result


def cut_at_128(call: Call) -> Call:
    """A larger page is read again from its start."""
    slots = torch.arange(call.page_size) % 128
    return replace(call, kv_cache=call.kv_cache[:, slots])


def full_last_page_is_empty(call: Call) -> Call:
    """seq_len mod page_size without the two ones around it."""
    full = (call.seq_lens % call.page_size == 0) & (call.seq_lens > 0)
    return replace(call, seq_lens=(call.seq_lens - call.page_size * full).int())


def last_page_holds_all(call: Call) -> Call:
    """Every page counts as full."""
    return replace(call, seq_lens=(-(-call.seq_lens // call.page_size) * call.page_size).int())


def table_as_wide_as_the_pool(call: Call) -> Call:
    rows, columns = call.block_table.shape
    cells = torch.arange(rows)[:, None] * len(call.kv_cache) + torch.arange(columns)
    return replace(call, block_table=call.block_table.flatten()[cells.clamp(max=rows * columns - 1)])


def a_page_has_one_owner(call: Call) -> Call:
    """Whoever lists a page after another sequence gets that sequence's second page."""
    table = call.block_table.clone()
    if table.shape[1] > 1:
        table[1:, 0] = torch.where(table[1:, 0] == table[0, 0], table[0, 1], table[1:, 0])
    return replace(call, block_table=table)


FAULTS = [
    ("moved-pages", Faulty(spoil=page_of_an_odd_id_counts)),
    ("page-sizes", Faulty(cut_at_128)),
    ("every-length", Faulty(full_last_page_is_empty)),
    ("every-length", Faulty(last_page_holds_all)),
    ("sizes-apart", Faulty(table_as_wide_as_the_pool)),
    ("shared-pages", Faulty(a_page_has_one_owner)),
]


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Adapter) -> None:
    assert expect_broken(faulty, BY_NAME[name], examples=100).detail


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)
