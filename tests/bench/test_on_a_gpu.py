"""What only a GPU can show of the benchmark: graphs, empty caches, kernels by name, clocks."""

from __future__ import annotations

import pytest
import torch

from pagedmla.bench.batch import build_batch, expected_sequences
from pagedmla.bench.ceilings import floor_of, measure_ceilings
from pagedmla.bench.decode_bench import How, measure
from pagedmla.bench.machine import clocks
from pagedmla.bench.ours import OurDecode
from pagedmla.bench.shapes import DecodeShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_decode_is_timed_in_every_way_and_taken_apart() -> None:
    shape = DecodeShape("B4 S2048 H16", (2048,) * 4, 16)
    batch = build_batch(shape, 64, torch.bfloat16, torch.device("cuda"))
    found = measure(
        OurDecode(), batch, expected_sequences(batch), How(5, cold=True, eager=True, breakdown=True)
    )
    assert (found.status, found.detail) == ("measured", "")
    assert found.time is not None
    assert found.cold is not None
    assert found.eager is not None
    assert found.breakdown is not None
    # 9 MB fit in the caches of any GPU that is meant here: from memory they cannot come faster
    assert found.cold.median_us > 0.9 * found.time.median_us
    assert found.eager.median_us > 0.9 * found.time.median_us
    kernels = sum(part.us for part in found.breakdown.parts)
    assert 0 < kernels < 3 * found.time.median_us
    # a captured decode launches each of its kernels once a call
    assert all(part.launches == pytest.approx(round(part.launches)) for part in found.breakdown.parts)


def test_a_cold_read_is_no_faster_than_a_warm_one_and_pages_of_one_token_have_a_floor() -> None:
    device = torch.device("cuda")
    ceilings = measure_ceilings(device, torch.bfloat16, rounds=3)
    for page_size in (64, 1):
        shape = DecodeShape("B4 S2048 H16", (2048,) * 4, 16, page_size=page_size)
        batch = build_batch(shape, 64, torch.bfloat16, device)
        floor = floor_of(batch, ceilings, rounds=5, cold=True)
        assert floor.read_us > 0
        if not ceilings.pages_unread:
            assert floor.cold_read_us is not None
            assert floor.cold_read_us > 0.9 * floor.read_us


def test_the_clocks_of_an_nvidia_gpu_are_plausible() -> None:
    found = clocks("cuda")
    if found is None:
        pytest.skip("nothing tells the clocks here")
    assert 100 < found["sm_mhz"] < 5000
    assert 100 < found["memory_mhz"] < 20000
