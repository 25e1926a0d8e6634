"""How the work is laid out on the host: lanes that share it evenly, splits that exist, and promises that promise nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton_backend import DEVICE, arguments, checked, make_batch

import pagedmla
from pagedmla import BatchBounds, DecodeProblem, Target
from pagedmla.contract.memory import _overlaps_itself
from pagedmla.kernels.policy import triton_decode_config
from pagedmla.kernels.split_kv.grid import MOST_LANES, decode_grid, lane_count

CARD = Target("nvidia", "sm_90", 132, 232448)


@given(st.integers(1, 300), st.sampled_from([16, 32, 64]), st.integers(1, 40))
def test_every_lane_has_as_many_row_tiles_of_a_sequence(heads: int, block_m: int, q_len: int) -> None:
    row_tiles = -(-heads * q_len // block_m)
    known = lane_count(heads, block_m, heads * q_len)
    assert 1 <= known <= MOST_LANES
    assert row_tiles % known == 0
    # the host does not know the query length: it must be right for this one all the same
    assert row_tiles % lane_count(heads, block_m, 0) == 0


def test_workers_of_all_lanes_have_work() -> None:
    """128 heads are two row tiles a query token: two lanes, whatever the number of query tokens."""
    assert [lane_count(128, 64, 128 * q_len) for q_len in (1, 2, 3)] == [2, 4, 6]
    assert lane_count(128, 64, 0) == 2
    assert lane_count(16, 16, 0) == lane_count(20, 64, 0) == 1
    assert lane_count(80, 64, 80) == 2
    assert lane_count(80, 64, 0) == 1


def test_more_splits_than_tiles_take_no_memory() -> None:
    problem = DecodeProblem(16, 0.1, num_kv_splits=65535)
    config = triton_decode_config(problem, CARD, 16)
    grid = decode_grid(problem, CARD, config, units=4, num_seqs=4, capacity=640)
    assert grid.num_splits == 640 // config.block_n
    sizes = [
        pagedmla.workspace_size(replace(problem, q_dtype=torch.float16, kv_layout="fp16", num_kv_splits=n),
                                BatchBounds(4, 10), DEVICE, "triton")
        for n in (640, 65535)
    ]  # fmt: skip
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("max_q_len", [2, 2**29 + 1, 2**31 - 1, 2**62])
def test_a_promise_of_more_query_tokens_than_there_are(max_q_len: int) -> None:
    checked(arguments(make_batch([20, 3], [1, 2], num_heads=2)), max_q_len=max_q_len)


def test_slices_and_transposes_are_seen_not_to_overlap_without_a_look_at_each_row() -> None:
    """The exact look takes milliseconds for thousands of rows, in every call."""
    buffer = torch.empty(1 << 40, device="meta").as_strided((1 << 16, 1 << 10, 576), (1 << 24, 1 << 12, 1))
    assert not _overlaps_itself(buffer[..., :512])
    assert not _overlaps_itself(torch.empty(1 << 10, 1 << 16, device="meta").t())
    assert _overlaps_itself(torch.empty(4).expand(3, 4))
    assert _overlaps_itself(torch.empty(9).as_strided((3, 4), (2, 1)))
    # dimensions that interleave without meeting need the exact look, and pass it
    assert not _overlaps_itself(torch.empty(24).as_strided((2, 3), (3, 2)))
