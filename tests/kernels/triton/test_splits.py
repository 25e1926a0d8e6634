"""SPLIT: where the keys are cut is a matter of speed alone."""

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
    FAMILY,
    INVARIANT,
    KV_TILE,
    MODES,
    PERSISTENT,
    SPLIT,
    arguments,
    checked,
    few,
    make_batch,
    run,
    small_policy,
)

from pagedmla.kernels import policy

pytestmark = pytest.mark.usefixtures("short_cuts")

OPTIONS = [PERSISTENT, SPLIT, INVARIANT, {"num_kv_splits": 1}, {"num_kv_splits": 2}, {"num_kv_splits": 7}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_lengths_around_tiles(options: dict[str, Any]) -> None:
    """The edges of KV tiles: many splits are empty, some shares end with a sequence."""
    edges = [tiles * KV_TILE + step for tiles in (1, 3) for step in (-1, 0, 1)]
    checked(arguments(make_batch([0, 1, *edges], num_heads=2), 16), **options)


@few(4)
@given(st.data())
def test_any_batch_and_count(data: st.DataObject) -> None:
    call = arguments(data.draw(batches(16, max_q_len=4, max_seqs=3, most=100, q_dtype=torch.float16)), 16)
    checked(call, num_kv_splits=data.draw(st.integers(1, 9)))


@pytest.mark.parametrize("workers", [1, 2, 5, 9])
def test_shares_of_any_size(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The persistent schedule cuts row tiles anywhere, into two pieces or many, and merges them in order."""
    small_policy(monkeypatch, workers=workers)
    checked(arguments(make_batch([131, 0, 300, 33], [1, 2, 2, 1], num_heads=12), 64), **PERSISTENT)


@pytest.mark.parametrize("keys_on_m", [False, True])
@pytest.mark.parametrize("block_m", [16, 64])
def test_tile_shapes(keys_on_m: bool, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows or keys on the matrix unit's M side, whole and cut row tiles."""
    ((_, config), *_) = policy.TRITON_DECODE_CONFIGS[FAMILY]
    shape = replace(config, block_m=block_m, keys_on_m=keys_on_m)
    monkeypatch.setitem(policy.TRITON_DECODE_CONFIGS, FAMILY, ((1 << 30, shape),))
    call = arguments(make_batch([70, 0, 5], [2, 1, 7], num_heads=5), 16)
    for mode in (PERSISTENT, SPLIT, {"num_kv_splits": 2}):
        checked(call, **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_one_key_dominates_wherever_it_stands(mode: dict[str, Any]) -> None:
    """A peaked softmax at each position: the rescaling of earlier, smaller maxima and of later ones."""
    batch = make_batch([70] * 6, num_heads=2)
    for sequence, position in enumerate((0, 15, 31, 32, 50, 69)):
        query = batch.queries[sequence][0, 0].float()
        batch.tokens[sequence][position] = (8.0 * query / query.norm()).to(torch.float16)
    checked(arguments(batch, 16), **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("spread", [0.0, 60.0])
def test_flat_and_large_scores(spread: float, mode: dict[str, Any]) -> None:
    checked(arguments(make_batch([131, 64, 1], num_heads=4, spread=spread), 16), **mode)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_lse_is_written(options: dict[str, Any]) -> None:
    lse = torch.full((2, 3), torch.nan, device=DEVICE)
    checked(arguments(make_batch([64, 0], num_heads=3), 64), lse=lse, **options)
    assert not bool(lse.isnan().any())


def test_real_dimensions() -> None:
    call = arguments(make_batch([131], num_heads=16, dims=(512, 64)), 64)
    for options in (PERSISTENT, {"num_kv_splits": 3}):
        checked(call, **options)


def test_more_splits_than_tokens_read_nothing_else() -> None:
    batch = make_batch([1, 3], num_heads=4)
    results = [
        run(arguments(batch, 16, poison=poison), num_kv_splits=7) for poison in ("nan", "inf", "finite")
    ]
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_same_bits_every_time(mode: dict[str, Any]) -> None:
    call = arguments(make_batch([131, 0, 17], [2, 1, 3], num_heads=5), 16)
    assert same_bits(run(call, **mode), run(call, **mode))


def test_the_invariant_cut_depends_on_the_length_alone() -> None:
    """Splits of a fixed size, of which a wider table only adds empty ones."""
    batch = make_batch([131, 5], num_heads=4)
    narrow, wide = (run(arguments(batch, 16, spare_columns=spare), **INVARIANT) for spare in (0, 40))
    assert same_bits(narrow, wide)
