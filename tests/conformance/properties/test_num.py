"""The NUM properties hold for a right decode, and each rejects low precision, or bits that are not a row's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from conformance.properties.questions import (
    SMALL,
    TENSORS,
    Answering,
    Decoded,
    each,
    each_configuration,
    each_fault,
    expect_broken,
    expect_kept,
    right,
)
from torch import Tensor

import pagedmla
from pagedmla.conformance.adapters.adapter import Conventions, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.num import PROPERTIES, _shift
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.spec import BatchSpec

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


class ACounter:
    """Other bits in every second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Call, options: Options) -> Decoded:
        out, lse = right(call, options)
        self.calls += 1
        return out, torch.nextafter(lse, lse + 1) if self.calls % 2 else lse


def bits_depend_on_the_batch(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out, torch.nextafter(lse, lse + 1) if len(call.seq_lens) % 2 else lse


def bits_depend_on_the_row(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    lse[2:] = torch.nextafter(lse[2:], lse[2:] + 1)
    return out, lse


def scores_in_half_precision(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    lost = (lse > 65504 * call.softmax_scale)[..., None]
    return out.masked_fill(lost, torch.nan), lse


def maximum_starts_at_minus_ten_thousand(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    lost = (lse < -1e4) & (lse != -torch.inf)
    return out.masked_fill(lost[..., None], 0.0), lse


def sums_in_bfloat16(call: Call, options: Options) -> Decoded:
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


FAULTS = [
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


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Callable[[Call, Options], Decoded]) -> None:
    expect_broken(Answering(faulty), BY_NAME[name])


class LseInHalfPrecision(Answering):
    """Declared: past 65504 it is infinite; with ``sign`` -1 the wrong infinity."""

    def __init__(self, sign: int = 1) -> None:
        super().__init__(right)
        self.sign = sign
        self.conventions = Conventions(lse_dtype=torch.float16, p_dtype=torch.float32)

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        return self.conventions

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        def run() -> tuple[Tensor, Tensor]:
            own_out, own_lse = right(call, options)
            half = own_lse.half()
            return own_out, torch.where(half.isinf() & own_lse.isfinite(), self.sign * half, half)

        return PreparedCall(run)


def test_a_declared_lse_may_end_where_its_dtype_does() -> None:
    expect_kept(LseInHalfPrecision(), BY_NAME["large-scores"])
    assert "inf" in expect_broken(LseInHalfPrecision(-1), BY_NAME["large-scores"]).detail


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)
