"""Values on the device are bounded, not trusted: nothing outside the tensors is touched, and no neighbour notices."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from batches import arguments, check, expect, make_batch, run, same_bits
from torch import Tensor

from pagedmla.conformance import numerics
from pagedmla.contract.errors import InvalidArgument

MODES: list[dict[str, Any]] = [{}, {"num_kv_splits": 3}, {"batch_invariant": True}]
HUGE = 2**31 - 1
SEQ_LENS, Q_LENS = [33, 20, 127, 5], [1, 2, 3, 1]
BAD = 1
# the rows of the sequences whose values are right
OTHERS = [0, 3, 4, 5, 6]


def _call() -> dict[str, Any]:
    return arguments(make_batch(SEQ_LENS, Q_LENS, num_heads=4), 16)


def _with(call: dict[str, Any], name: str, index: tuple[int, ...], value: int) -> dict[str, Any]:
    changed = call[name].clone()
    changed[index] = value
    return call | {name: changed}


def _others(result: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(part[OTHERS] for part in result)


def _banded_run(call: dict[str, Any], mode: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Runs between guard rows and checks them; returns the rows inside."""
    out = torch.full((7 + 8, 4, 32), -768.0, dtype=torch.bfloat16)
    lse = torch.full((7 + 8, 4), -768.0)
    run(call, out=out[4:-4], lse=lse[4:-4], **mode)
    for storage in (out, lse):
        assert bool((storage[:4] == -768).all() & (storage[-4:] == -768).all())
    return out[4:-4], lse[4:-4]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("value", [-1, -(2**31), HUGE, 15, 16, 1000])
@pytest.mark.parametrize("column", [0, 1])
def test_page_outside_the_pool(value: int, column: int, mode: dict[str, Any]) -> None:
    call = _call()
    num_pages = call["kv_cache"].shape[0]
    good = run(call, **mode)
    bad = _with(call, "block_table", (BAD, column), num_pages if value == 16 else value)
    assert same_bits(_others(good), _others(_banded_run(bad, mode)))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("value", [-1, -(2**31), HUGE, 1000, 16 * 10 + 1])
def test_length_past_the_table_or_negative(value: int, mode: dict[str, Any]) -> None:
    """Past its own pages a row of the table is garbage too.  A length may change how the call is split, so outside the
    invariant mode the neighbours keep their values, not their bits.
    """
    call = _call()
    assert call["block_table"].shape[1] == 10
    result = _banded_run(_with(call, "seq_lens", (BAD,), value), mode)
    out, lse = (part.clone() for part in run(call, **mode))
    out[OTHERS], lse[OTHERS] = _others(result)
    check((out, lse), call)
    if "batch_invariant" in mode:
        assert same_bits(_others(run(call, **mode)), _others(result))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "starts",
    [
        [0, 1, 0, 6, 7],
        [0, 5, 3, 6, 7],
        [-4, 1, 3, 6, 7],
        [0, 1, 3, 6, 99],
        [0, HUGE, -HUGE, 6, 7],
        [7, 6, 3, 1, 0],
    ],
)
def test_query_starts_that_fall_or_lie_outside(starts: list[int], mode: dict[str, Any]) -> None:
    """A row that one sequence alone claims, rightly, stays right; all others are unspecified, none is outside.

    It keeps its bits in batch-invariant mode.  In the others the row tiles of a batch decide the shapes of matrix products,
    and a processor's library may round differently for each shape.
    """
    call = _call()
    bad = call | {"cu_seqlens_q": torch.tensor(starts, dtype=torch.int32)}
    good, result = run(call, **mode), _banded_run(bad, mode)
    right = call["cu_seqlens_q"].tolist()
    claims = [list(range(max(0, a), min(7, b))) for a, b in pairwise(starts)]
    for sequence, rows in enumerate(claims):
        sound = [starts[sequence], starts[sequence + 1]] == [right[sequence], right[sequence + 1]]
        alone = not any(
            row in other for row in rows for place, other in enumerate(claims) if place != sequence
        )
        if sound and alone:
            if mode.get("batch_invariant"):
                assert same_bits(tuple(part[rows] for part in good), tuple(part[rows] for part in result))
            expected = expect(call)
            mine = numerics.Expected(expected.out[rows], expected.lse[rows], expected.bound[rows])
            comparison = numerics.compare(result[0][rows], result[1][rows], mine)
            assert comparison.passed, comparison.detail


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_everything_bad_at_once(mode: dict[str, Any]) -> None:
    call = _call()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        noise = {
            name: torch.randint(
                -(2**31), HUGE, call[name].shape, generator=generator, dtype=torch.int64
            ).int()
            for name in ("block_table", "seq_lens", "cu_seqlens_q")
        }
        _banded_run(call | noise, mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", ["kv_cache", "block_table"])
def test_keys_promised_where_there_are_no_pages(name: str, mode: dict[str, Any]) -> None:
    """A pool of no pages, and a table of no columns: nothing to read, so nothing is read."""
    call = _call()
    empty = call["kv_cache"][:0] if name == "kv_cache" else call["block_table"][:, :0]
    _banded_run(call | {name: empty}, mode)
    with pytest.raises(InvalidArgument):
        run(call | {name: empty}, validate=True, **mode)


@pytest.mark.parametrize(
    ("name", "index", "value", "sequence"),
    [
        ("block_table", (1, 1), -1, 1),
        ("block_table", (2, 7), HUGE, 2),
        ("seq_lens", (1,), -3, 1),
        ("seq_lens", (3,), 161, 3),
        ("cu_seqlens_q", (1,), 5, 1),
        ("cu_seqlens_q", (4,), 99, 3),
        ("cu_seqlens_q", (0,), -1, 0),
    ],
)
def test_validate_names_argument_sequence_and_value(
    name: str, index: tuple[int, ...], value: int, sequence: int
) -> None:
    bad = _with(_call(), name, index, value)
    with pytest.raises(InvalidArgument) as caught:
        run(bad, validate=True)
    assert caught.value.argument == name
    message = str(caught.value)
    assert str(value) in message
    assert f"sequence {sequence}" in message


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_validate_takes_what_is_right(mode: dict[str, Any]) -> None:
    """Garbage in cells that no sequence owns is right, and so is a hole."""
    call = arguments(make_batch([33, 0, 127, 1], [1, 2, 0, 1], num_heads=4), 16)
    result = run(call, validate=True, **mode)
    check(result, call)
    assert same_bits(result, run(call, **mode))


def test_more_queries_than_keys_is_right() -> None:
    call = arguments(make_batch([2, 0], [5, 3]), 16)
    check(run(call, validate=True), call)
