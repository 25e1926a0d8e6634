"""EMPTY: rows without keys, padded rows, whole calls without rows: exactly 0 and -inf, and no neighbour notices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches
from triton_backend import (
    DEVICE,
    INVARIANT,
    MODES,
    arguments,
    check,
    checked,
    decode,
    few,
    is_zero,
    make_batch,
    rows_of,
    run,
)

pytestmark = pytest.mark.usefixtures("short_cuts")


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_holes(mode: dict[str, Any]) -> None:
    call = arguments(make_batch([0, 70, 0, 0, 3, 0], [1, 1, 2, 0, 3, 1], num_heads=16))
    # the outputs start as nan: a row that nobody writes shows
    out = torch.full((8, 16, 32), torch.nan, dtype=torch.float16, device=DEVICE)
    lse = torch.full((8, 16), torch.nan, device=DEVICE)
    result = checked(call, out=out, lse=lse, **mode)
    assert is_zero(rows_of(result, [0, 2, 3, 7]))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("lens", [[0], [0, 0, 0]])
def test_nothing_but_holes(lens: list[int], mode: dict[str, Any]) -> None:
    call = arguments(make_batch(lens, num_heads=3))
    assert is_zero(run(call, **mode))
    assert is_zero(run(call | {"block_table": call["block_table"][:, :0]}, **mode))
    assert is_zero(run(call | {"kv_cache": call["kv_cache"][:0]}, **mode))


@few(4)
@given(st.data())
def test_holes_are_inert(data: st.DataObject) -> None:
    """Inserting empty sequences changes nothing for the others: not a bit in the invariant mode."""
    batch = data.draw(batches(16, max_q_len=2, max_seqs=3, most=80, q_dtype=torch.float16))
    at = data.draw(st.integers(0, len(batch.tokens)))
    empty = make_batch([0], [2], num_heads=batch.queries[0].shape[1], seed=9)
    holed = replace(
        batch,
        queries=(*batch.queries[:at], *empty.queries, *batch.queries[at:]),
        tokens=(*batch.tokens[:at], *empty.tokens, *batch.tokens[at:]),
    )
    with_hole, without = checked(arguments(holed), **INVARIANT), decode(batch, **INVARIANT)
    hole = holed.rows(at)
    assert is_zero(rows_of(with_hole, hole))
    rest = [row for row in range(sum(holed.q_lens)) if not hole.start <= row < hole.stop]
    assert same_bits(rows_of(with_hole, rest), without)


@pytest.mark.parametrize("cell", [-1, 2**31 - 1, -(2**31)])
def test_both_padding_conventions(cell: int) -> None:
    """Engines pad a captured batch with length 0 or 1 over a table row of garbage: live rows do not notice."""
    call = arguments(make_batch([33, 5, 0, 0], num_heads=4), 16, poison="finite")
    live = [0, 1]
    for pad_length in (0, 1):
        table, lens = call["block_table"].clone(), call["seq_lens"].clone()
        table[2:], lens[2:] = cell, pad_length
        result = run(call | {"block_table": table, "seq_lens": lens}, **INVARIANT)
        assert same_bits(rows_of(run(call, **INVARIANT), live), rows_of(result, live))
        if pad_length == 0:
            assert is_zero(rows_of(result, [2, 3]))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_fully_masked_rows_lead_the_batch(mode: dict[str, Any]) -> None:
    """Twenty queries over six keys: the first fourteen see none."""
    result = checked(arguments(make_batch([6, 40], [20, 1], num_heads=3)), **mode)
    assert is_zero(rows_of(result, slice(0, 14)))
    assert bool((result[1][14:] > -torch.inf).all())


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_rows_of_no_sequence_are_zero(mode: dict[str, Any]) -> None:
    """A graph's surplus rows: before the first query start and past the last one, whatever they hold."""
    call = arguments(make_batch([9, 0, 40], [2, 1, 3]))
    padding = torch.full_like(call["q"], torch.nan)
    padded = call | {"q": torch.cat([padding[:3], call["q"], padding])}
    padded["cu_seqlens_q"] = call["cu_seqlens_q"] + 3
    result = checked(padded, **mode)
    assert is_zero(rows_of(result, slice(0, 3)))
    assert is_zero(rows_of(result, slice(9, None)))
    if mode == INVARIANT:
        assert same_bits(run(call, **mode), rows_of(result, slice(3, 9)))


@pytest.mark.parametrize("num_seqs", [0, 2])
def test_no_rows_in_no_rows_out(num_seqs: int) -> None:
    call = arguments(make_batch([5, 3]))
    none = {"q": call["q"][:0], "block_table": call["block_table"][:num_seqs]}
    none["seq_lens"] = call["seq_lens"][:num_seqs]
    for starts in (torch.zeros(num_seqs + 1, dtype=torch.int32, device=DEVICE), None):
        out, lse = run(call | none | {"cu_seqlens_q": starts})
        assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))
        assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)


def test_rows_without_any_sequence() -> None:
    call = arguments(make_batch([5, 3]))
    none = {name: call[name][:0] for name in ("block_table", "seq_lens")}
    result = run(call | none, cu_seqlens_q=torch.zeros(1, dtype=torch.int32, device=DEVICE))
    assert is_zero(result)
    check(run(call), call)
