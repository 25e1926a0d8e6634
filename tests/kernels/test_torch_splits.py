"""SPLIT: the number of parts that the keys are cut into is a matter of speed alone."""

from __future__ import annotations

import pytest
import torch
from batches import Batch, arguments, check, make_batch, run, same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches, page_sizes

SPLITS = (1, 2, 3, 4, 8, 16, 17, 64, 500)


@pytest.mark.parametrize("splits", SPLITS)
def test_dense_lengths(splits: int) -> None:
    """Every length from 0 to past the split count, so that many splits are empty."""
    call = arguments(make_batch(range(36), num_heads=2, q_dtype=torch.float32), 16)
    check(run(call, num_kv_splits=splits), call)


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("length", [1, 33, 64, 127, 131])
def test_real_dimensions(splits: int, length: int) -> None:
    call = arguments(make_batch([length], num_heads=16, dims=(512, 64)), 64)
    check(run(call, num_kv_splits=splits), call)


@given(st.data())
def test_any_batch_page_and_count(data: st.DataObject) -> None:
    page_size = data.draw(page_sizes)
    call = arguments(data.draw(batches(page_size, max_q_len=4)), page_size)
    check(run(call, num_kv_splits=data.draw(st.integers(1, 70))), call)


@pytest.mark.parametrize("splits", [None, 1, 3, 16])
def test_one_key_dominates_wherever_it_stands(splits: int | None) -> None:
    """A peaked softmax at each position: the rescaling of earlier, smaller maxima and of later ones."""
    for position in range(0, 40, 3):
        batch = make_batch([40], num_heads=2, q_dtype=torch.float32, seed=position)
        batch.tokens[0][position] = 3.0 * batch.queries[0][0, 0] / batch.queries[0][0, 0].norm()
        call = arguments(batch, 16)
        check(run(call, num_kv_splits=splits), call)


@pytest.mark.parametrize("splits", [None, 1, 5])
@pytest.mark.parametrize("spread", [0.0, 60.0])
def test_flat_and_large_scores(splits: int | None, spread: float) -> None:
    call = arguments(make_batch([131, 64, 1], num_heads=4, q_dtype=torch.float32, spread=spread), 16)
    check(run(call, num_kv_splits=splits), call)


def test_the_automatic_count_at_every_length() -> None:
    call = arguments(make_batch(range(150), num_heads=1, dims=(16, 4), q_dtype=torch.float32), 32)
    check(run(call), call)


@pytest.mark.all_threads
@pytest.mark.parametrize("length", [4095, 4096, 4097, 9001])
def test_the_automatic_count_for_long_sequences(length: int) -> None:
    call = arguments(make_batch([length, 7], num_heads=2, q_dtype=torch.float32, spread=0.5), 64)
    check(run(call), call)


def test_sixteen_splits_a_hundred_times() -> None:
    call = arguments(make_batch([2048], num_heads=4, q_dtype=torch.float32), 64)
    first = run(call, num_kv_splits=16)
    check(first, call)
    assert all(same_bits(first, run(call, num_kv_splits=16)) for _ in range(100))


def test_lse_is_written_with_one_split() -> None:
    call = arguments(make_batch([64, 0], num_heads=16), 64)
    lse = torch.full((2, 16), torch.nan)
    check(run(call, lse=lse, num_kv_splits=1), call)
    check(run(call, lse=lse, num_kv_splits=2), call)


def test_more_splits_than_tokens_read_nothing_else() -> None:
    batch: Batch = make_batch([1, 3], num_heads=4)
    results = [
        run(arguments(batch, 16, poison=poison), num_kv_splits=64) for poison in ("nan", "inf", "finite")
    ]
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
