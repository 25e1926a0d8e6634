"""The plan that the device makes is the host planner's, segment by segment, whatever lengths and query starts say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from triton_backend import DEVICE, few

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.target import Target
from pagedmla.kernels.policy import TritonDecodeConfig
from pagedmla.kernels.split_kv.grid import DecodeGrid, decode_grid, most_units
from pagedmla.kernels.split_kv.launch import PLAN_WARPS, plan_constants
from pagedmla.kernels.split_kv.schedule import plan_persistent_kernel, plan_split_kernel
from pagedmla.paging.plan_cover import check_cover
from pagedmla.paging.work_plan import (
    Segment,
    Unit,
    plan_fixed_splits,
    plan_persistent,
    plan_split,
    plan_units,
)

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
GUARD = 64
UNWRITTEN = -1  # 0xFF in every byte


@dataclass(frozen=True)
class Call:
    """What a plan is made from.

    Attributes:
        mode: fields of DecodeProblem that choose the schedule.
        workers: of the persistent schedule.
        rows: how many a sequence has, for all that the host knows, or 0; decides the lanes of the persistent schedule.
    """

    seq_lens: list[int]
    starts: list[int] | None
    num_tokens: int
    num_heads: int
    capacity: int
    mode: dict[str, Any]
    workers: int = 3
    rows: int = 1
    block_m: int = 16
    block_n: int = 16

    @property
    def config(self) -> TritonDecodeConfig:
        return TritonDecodeConfig(
            self.block_m, self.block_n, False, 4, 1, 1, invariant_split=2 * self.block_n
        )

    @property
    def grid(self) -> DecodeGrid:
        """As a decode would launch it: its bounds are tested with the plan."""
        problem = DecodeProblem(self.num_heads, 0.1, **self.mode)
        even = None if self.starts is not None else self.num_tokens // len(self.seq_lens)
        units = most_units(self.num_tokens, len(self.seq_lens), self.num_heads, self.block_m, even)
        target = Target("nvidia", "sm_90", self.workers, 0)
        return decode_grid(problem, target, self.config, units, len(self.seq_lens), self.capacity, self.rows)

    def host_units(self) -> list[Unit]:
        return plan_units(
            self.seq_lens,
            num_tokens=self.num_tokens,
            num_heads=self.num_heads,
            rows_per_tile=self.block_m,
            kv_tile=self.block_n,
            capacity=self.capacity,
            cu_seqlens_q=self.starts,
        )

    def host_plan(self, units: list[Unit]) -> list[Segment]:
        grid = self.grid
        if grid.persistent:
            return persistent_in_lanes(units, grid.num_lanes, grid.programs // grid.num_lanes)
        if grid.tiles_per_split:
            return plan_fixed_splits(units, grid.tiles_per_split, -(-self.capacity // self.block_n))
        return plan_split(units, grid.num_splits)


def persistent_in_lanes(units: list[Unit], num_lanes: int, lane_workers: int) -> list[Segment]:
    """Lane k has row tiles k, k + num_lanes, ... of every sequence, and a persistent plan of its own for them."""
    plan = []
    for lane in range(num_lanes):
        mine = [unit for unit in units if unit.row_tile % num_lanes == lane]
        begins = accumulate((unit.kv_tiles for unit in mine), initial=0)
        alone = [
            replace(unit, number=number, first_tile=begin)
            for number, (unit, begin) in enumerate(zip(mine, begins, strict=False))
        ]
        for segment in plan_persistent(alone, lane_workers):
            worker = lane * lane_workers + segment.worker
            slot = None if segment.slot is None else segment.slot + 2 * lane * lane_workers
            unit = mine[segment.unit].number
            plan.append(Segment(worker, unit, segment.tile_begin, segment.tile_end, slot))
    return plan


class Guarded:
    """An int32 array of 0xFF between guard bands of 0xFF."""

    def __init__(self, *shape: int) -> None:
        self.size = torch.Size(shape).numel()
        self.storage = torch.full((self.size + 2 * GUARD,), UNWRITTEN, dtype=torch.int32, device=DEVICE)
        self.inside: Tensor = self.storage[GUARD : GUARD + self.size].view(shape)

    def rows(self) -> list[list[int]]:
        """What was written, after a look at the guards."""
        assert bool((self.storage[:GUARD] == UNWRITTEN).all() & (self.storage[-GUARD:] == UNWRITTEN).all())
        return self.inside.tolist()


def device_plan(call: Call) -> tuple[list[list[list[int]]], list[list[int]]]:
    """(segments of each program, row_pieces), as the kernels wrote them."""
    grid = call.grid
    segments, shares = Guarded(grid.segments, 8), Guarded(grid.programs, 2)
    row_pieces = Guarded(call.num_tokens * call.num_heads, 2)
    # stride 2, odd cells poisoned: strides are the caller's business
    lens, starts = (
        torch.tensor([[value, INT32_MAX] for value in values], dtype=torch.int32, device=DEVICE)[:, 0]
        for values in (call.seq_lens, call.starts or call.seq_lens)
    )
    even = 0 if call.starts is not None else call.num_tokens // len(call.seq_lens)
    batch = (lens, 2, starts, 2, len(call.seq_lens), call.num_tokens, even, call.num_heads, call.capacity)
    constants = plan_constants(call.config, call.starts is not None) | {"num_warps": PLAN_WARPS}
    places = (segments.inside, shares.inside, row_pieces.inside)
    if grid.persistent:
        sizes = (grid.num_lanes, grid.segments // grid.num_lanes)
        plan_persistent_kernel[(grid.programs,)](*places, *sizes, *batch, **constants)
    else:
        plan_split_kernel[(grid.units,)](*places, grid.num_splits, grid.tiles_per_split, *batch, **constants)
    noted = segments.rows()
    programs = []
    for first, end in shares.rows():
        assert 0 <= first <= end <= grid.segments
        programs.append(noted[first:end])
    return programs, row_pieces.rows()


def check_plan(call: Call) -> None:
    programs, row_pieces = device_plan(call)
    units = call.host_units()
    by_place = {(unit.sequence, unit.row_tile): unit for unit in units}
    found = []
    for program, segments in enumerate(programs):
        for sequence, row_tile, begin, end, slot, pieces, q_begin, q_len in segments:
            unit = by_place[sequence, row_tile]
            assert q_begin * call.num_heads == unit.row_begin - row_tile * call.block_m
            rows = (q_begin + q_len) * call.num_heads
            assert min(rows, unit.row_begin + call.block_m) == unit.row_end
            if pieces > 1:
                assert 0 <= slot < call.grid.slots
            lanes = call.grid.num_lanes
            # the same share of every lane stands side by side
            worker = program % lanes * (len(programs) // lanes) + program // lanes
            found.append(Segment(worker, unit.number, begin, end, slot if pieces > 1 else None))
    wanted = call.host_plan(units)
    found.sort(key=lambda segment: segment.worker)
    assert found == wanted
    assert check_cover(found, units) == []
    for unit in units:
        slots = [segment.slot for segment in wanted if segment.unit == unit.number]
        for row in range(unit.row_begin, unit.row_end):
            place, pieces = row_pieces[row]
            assert pieces == len(slots)
            if pieces > 1:
                assert place == slots[0] * call.block_m + row - unit.row_begin
    # every row of the query has a unit, so nothing is left as it was
    assert all(pieces >= 1 for _, pieces in row_pieces)


MODES = st.sampled_from(
    [{}, {}, {"num_kv_splits": 1}, {"num_kv_splits": 3}, {"schedule": "split"}, {"batch_invariant": True}]
)


@st.composite
def calls(draw: st.DrawFn, garbage: bool = False) -> Call:
    capacity = draw(st.sampled_from((1, 15, 16, 90, 200)))
    lengths = st.one_of(st.sampled_from((0, 0, 1, 16, 17, capacity)), st.integers(0, capacity))
    q_lens = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    starts: list[int] | None = [sum(q_lens[:place]) for place in range(len(q_lens) + 1)]
    num_tokens = max(1, sum(q_lens) + draw(st.integers(0, 2)))
    if garbage:
        wild = st.sampled_from((-1, INT32_MIN, INT32_MAX, capacity + 1))
        lengths = st.one_of(lengths, wild)
        start = st.one_of(st.integers(-2, num_tokens + 2), st.sampled_from((INT32_MIN, INT32_MAX)))
        starts = draw(st.lists(start, min_size=len(q_lens) + 1, max_size=len(q_lens) + 1))
    elif draw(st.booleans()):
        starts, num_tokens = None, len(q_lens) * draw(st.integers(1, 3))
    seq_lens = draw(st.lists(lengths, min_size=len(q_lens), max_size=len(q_lens)))
    heads, workers = draw(st.sampled_from((1, 4, 16, 20))), draw(st.sampled_from((1, 2, 3, 5)))
    # it may be wrong: a caller promised it
    rows = draw(st.sampled_from((0, 1, 16, 40, 100)))
    return Call(seq_lens, starts, num_tokens, heads, capacity, draw(MODES), workers, rows)


@few(12)
@given(calls())
def test_the_device_plans_as_the_host_does(call: Call) -> None:
    check_plan(call)


@few(12)
@given(calls(garbage=True))
def test_garbage_is_bounded_as_on_the_host_and_nothing_outside_is_written(call: Call) -> None:
    check_plan(call)


EDGES = {
    "one sequence, many workers": Call([90], [0, 1], 1, 4, 96, {}, workers=7),
    "more workers than tiles": Call([1, 0, 3], None, 3, 4, 16, {}, workers=9),
    "all dead": Call([0, 0, 0], None, 3, 16, 64, {}, workers=2),
    "nothing but padding": Call([50], [0, 0], 5, 4, 64, {}, workers=3),
    "rows before the first start": Call([50, 20], [3, 4, 6], 8, 4, 64, {}, workers=3),
    "falling starts": Call([33, 20, 9], [0, 5, 3, 7], 7, 4, 64, {}, workers=3),
    "falling starts, split": Call([33, 20, 9], [0, 5, 3, 7], 7, 4, 64, {"num_kv_splits": 2}),
    "more splits than tiles": Call([33, 0], [0, 1, 2], 2, 4, 48, {"num_kv_splits": 9}),
    "many row tiles": Call([40, 5], [0, 3, 4], 4, 20, 48, {}, workers=4),
    "many row tiles in lanes": Call([90, 5, 40], [0, 3, 4, 6], 7, 20, 96, {}, workers=9, rows=60),
    "more lanes than row tiles": Call([90, 5], [0, 1, 3], 3, 4, 96, {}, workers=7, rows=100),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    check_plan(EDGES[name])


@pytest.mark.parametrize("mode", [{}, {"num_kv_splits": 1}], ids=str)
def test_more_sequences_than_are_scanned_at_a_time(mode: dict[str, Any]) -> None:
    """Blocks of 256 sequences: the work before a block, its first query token and falling starts are carried over."""
    lens = [place % 3 * 16 for place in range(300)]
    starts = [min(place, 257) for place in range(301)]
    starts[256] = 3
    # only some sequences have queries, so that few programs run: one row tile takes 16 tokens of one head
    few_starts = [0 if place < 250 else 6 * (place >= 258) for place in range(301)]
    for query_starts in (few_starts,) if mode else (starts, few_starts):
        check_plan(Call(lens, query_starts, 258 if query_starts is starts else 8, 1, 64, mode, workers=2))


def test_one_query_token_a_sequence_beyond_a_block_of_sequences() -> None:
    check_plan(Call([place % 5 * 9 for place in range(270)], None, 270, 4, 64, {}, workers=2))
