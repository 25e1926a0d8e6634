"""EMPTY: rows without keys, padded rows, whole calls without rows: exactly 0 and -inf, and no neighbour notices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import arguments, check, decode, make_batch, run, same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches
from torch import Tensor


def _zero(out: Tensor, lse: Tensor) -> bool:
    # the sign too: -0.0 is not what the contract calls exactly 0
    return bool((out == 0).all() & ~torch.signbit(out).any() & (lse == -math.inf).all())


@pytest.mark.parametrize("splits", [None, 1, 2, 16])
@pytest.mark.parametrize("invariant", [False, True])
def test_length_zero(splits: int | None, invariant: bool) -> None:
    splits = None if invariant else splits
    call = arguments(make_batch([64, 0, 0, 3, 0], num_heads=16))
    out, lse = run(call, num_kv_splits=splits, batch_invariant=invariant)
    check((out, lse), call)
    assert _zero(out[[1, 2, 4]], lse[[1, 2, 4]])


@pytest.mark.parametrize("lens", [[0], [0, 0, 0]])
def test_nothing_but_holes(lens: list[int]) -> None:
    call = arguments(make_batch(lens, num_heads=3))
    assert _zero(*run(call))
    # a width of no pages, and a pool of none, are legal when nobody has a key
    assert _zero(*run(call | {"block_table": torch.empty(len(lens), 0, dtype=torch.int32)}))
    assert _zero(*run(call | {"kv_cache": call["kv_cache"][:0]}))


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_stale_nan_in_outputs_is_overwritten(q_dtype: torch.dtype) -> None:
    batch = make_batch([9, 0, 4], [1, 2, 3], q_dtype=q_dtype)
    call = arguments(batch)
    out_dtype = torch.bfloat16 if q_dtype.itemsize == 1 else q_dtype
    out = torch.full((6, 4, 32), math.nan, dtype=out_dtype)
    lse = torch.full((6, 4), math.nan)
    run(call, out=out, lse=lse)
    assert not bool(out.isnan().any() | lse.isnan().any())
    check((out, lse), call)


@given(st.data())
def test_holes_are_inert(data: st.DataObject) -> None:
    """Inserting empty sequences changes nothing for the others: not a bit in the invariant mode."""
    batch = data.draw(batches(16, max_q_len=2, max_seqs=4, most=80))
    holes = data.draw(st.lists(st.integers(0, len(batch.tokens)), min_size=1, max_size=3))
    empty = make_batch([0] * len(holes), [2] * len(holes), num_heads=batch.queries[0].shape[1], seed=9)
    queries, tokens, place = list(batch.queries), list(batch.tokens), list(range(len(batch.tokens)))
    for index, hole in enumerate(holes):
        queries.insert(hole, empty.queries[index])
        tokens.insert(hole, empty.tokens[index])
        place.insert(hole, -1)
    holed = type(batch)(tuple(queries), tuple(tokens), batch.softmax_scale, batch.kv_lora_rank)
    call = arguments(holed)
    check(run(call), call)
    with_holes, without = run(call, batch_invariant=True), decode(batch, batch_invariant=True)
    for position, sequence in enumerate(place):
        rows = holed.rows(position)
        if sequence < 0:
            assert _zero(with_holes[0][rows], with_holes[1][rows])
        else:
            plain = batch.rows(sequence)
            assert same_bits(
                (with_holes[0][rows], with_holes[1][rows]), (without[0][plain], without[1][plain])
            )


@pytest.mark.parametrize("cell", [-1, 2**31 - 1, -(2**31), 0])
@pytest.mark.parametrize("pad_length", [0, 1])
def test_both_padding_conventions(cell: int, pad_length: int) -> None:
    """Engines pad a captured batch with length 0 or 1 over a table row of garbage: live rows keep their bits."""
    batch = make_batch([33, 5, 127, 0, 0], num_heads=16)
    call = arguments(batch, 16, poison="finite")
    usual = run(call)
    padded = _with_tail(call, cell, pad_length)
    out, lse = run(padded)
    assert same_bits((usual[0][:3], usual[1][:3]), (out[:3], lse[:3])) or pad_length == 1
    again = run(_with_tail(call, 1, pad_length))
    assert same_bits((again[0][:3], again[1][:3]), (out[:3], lse[:3]))
    if pad_length == 0:
        assert _zero(out[3:], lse[3:])


def _with_tail(call: dict[str, Any], cell: int, pad_length: int) -> dict[str, Any]:
    table, lens = call["block_table"].clone(), call["seq_lens"].clone()
    table[3:], lens[3:] = cell, pad_length
    return call | {"block_table": table, "seq_lens": lens}


def test_fully_masked_rows_lead_the_batch() -> None:
    """Twenty queries over six keys: the first fourteen see none."""
    call = arguments(make_batch([6, 40], [20, 1], num_heads=3))
    out, lse = run(call)
    check((out, lse), call)
    assert _zero(out[:14], lse[:14])
    assert bool((lse[14:] > -math.inf).all())


def test_rows_of_no_sequence_are_zero() -> None:
    """A graph's surplus rows: before the first query start and past the last one, whatever they hold."""
    call = arguments(make_batch([9, 0, 40], [2, 1, 3]))
    plain = run(call, batch_invariant=True)
    padding = torch.full((12, *call["q"].shape[1:]), math.nan, dtype=call["q"].dtype)
    q = torch.cat([padding[:3], call["q"], padding])
    padded = call | {"q": q, "cu_seqlens_q": call["cu_seqlens_q"] + 3}
    out, lse = run(padded, batch_invariant=True)
    assert _zero(out[:3], lse[:3])
    assert _zero(out[9:], lse[9:])
    assert same_bits(plain, (out[3:9], lse[3:9]))
    check(run(padded), padded)


@pytest.mark.parametrize("num_seqs", [0, 2])
def test_no_rows_in_no_rows_out(num_seqs: int) -> None:
    call = arguments(make_batch([5, 3]))
    for starts in (torch.zeros(num_seqs + 1, dtype=torch.int32), None):
        out, lse = run(
            call,
            q=call["q"][:0],
            block_table=call["block_table"][:num_seqs],
            seq_lens=call["seq_lens"][:num_seqs],
            cu_seqlens_q=starts,
        )
        assert out.shape == (0, 4, 32)
        assert lse.shape == (0, 4)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_rows_without_any_sequence() -> None:
    call = arguments(make_batch([5, 3]))
    out, lse = run(
        call,
        block_table=call["block_table"][:0],
        seq_lens=call["seq_lens"][:0],
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
    )
    assert _zero(out, lse)
    assert out.shape == (2, 4, 32)
