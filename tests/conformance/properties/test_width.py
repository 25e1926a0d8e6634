"""The WIDTH properties hold for a right decode, and each rejects one that cuts an offset to 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
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
    unclaimed,
)
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Adapter, Options, Prepared
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties import width
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.properties.width import PROPERTIES
from pagedmla.conformance.subject import Refused, Subject

pytestmark = pytest.mark.large

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


def page_offsets_in_32_bits(size_of_a_number: int) -> Callable[[Call], Call]:
    """Signed, in numbers (1) or in bytes of bf16 (2); what lies before the pool is taken for its first page."""

    def change(call: Call) -> Call:
        stride = call.kv_cache.stride(0) * size_of_a_number
        offsets = (call.block_table.long() * stride + 2**31) % 2**32 - 2**31
        return replace(call, block_table=(offsets // stride).clamp(min=0).int())

    return change


def stride_in_30_bits(name: str) -> Callable[[Call], Call]:
    def change(call: Call) -> Call:
        tensor = getattr(call, name)
        first, *others = tensor.stride()
        near = tensor.as_strided(tensor.shape, (first % 2**30, *others), tensor.storage_offset())
        return replace(call, **{name: near})

    return change


class FarRowsLost(Ours):
    """Rows of out far from the first are written somewhere else."""

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        near = out is None or out.stride(0) < 2**29
        return super().prepare(call, options, out if near else None, lse)


FAULTS = [
    ("high-pages", Faulty(page_offsets_in_32_bits(1))),
    ("high-pages", Faulty(page_offsets_in_32_bits(2))),
    ("far-strides", Faulty(stride_in_30_bits("q"))),
    ("far-strides", Faulty(stride_in_30_bits("kv_cache"))),
    ("far-strides", FarRowsLost("torch")),
]


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Adapter) -> None:
    assert expect_broken(faulty, BY_NAME[name], examples=100).detail


@each_fault(FAULTS)
def test_a_fault_is_caught_by_value_too(name: str, faulty: Adapter) -> None:
    """Whoever may change the kernel is held to values alone."""
    found = expect_broken(unclaimed(faulty), BY_NAME[name], examples=100)
    assert " is right, bound " in found.detail
    assert "past" in found.detail or "pool" in found.detail


def other_bits_far_away(call: Call, result: Raw) -> Raw:
    """Right, and by another kernel: for a large pool, and for rows far apart."""
    far = max(call.kv_cache.untyped_storage().nbytes(), call.q.untyped_storage().nbytes()) > 2**31
    return nudged(result) if far else result


@each(PROPERTIES)
def test_another_kernel_for_far_tensors_is_no_fault_unless_one_is_claimed(prop: Property) -> None:
    changes_kernel = Faulty(spoil=other_bits_far_away)
    expect_kept(unclaimed(changes_kernel), prop)
    assert expect_broken(changes_kernel, prop).detail.startswith("lse[0, 0] is ")


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    width._pool.cache_clear()
    monkeypatch.setattr(width, "ABOVE", 2**60)
    yield
    width._pool.cache_clear()


@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("high-pages", (SMALL.spec((5,)), 2**31, 0, 0, {})),
        ("far-strides", (SMALL.spec((5, 5)), "q", "2^31 bytes", 1, {})),
    ],
)
def test_without_room_nothing_is_asked(name: str, example: Any) -> None:
    with pytest.raises(Refused, match="no room on cpu"):
        BY_NAME[name].test(Subject(Ours("torch"), CPU), example)


@pytest.mark.parametrize(("offset", "size"), [(2**31 + 5, 2), (2**32 + 5, 1), (2**30 + 5, 4)])
def test_decoys_lie_where_a_cut_offset_leads(offset: int, size: int) -> None:
    signed = (offset * size + 2**31) % 2**32 - 2**31
    assert signed // size in set(width._wrapped(offset, size))
    assert offset * size % 2**32 // size in {*width._wrapped(offset, size), offset}
    assert offset not in set(width._wrapped(offset, size))
