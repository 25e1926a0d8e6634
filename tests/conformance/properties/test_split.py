"""The SPLIT properties hold for a right decode, and each rejects a decode that loses or invents a share of the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conformance.properties.questions import (
    CPU,
    SMALL,
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
from pagedmla.conformance.builder import Call, draw_batch
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.examine import examine
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.properties.split import PROPERTIES
from pagedmla.conformance.subject import Subject

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


def last_key_of_a_new_tile_lost(call: Call, options: Options) -> Decoded:
    lost = (call.seq_lens % 16 == 1) & (call.seq_lens > 1)
    return right(call, options, seq_lens=call.seq_lens - lost.int())


def lse_unwritten_with_one_split(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out, torch.full_like(lse, torch.nan) if options.get("num_kv_splits") == 1 else lse


def empty_splits_count_as_a_score_of_zero(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    splits = int(options.get("num_kv_splits", 1))  # type: ignore[call-overload]
    extra = torch.log((splits - call.seq_lens).clamp(min=0).float())[:, None]
    total = torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, extra))
    return out * torch.exp(lse - total).nan_to_num(0.0)[..., None].to(out.dtype), total


def no_maximum_subtracted(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out.masked_fill(lse[..., None] > 88, torch.nan), lse.masked_fill(lse > 88, torch.inf)


def last_key_counted_twice(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    _, before = right(call, options, seq_lens=(call.seq_lens - 1).clamp(min=0))
    last = lse + torch.log1p(-torch.exp(before - lse))
    return out, torch.where(call.seq_lens[:, None] > 1, torch.logaddexp(lse, last), lse)


FAULTS = [
    ("dense-lengths", last_key_of_a_new_tile_lost),
    ("dense-lengths", lse_unwritten_with_one_split),
    ("few-keys", empty_splits_count_as_a_score_of_zero),
    ("peaked-softmax", no_maximum_subtracted),
    ("flat-softmax", last_key_counted_twice),
]


def test_splits_are_drawn_only_for_those_that_take_them() -> None:
    class Plain(Ours):
        options: tuple[Options, ...] = ({},)

    adapter, seen = Plain("torch"), []
    for prop in PROPERTIES:
        examine(prop, Subject(adapter, CPU), Scope(adapter, SMALL, CPU), max_examples=10, begin=seen.append)
    assert seen
    assert not any("num_kv_splits" in example for example in seen)


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Callable[[Call, Options], Decoded]) -> None:
    expect_broken(Answering(faulty), BY_NAME[name])


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)


@pytest.mark.parametrize("dims", [(16, 0), (32, 8), (512, 64)])
def test_peaked_queries_are_finite_in_float16(dims: tuple[int, int]) -> None:
    """A large score out of few numbers takes large numbers: infinite ones would ask for nothing."""
    fields = {**SMALL.fields, "kv_lora_rank": dims[0], "qk_rope_head_dim": dims[1], "dtype": "fp16"}
    configuration, examples = Configuration("fp16", fields, most_keys=150), []
    recording = replace(BY_NAME["peaked-softmax"], test=lambda subject, example: examples.append(example[0]))
    verdict(Ours("torch"), recording, configuration, 50)
    for spec in examples:
        assert all(bool(rows.isfinite().all()) for rows in draw_batch(spec).queries)
    assert max(spec.peak_nats for spec in examples) >= 100
