"""The FP8 properties hold for a right decode, and each rejects a format that is misread, or a scale that is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conformance.properties.questions import (
    Answering,
    Decoded,
    each,
    each_configuration,
    each_fault,
    expect_broken,
    expect_kept,
    right,
    verdict,
)

from pagedmla.conformance.adapters.adapter import Options
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import KV_SCALE, Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.fp8 import PROPERTIES, _all_codes, _at_least
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


def scale_left_out(call: Call, options: Options) -> Decoded:
    return right(call, options, **({} if call.kv_scale is None else {"kv_scale": 1.0}))


def scale_left_out_of_the_values(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return (out if call.kv_scale is None else out / call.kv_scale), lse


def scale_applied_twice_to_the_values(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return (out if call.kv_scale is None else out * call.kv_scale), lse


def fnuz_read_as_fn(call: Call, options: Options) -> Decoded:
    if call.kv_cache.dtype != torch.float8_e4m3fnuz:
        return right(call, options)
    changes = {"kv_cache": call.kv_cache.view(torch.float8_e4m3fn)}
    if call.q.dtype == torch.float8_e4m3fnuz:
        changes["q"] = call.q.view(torch.float8_e4m3fn)
    return right(call, options, **changes)


def subnormal_numbers_flushed(call: Call, options: Options) -> Decoded:
    if call.kv_scale is None:
        return right(call, options)
    codes = call.kv_cache.view(torch.uint8)
    flushed = torch.where(codes & 0x78 == 0, 0, codes).to(torch.uint8)
    return right(call, options, kv_cache=flushed.view(call.kv_cache.dtype))


def query_codes_past_64_clamped(call: Call, options: Options) -> Decoded:
    if call.q_scale is None:
        return right(call, options)
    return right(call, options, q=call.q.float().clamp(-64, 64).to(call.q.dtype))


def scale_clamped(call: Call, options: Options) -> Decoded:
    return right(call, options, **({} if call.kv_scale is None else {"kv_scale": min(call.kv_scale, 0.05)}))


def bits_depend_on_the_scale(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out, torch.nextafter(lse, lse + 1) if call.kv_scale == KV_SCALE else lse


def scale_of_a_plain_cache_is_applied(call: Call, options: Options) -> Decoded:
    """k_scale of a model that has one, over a cache that is not fp8."""
    if call.kv_cache.dtype.itemsize == 1:
        return right(call, options)
    factor = 1.0 if call.kv_scale is None else call.kv_scale
    return right(call, options, kv_scale=None, kv_cache=(call.kv_cache * factor).to(call.kv_cache.dtype))


FAULTS = [
    ("fp8-scales", scale_left_out),
    ("fp8-scales", scale_left_out_of_the_values),
    ("fp8-scales", scale_applied_twice_to_the_values),
    ("fp8-codes", fnuz_read_as_fn),
    ("fp8-codes", subnormal_numbers_flushed),
    ("fp8-codes", query_codes_past_64_clamped),
    ("fp8-product", scale_clamped),
    ("fp8-product", bits_depend_on_the_scale),
    ("fp8-scale-of-nothing", scale_of_a_plain_cache_is_applied),
]


def test_all_codes_are_asked_for() -> None:
    for dtype, nans in ((torch.float8_e4m3fn, 2), (torch.float8_e4m3fnuz, 1)):
        keys = _all_codes(
            torch.empty(2, 300, dtype=torch.uint8).view(dtype), torch.Generator().manual_seed(0)
        )
        assert len(keys.view(torch.uint8).unique()) == 256 - nans
        assert bool(keys.float().isfinite().all())


def test_raised_codes_halve_exactly() -> None:
    codes = torch.arange(256).to(torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        for halvings in (1, 2, 3):
            raised = _at_least(codes, 1 + halvings)
            numbers, halved = raised.view(dtype).float(), (raised - 8 * halvings).view(dtype).float()
            finite = numbers.isfinite()
            assert finite.sum() >= 254
            assert torch.equal(numbers[finite], halved[finite] * 2**halvings)


class WithoutFp8(Ours):
    """Takes no fp8 cache."""

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        return "no fp8" if spec.cache_dtype.itemsize == 1 else super().refuses(spec, options, device)


@pytest.mark.parametrize("name", ["fp8-scales", "fp8-codes", "fp8-product"])
def test_one_without_fp8_says_so(name: str) -> None:
    found = verdict(WithoutFp8("torch"), BY_NAME[name], examples=3)
    assert (found.status, found.detail) == ("refused", "no fp8")


class OneFormat(Ours):
    """Takes e4m3fn under bf16 queries alone."""

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        taken = (spec.dtype, spec.kv_dtype) == ("bf16", "e4m3fn")
        return super().refuses(spec, options, device) if taken else "another format"


@pytest.mark.parametrize("name", ["fp8-scales", "fp8-codes", "fp8-product"])
def test_only_formats_that_are_taken_are_drawn(name: str) -> None:
    assert expect_kept(OneFormat("torch"), BY_NAME[name]).examples > 10


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Callable[[Call, Options], Decoded]) -> None:
    expect_broken(Answering(faulty), BY_NAME[name])


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)
