"""A function with ``pagedmla.decode``'s signature, and functions with less of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla.conformance.adapters.adapter import Conventions
from pagedmla.conformance.adapters.function import FunctionAdapter
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.examine import examine
from pagedmla.conformance.properties import properties_of
from pagedmla.conformance.properties.property import Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Broken, Refused, Subject
from pagedmla.contract.errors import InvalidArgument

CPU = torch.device("cpu")
SMALL = {"num_heads": 3, "page_size": 16}


def adapter(function: Any) -> FunctionAdapter:
    return FunctionAdapter(function, "somebodys:decode", "somebodys 1")


def least(q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *, softmax_scale: float) -> Any:
    return pagedmla.decode(q, kv_cache, block_table, seq_lens, softmax_scale=softmax_scale)


def test_the_whole_signature_has_every_option_and_every_batch() -> None:
    ours = adapter(pagedmla.decode)
    assert ours.features == {"out", "invariant"}
    assert ours.options == ({}, {"num_kv_splits": 3}, {"batch_invariant": True})
    subject = Subject(ours, CPU)
    for spec in (
        BatchSpec((131, 0, 7), **SMALL),
        BatchSpec((40, 7), q_lens=(2, 3), rows_before=1, rows_after=1, **SMALL),
        BatchSpec((40, 7), q_lens=(2, 2), causal=False, kv_lora_rank=256, **SMALL),
        BatchSpec((40, 7), kv_dtype="e4m3fn", **SMALL),
    ):
        for options in ours.options:
            subject.checked(spec, options)


def test_what_a_signature_lacks_is_not_asked_for() -> None:
    small = adapter(least)
    assert (small.features, small.options) == (frozenset(), ({},))
    subject = Subject(small, CPU)
    subject.checked(BatchSpec((131, 0, 7), **SMALL), {})
    subject.checked(BatchSpec((131, 7), q_lens=(2, 2), **SMALL), {})
    for fields, words in (
        ({"q_lens": (1, 2)}, "has no argument cu_seqlens_q"),
        ({"rows_after": 1, "causal": False}, "has no argument cu_seqlens_q and no causal"),
        ({"kv_lora_rank": 256}, "has no argument kv_lora_rank"),
        ({"kv_dtype": "e4m3fn"}, "has no argument kv_scale"),
        ({"dtype": "e4m3fn"}, "has no argument q_scale and no kv_scale"),
    ):
        spec = BatchSpec((131, 7), **SMALL, **fields)  # type: ignore[arg-type]
        with pytest.raises(Refused, match=words):
            subject.checked(spec, {})


def test_not_implemented_is_a_refusal_and_any_other_error_is_not() -> None:
    def picky(q: Tensor, kv_cache: Tensor, *rest: Tensor, **keywords: Any) -> Any:
        if kv_cache.shape[1] != 64:
            raise NotImplementedError("pages of 64 tokens only\nsecond line")
        if q.shape[1] > 3:
            raise ValueError("too many heads")
        return pagedmla.decode(q, kv_cache, *rest, **keywords)

    subject = Subject(adapter(picky), CPU)
    subject.checked(BatchSpec((7, 70), num_heads=3), {})
    with pytest.raises(Refused, match=r"^NotImplementedError: pages of 64 tokens only$"):
        subject.checked(BatchSpec((7, 70), num_heads=3, page_size=16), {})
    with pytest.raises(Broken, match="raised ValueError: too many heads"):
        subject.checked(BatchSpec((7, 70), num_heads=4), {})


def test_one_result_is_not_two() -> None:
    for wrong in (lambda *a, **k: pagedmla.decode(*a, **k)[0], lambda *a, **k: None):
        with pytest.raises(Broken, match=r"where \(out, lse\) is right"):
            Subject(adapter(wrong), CPU).checked(BatchSpec((7,), **SMALL), {})


def test_attributes_of_the_function_say_more() -> None:
    def base_2(*arguments: Any, **keywords: Any) -> Any:
        out, lse = pagedmla.decode(*arguments, **keywords)
        return out, lse * math.log2(math.e)

    with pytest.raises(Broken, match="lse"):
        Subject(adapter(base_2), CPU).checked(BatchSpec((131,), **SMALL), {})
    base_2.conventions = Conventions(lse_base=2.0)  # type: ignore[attr-defined]
    base_2.features = ("graph", "strides")  # type: ignore[attr-defined]
    base_2.options = ({}, {"schedule": "split"})  # type: ignore[attr-defined]
    told = adapter(base_2)
    assert told.features == {"graph", "strides"}
    assert told.options == ({}, {"schedule": "split"})
    for options in told.options:
        Subject(told, CPU).checked(BatchSpec((131,), **SMALL), options)
    base_2.features = ("graph", "speed")  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgument, match="speed"):
        adapter(base_2)


@pytest.mark.parametrize("function", [pagedmla.decode, least])
def test_its_lines_do_the_same(function: Any) -> None:
    found = FunctionAdapter(function, f"{__name__ if function is least else 'pagedmla'}:{function.__name__}")
    subject, spec = Subject(found, CPU), BatchSpec((131, 0, 7), **SMALL)
    for options in found.options:
        lines = found.lines(options)
        names: dict[str, Any] = {"call": subject.build(spec), "least": least}
        exec(lines if function is not least else lines.partition("\n")[2], names)
        subject.check(subject.normalise(names["out"], names["lse"], spec, options), spec, options)
    assert lines.startswith("from ")


@pytest.mark.parametrize("broken", [False, True])
def test_the_kit_tells_a_broken_function_from_a_right_one(broken: bool) -> None:
    def decode(q: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, **rest: Any) -> Any:
        if broken:  # whole pages: what lies behind the last token is attended to
            seq_lens = ((seq_lens + kv_cache.shape[1] - 1) // kv_cache.shape[1] * kv_cache.shape[1]).int()
        return pagedmla.decode(q, kv_cache, block_table, seq_lens, **rest)

    found = adapter(decode)
    scope = Scope(found, Configuration("small", {"num_heads": 3, "page_size": 16}, most_keys=150), CPU)
    for prop in properties_of("PAGE"):
        verdict = examine(prop, Subject(found, CPU), scope, max_examples=6)
        assert verdict.status == ("failed" if broken else "passed")
