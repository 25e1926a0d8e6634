"""The EMPTY properties hold for a right decode, and each rejects one that trips over a hole."""

from __future__ import annotations

import pytest
import torch
from conformance.properties.questions import (
    CPU,
    SMALL,
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
from pagedmla.conformance.properties.empty import PROPERTIES
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.subject import Refused, Subject

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


def cells_of_holes_count(call: Call, result: Raw) -> Raw:
    return nudged(result) if bool((call.block_table[call.seq_lens == 0] == -1).all()) else result


def neighbours_nan_is_caught(call: Call, result: Raw) -> Raw:
    """A batch-wide maximum of the queries, rows of nobody and dead rows included."""
    return (torch.full_like(result[0], torch.nan), result[1]) if call.q.isnan().any() else result


class HolesSkipped(Ours):
    """Rows that see no key are left as they were."""

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        prepared = super().prepare(call, options)

        def run() -> Raw:
            own, own_lse = prepared.run()
            if out is None or lse is None or own_lse is None:
                return own, own_lse
            live = own_lse[:, :1] > -torch.inf
            return out.copy_(torch.where(live[..., None], own, out)), lse.copy_(
                torch.where(live, own_lse, lse)
            )

        return PreparedCall(run)


def nothing_over_nothing(call: Call, result: Raw) -> Raw:
    return (result[0] * torch.nan, result[1]) if not call.seq_lens.any() else result


def one_row_at_least(call: Call, result: Raw) -> Raw:
    return result if len(call.q) else (call.q.new_zeros(1, call.q.shape[1], call.kv_lora_rank), result[1])


def division_by_sequences(call: Call) -> Call:
    divmod(len(call.q), len(call.seq_lens))
    return call


FAULTS = [
    ("inert-holes", Faulty(spoil=cells_of_holes_count)),
    ("inert-holes", Faulty(spoil=neighbours_nan_is_caught)),
    ("stale-outputs", HolesSkipped("torch")),
    ("all-dead", Faulty(spoil=nothing_over_nothing)),
    ("no-rows", Faulty(spoil=one_row_at_least)),
    ("no-rows", Faulty(division_by_sequences)),
]


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Adapter) -> None:
    assert expect_broken(faulty, BY_NAME[name], examples=100).detail


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)


def test_who_refuses_a_batch_without_rows_is_not_accused() -> None:
    def refuse(call: Call) -> Call:
        raise ValueError("at least one sequence is needed")

    subject = Subject(Faulty(refuse), CPU)
    with pytest.raises(Refused, match="at least one sequence"):
        BY_NAME["no-rows"].test(subject, (SMALL.spec((), q_lens=()), {}))
