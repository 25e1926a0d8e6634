"""NUM: in the invariant mode a row's bits are its own; large scores do no harm in any mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches, seeds
from triton_backend import (
    DTYPES,
    INVARIANT,
    MODES,
    ON_CARD,
    arguments,
    checked,
    decode,
    few,
    make_batch,
    rows_of,
    run,
)

pytestmark = pytest.mark.usefixtures("short_cuts")


@few(5)
@given(st.data())
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from((1, 4, 16)))
    batch = data.draw(batches(16, max_q_len=3, max_seqs=2, most=100, num_heads=heads, q_dtype=torch.float16))
    others = data.draw(
        batches(
            16, max_q_len=5, max_seqs=2, most=200,
            num_heads=heads, seed=data.draw(seeds), q_dtype=torch.float16,
        )
    )  # fmt: skip
    everyone = replace(batch, queries=batch.queries + others.queries, tokens=batch.tokens + others.tokens)
    order = data.draw(st.permutations(range(len(everyone.tokens))))
    shuffled = everyone.take(order)
    alone, together = decode(batch, **INVARIANT), checked(arguments(shuffled), **INVARIANT)
    for place, sequence in enumerate(order):
        if sequence < len(batch.tokens):
            assert same_bits(rows_of(alone, batch.rows(sequence)), rows_of(together, shuffled.rows(place)))


def test_batch_size_and_position() -> None:
    batch = make_batch([100, 5, 37, 0, 37], num_heads=8, dims=(128, 32))
    out, lse = decode(batch, 64, **INVARIANT)
    for sequence in (0, 2, 4):
        assert same_bits(decode(batch.take([sequence]), 64, **INVARIANT), (out[[sequence]], lse[[sequence]]))


def test_head_order_is_inert() -> None:
    call = arguments(make_batch([70, 5], [1, 2], num_heads=7))
    order = [3, 0, 6, 1, 5, 2, 4]
    out, lse = run(call, **INVARIANT)
    assert same_bits((out[:, order], lse[:, order]), run(call | {"q": call["q"][:, order]}, **INVARIANT))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beyond_half_precision(dtype: torch.dtype, mode: dict[str, Any]) -> None:
    """Scores past 65504, positive and negative, by margins that leave one key or two equal ones."""
    batch = make_batch([40, 70, 3], num_heads=2, q_dtype=dtype)
    for sequence, keys in enumerate(batch.tokens):
        keys[:, -1] = torch.arange(len(keys)).to(dtype) % 4 * 64 - 96
        batch.queries[sequence][..., -1] = 6000.0
    scores = batch.softmax_scale * batch.queries[0][0].double() @ batch.tokens[0].double().T
    assert scores.max() > 65504
    assert scores.min() < -65504
    checked(arguments(batch), **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_all_scores_far_below_zero(mode: dict[str, Any]) -> None:
    """A running maximum must start at minus infinity, not at 0 or at -1e4."""
    batch = make_batch([40, 70], num_heads=2, spread=0.5)
    for sequence, keys in enumerate(batch.tokens):
        keys[:, -1] = -256.0
        batch.queries[sequence][..., -1] = 4096.0
    assert checked(arguments(batch), **mode)[1].max() < -1e5


@pytest.mark.parametrize("causal_end", [False, True])
def test_a_long_tail_beside_one_dominating_key_is_not_lost(causal_end: bool) -> None:
    """Each tile adds less than half an ulp to the sum of weights; all of them together move lse by 3e-5."""
    length = 131072 if ON_CARD else 16384
    batch = make_batch([length], [2 if causal_end else 1], num_heads=1, dims=(16, 0))
    keys, queries = batch.tokens[0], batch.queries[0]
    queries[...] = 0.0
    queries[..., 0] = 16.0
    # 20.1 nats below the first key, whose score is 0: a tile of 32 tokens brings exp(-20.1) * 32 = 5.8e-8 of the sum
    keys[:, 0] = -9.68
    keys[0, 0] = 0.0
    call = arguments(batch, 64)
    if causal_end:
        # the second query sees everything, the first all but the last key
        call["q"][0] = call["q"][1]
    checked(call, num_kv_splits=1)


def test_autocast_and_inference_mode_change_no_bit() -> None:
    call = arguments(make_batch([70, 0, 17], [1, 2, 3], num_heads=4))
    plain = run(call)
    with torch.autocast(call["q"].device.type, torch.bfloat16):
        assert same_bits(plain, run(call))
    with torch.inference_mode():
        assert same_bits(plain, run(call))
