"""QLEN: n query tokens in one call are n calls of one token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import Batch, same_bits
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import batches
from triton_backend import (
    DEVICE,
    INVARIANT,
    MODES,
    ON_CARD,
    PERSISTENT,
    SPLITS,
    arguments,
    checked,
    few,
    make_batch,
    run,
)

from pagedmla.contract.errors import InvalidArgument

pytestmark = pytest.mark.usefixtures("short_cuts")


def unrolled(batch: Batch) -> Batch:
    """Every query as a sequence of its own that sees S - n + j + 1 keys."""
    queries, tokens = [], []
    for sequence_queries, keys in zip(batch.queries, batch.tokens, strict=True):
        count = len(sequence_queries)
        for query in range(count):
            queries.append(sequence_queries[query : query + 1])
            tokens.append(keys[: max(0, len(keys) - count + query + 1)])
    return Batch(tuple(queries), tuple(tokens), batch.softmax_scale, batch.kv_lora_rank)


@pytest.mark.parametrize("q_len", [2, 3, 7])
def test_unrolling(q_len: int) -> None:
    batch = make_batch([66, q_len - 1, 0], [q_len] * 3, num_heads=4)
    call, single = arguments(batch), arguments(unrolled(batch))
    assert same_bits(checked(call, **INVARIANT), checked(single, **INVARIANT))
    checked(call, **PERSISTENT)


@pytest.mark.parametrize("num_heads", [16, 20])
def test_unrolling_across_row_tiles(num_heads: int) -> None:
    """More heads than a row tile holds: a tile's rows begin and end within a query token."""
    batch = make_batch([70, 1], [3, 2], num_heads=num_heads)
    together = checked(arguments(batch), **INVARIANT)
    assert same_bits(together, run(arguments(unrolled(batch)), **INVARIANT))


@pytest.mark.skipif(
    not ON_CARD, reason="a card's compiler chooses layouts, which the interpreter has none of"
)
@pytest.mark.parametrize("num_heads", [16, 40, 128])
def test_unrolling_at_a_models_size(num_heads: int) -> None:
    """Sums over keys in both loops, whatever threads hold the numbers; lse shows the last bits that out's dtype hides."""
    batch = make_batch(
        [131, 7, 300], [3, 2, 4], num_heads=num_heads, dims=(512, 64), q_dtype=torch.bfloat16, spread=0.7
    )
    call, single = arguments(batch, 64), arguments(unrolled(batch), 64)
    assert same_bits(checked(call, **INVARIANT), checked(single, **INVARIANT))


@few(3)
@given(st.data())
def test_ragged_unrolling(data: st.DataObject) -> None:
    batch = data.draw(batches(16, max_q_len=4, max_seqs=2, most=60, q_dtype=torch.float16))
    assume(sum(batch.q_lens) > 0)
    call = arguments(batch)
    mode: dict[str, Any] = data.draw(st.sampled_from((PERSISTENT, SPLITS)))
    checked(call, **mode)
    assert same_bits(run(call, **INVARIANT), run(arguments(unrolled(batch)), **INVARIANT))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_two_queries_around_tiles(mode: dict[str, Any]) -> None:
    """The second query's newest key begins a KV tile, ends one, or is its only one."""
    lens = [1, 2, 32, 33, 34, 64, 65]
    checked(arguments(make_batch(lens, [2] * len(lens), num_heads=3)), **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_query_sees_every_key_without_the_mask(mode: dict[str, Any]) -> None:
    call = arguments(make_batch([70, 2, 0, 33], [3, 5, 1, 0], num_heads=4, causal=False))
    full = checked(call, **mode)
    causal = run(call, causal=True, **mode)
    # the newest query of the first sequence sees everything either way, the ones before it do not
    assert not same_bits((causal[0][:2],), (full[0][:2],))
    torch.testing.assert_close(causal[0][2], full[0][2], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_even_batch_needs_no_query_starts(mode: dict[str, Any]) -> None:
    """And a hint of the longest query changes nothing that is not its own business: not a bit."""
    call = arguments(make_batch([64, 0, 9], [2, 2, 2]))
    plain = checked(call | {"cu_seqlens_q": None}, **mode)
    assert same_bits(plain, run(call, max_q_len=2, **mode))


@pytest.mark.parametrize("hint", [3, 40])
def test_the_hint_is_no_promise_of_equal_lengths(hint: int) -> None:
    call = arguments(make_batch([64, 0, 9], [3, 2, 1], num_heads=12))
    plain = run(call, **INVARIANT)
    assert same_bits(plain, run(call, max_q_len=hint, **INVARIANT))
    checked(call, max_q_len=hint)


def test_a_hint_below_an_even_batch_is_refused() -> None:
    call = arguments(make_batch([64, 9], [3, 3]))
    with pytest.raises(InvalidArgument) as caught:
        run(call | {"cu_seqlens_q": None}, max_q_len=2)
    assert caught.value.argument == "max_q_len"


def test_a_hint_below_the_truth_harms_nobody_else() -> None:
    """More query tokens on the device than were promised: their sequence is unspecified, the others are right."""
    call = arguments(make_batch([64, 20, 9], [3, 1, 1]))
    out = torch.full((9, 4, 32), -768.0, dtype=torch.float16, device=DEVICE)
    for hint in (1, 2):
        for mode in (PERSISTENT, SPLITS):
            result = run(call, out=out[2:-2], max_q_len=hint, **mode)
            wanted = run(call, **mode)
            torch.testing.assert_close(result[0][3:], wanted[0][3:], rtol=2e-3, atol=2e-3)
            assert bool((out[:2] == -768).all() & (out[-2:] == -768).all())
