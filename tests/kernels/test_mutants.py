"""Broken decodes, each with a fault that libraries really shipped: the runner must reject every one.

A check that cannot fail proves nothing; these show that ours can.  Each mutant wraps the torch backend and spoils it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla.conformance.cases import Case
from pagedmla.conformance.runner import CaseResult, run_case
from pagedmla.contract.problem import DecodeProblem

Result = tuple[Tensor, Tensor]

SINGLE = Case(
    "one query token each",
    DecodeProblem(num_heads=8, softmax_scale=0.07, kv_lora_rank=64, qk_rope_head_dim=16, page_size=16),
    (131, 0, 16, 1, 17, 127, 15),
    (1,) * 7,
)
SEVERAL = Case(
    "up to three query tokens",
    DecodeProblem(
        num_heads=8, softmax_scale=0.07, kv_lora_rank=64, qk_rope_head_dim=16, page_size=16, max_q_len=3
    ),
    (131, 0, 16, 1, 17, 127, 2),
    (3, 1, 0, 1, 2, 3, 3),
)


def last_token_dropped(q: Tensor, kv: Tensor, table: Tensor, lens: Tensor, **options: Any) -> Result:
    return pagedmla.decode(q, kv, table, (lens - 1).clamp(min=0), **options)


def last_page_taken_as_full(q: Tensor, kv: Tensor, table: Tensor, lens: Tensor, **options: Any) -> Result:
    """The founding kind: the length of the last page is not what the kernel is told."""
    size = kv.shape[1]
    return pagedmla.decode(q, kv, table, (lens + size - 1) // size * size, **options)


def pages_taken_in_order(q: Tensor, kv: Tensor, table: Tensor, lens: Tensor, **options: Any) -> Result:
    in_order = torch.arange(table.numel(), dtype=torch.int32).reshape(table.shape) % kv.shape[0]
    return pagedmla.decode(q, kv, in_order, lens, **options)


def lse_not_written(*tensors: Tensor, lse: Tensor, **options: Any) -> Result:
    out, _ = pagedmla.decode(*tensors, lse=torch.empty_like(lse), **options)
    return out, lse


def lse_in_base_two(*tensors: Tensor, **options: Any) -> Result:
    out, lse = pagedmla.decode(*tensors, **options)
    return out, lse.div_(math.log(2))


def lse_of_empty_rows_is_plus_infinity(*tensors: Tensor, **options: Any) -> Result:
    out, lse = pagedmla.decode(*tensors, **options)
    return out, lse.masked_fill_(lse == -math.inf, math.inf)


def empty_rows_left_alone(*tensors: Tensor, out: Tensor, lse: Tensor, **options: Any) -> Result:
    right, right_lse = pagedmla.decode(*tensors, **options)
    live = right_lse != -math.inf
    out[live], lse[live] = right[live], right_lse[live]
    return out, lse


def only_the_first_sequence_right(
    q: Tensor, kv: Tensor, table: Tensor, lens: Tensor, **options: Any
) -> Result:
    return pagedmla.decode(q, kv, table[:1].expand(table.shape), lens, **options)


def tail_of_the_page_leaks(q: Tensor, kv: Tensor, table: Tensor, lens: Tensor, **options: Any) -> Result:
    """A weight of zero times whatever lies behind the last token: no harm until that is a nan."""
    out, lse = pagedmla.decode(q, kv, table, lens, **options)
    page, offset = int(table[0, int(lens[0]) // kv.shape[1]]), int(lens[0]) % kv.shape[1]
    out[1 if options["cu_seqlens_q"] is not None else 0] += 0.0 * kv[page, offset, : out.shape[2]]
    return out, lse


def other_data_leaks(q: Tensor, kv: Tensor, table: Tensor, lens: Tensor, **options: Any) -> Result:
    """A nan in the pool is scrubbed, other data is not: seen by nothing but the bits of a second run."""
    out, lse = pagedmla.decode(q, kv, table, lens, **options)
    page, offset = int(table[0, int(lens[0]) // kv.shape[1]]), int(lens[0]) % kv.shape[1]
    stray = kv[page, offset, 0].nan_to_num(0.0, 0.0, 0.0).abs() + kv.isinf().any()
    lse[1 if options["cu_seqlens_q"] is not None else 0] += 1e-6 * stray
    return out, lse


def scale_from_the_cached_width(*tensors: Tensor, softmax_scale: float, **options: Any) -> Result:
    return pagedmla.decode(*tensors, softmax_scale=tensors[1].shape[2] ** -0.5, **options)


def accumulated_in_bfloat16(*tensors: Tensor, num_kv_splits: int | None, **options: Any) -> Result:
    """What merging bfloat16 partial results costs: a rounding for each of eight parts instead of one."""
    out, lse = pagedmla.decode(*tensors, num_kv_splits=num_kv_splits, **options)
    for _ in range(7):
        out.mul_(1.0 + 2.0**-7).mul_(1.0 - 2.0**-7)
    return out, lse


def a_row_past_the_end_is_written(*tensors: Tensor, out: Tensor, lse: Tensor, **options: Any) -> Result:
    result = pagedmla.decode(*tensors, out=out, lse=lse, **options)
    size = out.shape[1] * out.shape[2]
    out.as_strided((size,), (1,), out.storage_offset() + out.numel()).zero_()
    return result


def fresh_tensors_come_back(*tensors: Tensor, out: Tensor, lse: Tensor, **options: Any) -> Result:
    return pagedmla.decode(*tensors, **options)


def not_causal(*tensors: Tensor, causal: bool, **options: Any) -> Result:
    return pagedmla.decode(*tensors, causal=False, **options)


def one_mask_for_all_query_tokens(*tensors: Tensor, cu_seqlens_q: Tensor, **options: Any) -> Result:
    """Every query of a sequence sees what its first one may see."""
    q, kv, table, lens = tensors
    out, lse = options.pop("out"), options.pop("lse")
    counts = cu_seqlens_q.diff()
    seen = (lens - counts + 1).clamp(min=0)
    options["causal"] = False
    right, right_lse = pagedmla.decode(q, kv, table, seen.int(), cu_seqlens_q=cu_seqlens_q, **options)
    return out.copy_(right), lse.copy_(right_lse)


def mask_aligned_to_the_first_key(*tensors: Tensor, cu_seqlens_q: Tensor, **options: Any) -> Result:
    """Query j sees keys 0 .. j, as in a prefill without a cache."""
    q, kv, table, lens = tensors
    short = torch.minimum(lens, cu_seqlens_q.diff().int())
    return pagedmla.decode(q, kv, table, short, cu_seqlens_q=cu_seqlens_q, **options)


def query_starts_ignored(*tensors: Tensor, cu_seqlens_q: Tensor, **options: Any) -> Result:
    q, _, _, lens = tensors
    even = torch.arange(len(lens) + 1, dtype=torch.int32) * (q.shape[0] // len(lens))
    return pagedmla.decode(*tensors, cu_seqlens_q=even, **options)


EVERYWHERE = [
    last_token_dropped,
    last_page_taken_as_full,
    pages_taken_in_order,
    lse_not_written,
    lse_in_base_two,
    lse_of_empty_rows_is_plus_infinity,
    empty_rows_left_alone,
    only_the_first_sequence_right,
    tail_of_the_page_leaks,
    other_data_leaks,
    scale_from_the_cached_width,
    accumulated_in_bfloat16,
    a_row_past_the_end_is_written,
    fresh_tensors_come_back,
]
WITH_SEVERAL_QUERIES = [
    not_causal,
    one_mask_for_all_query_tokens,
    mask_aligned_to_the_first_key,
    query_starts_ignored,
]


def _run(case: Case, mutant: Callable[..., Result]) -> CaseResult:
    return run_case(case, "cpu", "torch", mutant)


@pytest.mark.parametrize("case", [SINGLE, SEVERAL], ids=str)
def test_the_unspoiled_decode_passes(case: Case) -> None:
    result = _run(case, pagedmla.decode)
    assert result.passed, result.detail


@pytest.mark.parametrize("case", [SINGLE, SEVERAL], ids=str)
@pytest.mark.parametrize("mutant", EVERYWHERE, ids=lambda mutant: mutant.__name__)
def test_mutant_is_rejected(mutant: Callable[..., Result], case: Case) -> None:
    result = _run(case, mutant)
    assert not result.passed
    assert result.detail


@pytest.mark.parametrize("mutant", WITH_SEVERAL_QUERIES, ids=lambda mutant: mutant.__name__)
def test_mutant_of_several_queries_is_rejected(mutant: Callable[..., Result]) -> None:
    result = _run(SEVERAL, mutant)
    assert not result.passed
    assert result.out_bound_ratio > 1
