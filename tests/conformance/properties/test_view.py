"""The VIEW properties hold for a right decode, and each rejects one that takes every tensor for a packed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    unclaimed,
    verdict,
)
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Adapter, Options, Prepared
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.properties.view import PROPERTIES
from pagedmla.conformance.subject import Broken, Refused, Subject

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


def thought_packed(name: str) -> Callable[[Call], Call]:
    """Strides come from the sizes, where the memory behind the tensor reaches so far."""

    def change(call: Call) -> Call:
        tensor = getattr(call, name)
        strides = torch.empty(tensor.shape, device="meta").stride()
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        packed = tensor.as_strided(tensor.shape, strides) if tensor.numel() <= room else tensor
        return replace(call, **{name: packed})

    return change


def offset_ignored(call: Call) -> Call:
    cache = call.kv_cache
    return replace(call, kv_cache=cache.as_strided(cache.shape, cache.stride(), 0))


def a_stride_of_zero_counts(call: Call, result: Raw) -> Raw:
    return nudged(result) if call.block_table.stride(0) == 0 else result


def rotated_part_left_out(call: Call) -> Call:
    if not isinstance(call.q, tuple):
        return call
    pair: Any = (call.q[0], torch.zeros_like(call.q[1]))
    return replace(call, q=pair)


class OutThoughtPacked(Ours):
    """Rows are written one behind the other, wherever the given out has them."""

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        packed = (
            None if out is None else out.as_strided(out.shape, torch.empty(out.shape, device="meta").stride())
        )
        return super().prepare(call, options, packed, lse)


def memory_between_rows_written(call: Call, result: Raw) -> Raw:
    out = result[0]
    if not out.is_contiguous() and out.storage_offset():
        out.as_strided((1,), (1,), 0)[0] = 0.0
    return result


OTHER_BITS = Faulty(spoil=a_stride_of_zero_counts)
FAULTS = [
    ("inputs", Faulty(thought_packed("q"))),
    ("inputs", Faulty(thought_packed("kv_cache"))),
    ("inputs", Faulty(thought_packed("block_table"))),
    ("inputs", Faulty(thought_packed("seq_lens"))),
    ("inputs", Faulty(offset_ignored)),
    ("expanded", OTHER_BITS),
    ("pair-of-queries", Faulty(rotated_part_left_out)),
    ("outputs", OutThoughtPacked("torch")),
    ("outputs", Faulty(spoil=memory_between_rows_written)),
]


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Adapter) -> None:
    assert expect_broken(faulty, BY_NAME[name], examples=100).detail


@each_fault([(name, faulty) for name, faulty in FAULTS if faulty is not OTHER_BITS])
def test_a_fault_is_caught_by_value_too(name: str, faulty: Adapter) -> None:
    """Whoever may change the kernel is held to values alone."""
    assert " in one and " not in expect_broken(unclaimed(faulty), BY_NAME[name], examples=100).detail


def other_bits_for_views(call: Call, result: Raw) -> Raw:
    """Right, and by another kernel wherever a tensor is not packed, or comes as a pair."""
    packed = not isinstance(call.q, tuple) and all(
        tensor is None or (tensor.is_contiguous() and not tensor.storage_offset())
        for tensor in (call.q, call.kv_cache, call.block_table, call.seq_lens, call.cu_seqlens_q, *result)
    )
    return result if packed else nudged(result)


@each(PROPERTIES)
def test_another_kernel_for_views_is_no_fault_unless_one_is_claimed(prop: Property) -> None:
    changes_kernel = Faulty(spoil=other_bits_for_views)
    expect_kept(unclaimed(changes_kernel), prop)
    assert " in one and " in expect_broken(changes_kernel, prop).detail


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)


class Refusing(Ours):
    """Takes packed tensors alone, and says so by ``error``: at once, or after it began to write."""

    def __init__(self, error: Exception, late: bool = False) -> None:
        super().__init__("torch")
        self.error, self.late = error, late

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        tensors = [call.q, call.kv_cache, call.block_table, call.seq_lens, out, lse]
        whole = [
            isinstance(t, Tensor) and t.is_contiguous() and not t.storage_offset()
            for t in tensors
            if t is not None
        ]
        if all(whole):
            return super().prepare(call, options, out, lse)
        if self.late and out is not None:
            out[0] = 0.0
        raise self.error


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("inputs", (SMALL.spec((5, 40)), {"q": "heads first"}, {})),
        ("expanded", (SMALL.spec((5, 5), ids=(0, 0)), {})),
        ("pair-of-queries", (SMALL.spec((5, 40)), "rows apart", "packed", {})),
        ("outputs", (SMALL.spec((5, 40)), "heads first", "packed", {})),
    ],
)
@pytest.mark.parametrize("error", [ValueError("packed only"), RuntimeError("view size is not compatible")])
def test_a_refusal_is_no_fault(error: Exception, name: str, example: Any) -> None:
    with pytest.raises(Refused, match=str(error)):
        BY_NAME[name].test(Subject(Refusing(error), CPU), example)


@pytest.mark.parametrize(
    "error", [IndexError("out of range"), RuntimeError("CUDA error: misaligned address")]
)
def test_an_accident_is_no_refusal(error: Exception) -> None:
    found = verdict(Refusing(error), BY_NAME["inputs"])
    assert found.status == "failed"
    assert str(error) in found.detail


def test_a_refusal_comes_before_anything_is_written() -> None:
    late = Refusing(ValueError("packed only"), late=True)
    with pytest.raises(Broken, match="after a part of out was written"):
        BY_NAME["outputs"].test(Subject(late, CPU), (SMALL.spec((5, 40)), "heads first", "packed", {}))
