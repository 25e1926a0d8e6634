"""QLEN: n query tokens in one call are n calls of one token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import Batch, arguments, check, make_batch, run, same_bits
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import batches
from torch import Tensor

from pagedmla.contract.errors import InvalidArgument


def unrolled(batch: Batch) -> Batch:
    """Every query as a sequence of its own that sees S - n + j + 1 keys."""
    queries, tokens = [], []
    for sequence_queries, keys in zip(batch.queries, batch.tokens, strict=True):
        count = len(sequence_queries)
        for query in range(count):
            queries.append(sequence_queries[query : query + 1])
            tokens.append(keys[: max(0, len(keys) - count + query + 1)])
    return Batch(tuple(queries), tuple(tokens), batch.softmax_scale, batch.kv_lora_rank)


@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5, 7, 8, 16])
def test_unrolling(q_len: int) -> None:
    lens = [131, q_len - 1, 16, 1, 17, q_len, 0]
    batch = make_batch(lens, [q_len] * len(lens), num_heads=4)
    call, single = arguments(batch), arguments(unrolled(batch))
    check(run(call), call)
    check(run(single), single)
    together, apart = run(call, batch_invariant=True), run(single, batch_invariant=True)
    check(together, call)
    assert same_bits(together, apart)


@pytest.mark.parametrize("q_len", [2, 4, 16])
def test_unrolling_with_real_dimensions(q_len: int) -> None:
    batch = make_batch([131, q_len - 1, 64], [q_len] * 3, num_heads=16, dims=(512, 64))
    call, single = arguments(batch, 64), arguments(unrolled(batch), 64)
    check(run(call), call)
    together, apart = run(call, batch_invariant=True), run(single, batch_invariant=True)
    check(together, call)
    assert same_bits(together, apart)


@given(st.data())
def test_ragged_unrolling(data: st.DataObject) -> None:
    batch = data.draw(batches(16, max_q_len=9, max_seqs=3, most=60))
    assume(sum(batch.q_lens) > 0)
    call = arguments(batch)
    check(run(call), call)
    assert same_bits(run(call, batch_invariant=True), run(arguments(unrolled(batch)), batch_invariant=True))


@pytest.mark.parametrize("length", [*range(1, 40), 511, 512, 513])
def test_two_queries_over_every_length(length: int) -> None:
    call = arguments(make_batch([length], [2], num_heads=8, q_dtype=torch.float32))
    check(run(call), call)
    check(run(call, num_kv_splits=3), call)


def test_the_causal_mask_is_one_per_query() -> None:
    call = arguments(make_batch([64], [2], num_heads=8))
    causal, full = run(call), run(call, causal=False)
    check(causal, call)
    check(full, call | {"causal": False})
    assert not same_bits((causal[0][0],), (full[0][0],))
    assert same_bits((causal[0][1],), (full[0][1],)) or torch.allclose(causal[0][1], full[0][1], atol=2e-2)


def test_an_even_batch_needs_no_query_starts() -> None:
    call = arguments(make_batch([64, 0, 9], [2, 2, 2]))
    assert same_bits(run(call), run(call, cu_seqlens_q=None))


def test_a_prefill_of_a_whole_prompt() -> None:
    call = arguments(make_batch([100, 33], [100, 33], num_heads=2))
    check(run(call), call)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"cu_seqlens_q": None}, "q"),
        ({"cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 3, 3], dtype=torch.int32)}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 3], dtype=torch.int64)}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0.0, 2.0, 3.0])}, "cu_seqlens_q"),
        ({"out": torch.empty(2, 4, 32, dtype=torch.bfloat16)}, "out"),
        ({"lse": torch.empty(4, 3)}, "lse"),
    ],
)
def test_row_counts_that_do_not_match_are_refused(change: dict[str, Tensor | None], argument: str) -> None:
    call: dict[str, Any] = arguments(make_batch([9, 5], [2, 1]))
    with pytest.raises(InvalidArgument) as caught:
        run(call | change)
    assert caught.value.argument == argument
