"""SYNC: the same call gives the same bits, every time and beside any other call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from batches import arguments, check, make_batch, run, same_bits
from torch import Tensor

pytestmark = pytest.mark.all_threads

MODES: list[dict[str, Any]] = [{}, {"num_kv_splits": 3}, {"batch_invariant": True}]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_many_times(dtype: torch.dtype, mode: dict[str, Any]) -> None:
    call = arguments(make_batch([131, 0, 17, 200], [2, 1, 0, 3], num_heads=5, q_dtype=dtype), 16)
    first = run(call, **mode)
    check(first, call)
    assert all(same_bits(first, run(call, **mode)) for _ in range(40))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_two_threads_at_once(mode: dict[str, Any]) -> None:
    """No state is shared between calls: threads with other shapes do not meet."""
    calls = [
        arguments(make_batch([131, 0, 500], [2, 1, 3], num_heads=16, seed=1), 16),
        arguments(make_batch([40, 7], [1, 1], num_heads=3, dims=(64, 0), q_dtype=torch.float32, seed=2), 3),
    ]
    alone = [run(call, **mode) for call in calls]

    def repeat(index: int) -> list[tuple[Tensor, Tensor]]:
        return [run(calls[index], **mode) for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        for index, results in enumerate(pool.map(repeat, range(2))):
            assert all(same_bits(alone[index], result) for result in results)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_the_number_of_threads_changes_no_bit_in_the_invariant_mode(threads: int) -> None:
    call = arguments(make_batch([131, 0, 500], [2, 1, 3], num_heads=16), 16)
    torch.set_num_threads(1)
    usual = run(call, batch_invariant=True)
    torch.set_num_threads(threads)
    check(usual, call)
    assert same_bits(usual, run(call, batch_invariant=True))
