"""Values on the device are bounded, not trusted: nothing outside the tensors is touched, and no neighbour notices.

Bounds are seen in three ways: guard rows around what is written, nan in every page that nobody owns, and an address outside any
allocation, which ends the process.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from batches import same_bits
from torch import Tensor
from triton_backend import DEVICE, INVARIANT, MODES, arguments, check, make_batch, problem_of, rows_of, run

import pagedmla

pytestmark = pytest.mark.usefixtures("short_cuts")

HUGE = 2**31 - 1
BAD = 1
# the rows of the sequences whose values are right
OTHERS = [0, 3, 4, 5]


def _call() -> dict[str, Any]:
    return arguments(make_batch([33, 20, 70, 5], [1, 2, 2, 1], num_heads=4), 16)


def _with(call: dict[str, Any], name: str, index: tuple[int, ...], value: int) -> dict[str, Any]:
    changed = call[name].clone()
    changed[index] = value
    return call | {name: changed}


@cache
def _good(number: int) -> tuple[Tensor, Tensor]:
    """What the call gives before anything in it is spoiled, in mode ``number``."""
    return run(_call(), **MODES[number])


def _good_in(mode: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return _good(MODES.index(mode))


def _banded_run(call: dict[str, Any], mode: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Runs between guard rows and checks them; returns the rows inside."""
    out = torch.full((6 + 8, 4, 32), -768.0, dtype=torch.float16, device=DEVICE)
    lse = torch.full((6 + 8, 4), -768.0, device=DEVICE)
    run(call, out=out[4:-4], lse=lse[4:-4], **mode)
    for storage in (out, lse):
        assert bool((storage[:4] == -768).all() & (storage[-4:] == -768).all())
    return out[4:-4], lse[4:-4]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("column", "value"), [(0, -1), (1, -(2**31)), (0, HUGE), (1, "num_pages")])
def test_page_outside_the_pool(column: int, value: int | str, mode: dict[str, Any]) -> None:
    call = _call()
    outside = call["kv_cache"].shape[0] if isinstance(value, str) else value
    bad = _with(call, "block_table", (BAD, column), outside)
    assert same_bits(rows_of(_good_in(mode), OTHERS), rows_of(_banded_run(bad, mode), OTHERS))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("value", [-1, -(2**31), HUGE, 16 * 7 + 1])
def test_length_past_the_table_or_negative(value: int, mode: dict[str, Any]) -> None:
    """A length may change how the call is cut, so outside the invariant mode the neighbours keep their values, not their
    bits.
    """
    call = _call()
    assert call["block_table"].shape[1] == 7
    result = _banded_run(_with(call, "seq_lens", (BAD,), value), mode)
    good = _good_in(mode)
    patched = tuple(part.clone() for part in good)
    for part, new in zip(patched, result, strict=True):
        part[OTHERS] = new[OTHERS]
    check((patched[0], patched[1]), call)
    if mode == INVARIANT:
        assert same_bits(rows_of(good, OTHERS), rows_of(result, OTHERS))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    ("starts", "kept"),
    [
        ([0, 1, 0, 5, 6], [0, 5]),
        ([0, 5, 3, 5, 6], [5]),
        ([-4, 1, 3, 5, 6], [1, 2, 3, 4, 5]),
        ([0, 1, 3, 5, 99], [0, 1, 2, 3, 4, 5]),
        ([0, HUGE, -HUGE, 5, 6], []),
        ([6, 5, 3, 1, 0], []),
        ([3, 1, 3, 5, 6], [3, 4, 5]),
    ],
)
def test_query_starts_that_fall_or_lie_outside(
    starts: list[int], kept: list[int], mode: dict[str, Any]
) -> None:
    """``kept``: rows that one sequence claims, rightly, and no other."""
    call = _call()
    bad = call | {"cu_seqlens_q": torch.tensor(starts, dtype=torch.int32, device=DEVICE)}
    result = _banded_run(bad, mode)
    # every row is somebody's or padding: none keeps what stood there
    assert not bool((result[0] == -768).any() | (result[1] == -768).any())
    good = _good_in(mode)
    if mode == INVARIANT:
        assert same_bits(rows_of(good, kept), rows_of(result, kept))
    torch.testing.assert_close(result[0][kept], good[0][kept], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(result[1][kept], good[1][kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_everything_bad_at_once(mode: dict[str, Any]) -> None:
    call = _call()
    # nothing is promised of the query lengths, so any sequence may have all of the tokens
    size = pagedmla.workspace_size(*problem_of(call, len(call["q"]), **mode), DEVICE, "triton")
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        noise = {
            name: torch.randint(
                -(2**31), HUGE, call[name].shape, generator=generator, dtype=torch.int64
            ).int().to(DEVICE)
            for name in ("block_table", "seq_lens", "cu_seqlens_q")
        }  # fmt: skip
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
        _banded_run(call | noise | {"workspace": workspace}, mode)
