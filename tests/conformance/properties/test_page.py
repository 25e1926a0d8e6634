"""The PAGE properties hold for a right decode, and each rejects one that misreads pages, their sizes or their table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Adapter, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration, configurations_for
from pagedmla.conformance.examine import Verdict, examine
from pagedmla.conformance.properties.page import PROPERTIES
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.subject import Subject

Raw = tuple[Tensor, Tensor | None]

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


class Faulty(Ours):
    """The torch backend with one fault: in what it makes of a call, or in what it makes of the result."""

    def __init__(
        self, change: Callable[[Call], Call] | None = None, spoil: Callable[[Call, Raw], Raw] | None = None
    ) -> None:
        super().__init__("torch")
        self.change, self.spoil = change, spoil

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        prepared = super().prepare(self.change(call) if self.change else call, options, out, lse)
        spoil = self.spoil
        return prepared if spoil is None else PreparedCall(lambda: spoil(call, prepared.run()))


def nudged(result: Raw) -> Raw:
    """The same but for one bit of one number, far inside every bound."""
    out, lse = result
    assert lse is not None
    lse[0, 0] = torch.nextafter(lse[0, 0], torch.tensor(torch.inf))
    return out, lse


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


@pytest.mark.parametrize(
    ("name", "faulty"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_fault_is_rejected(name: str, faulty: Faulty) -> None:
    found = verdict(faulty, BY_NAME[name], examples=100)
    assert found.status == "failed", found
    assert found.detail
    assert found.steps


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)
