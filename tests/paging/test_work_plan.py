"""The split-KV work plan against brute force: every (row, KV tile) once, equal shares, slots used once, merges in KV order."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedmla.contract.errors import InvalidArgument
from pagedmla.paging import work_plan as wp
from pagedmla.paging.plan_cover import check_cover
from pagedmla.paging.work_plan import Segment, Unit, plan_persistent, plan_units

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
EXAMPLE = {"num_tokens": 3, "num_heads": 16, "rows_per_tile": 16, "kv_tile": 64, "capacity": 1024}

# plain integers and no tensors: many examples cost little, and 15 of them find little
many = settings(max_examples=max(200, settings().max_examples))
workers = st.one_of(st.integers(1, 12), st.integers(1, 300))
splits = st.one_of(st.integers(1, 5), st.integers(1, 40))


@dataclass(frozen=True)
class Call:
    """The arguments of ``plan_units``, and what follows from them by looking at one query token after another."""

    seq_lens: list[int]
    cu_seqlens_q: list[int] | None
    num_tokens: int
    num_heads: int
    rows_per_tile: int
    kv_tile: int
    capacity: int

    def units(self) -> list[Unit]:
        arguments = dict(vars(self))
        return plan_units(arguments.pop("seq_lens"), **arguments)

    def num_tiles(self, tokens: int) -> int:
        return len(range(0, tokens, self.kv_tile))

    def owners(self) -> list[tuple[int, int]]:
        """(sequence, key tiles) of each query token: it belongs to the sequence before the first one that begins past it."""
        inside = [0 if n < 0 else self.capacity if n > self.capacity else n for n in self.seq_lens]
        tiles = [self.num_tiles(length) for length in [*inside, 0]]
        if self.cu_seqlens_q is None:
            num_seqs = len(inside)
            return [(n, tiles[n]) for n in range(num_seqs) for _ in range(self.num_tokens // num_seqs)]
        # what the first start says does not count, nor does one that falls: a later start before the token has passed it
        later = list(enumerate(self.cu_seqlens_q))[1:]
        owners = [
            next((n - 1 for n, start in later if start > token), len(later))
            for token in range(self.num_tokens)
        ]
        return [(n, tiles[n]) for n in owners]


@st.composite
def calls(draw: st.DrawFn, any_starts: bool = False) -> Call:
    """A call with garbage lengths; its query starts rise from 0 or less, unless they may be anything."""
    kv_tile = draw(st.sampled_from((1, 2, 16, 64)))
    capacity = draw(st.sampled_from((0, 1, kv_tile - 1, kv_tile, 3 * kv_tile + 1, 11 * kv_tile)))
    edges = (0, 1, kv_tile, kv_tile + 1, 4 * kv_tile, capacity, -1, INT32_MIN, INT32_MAX)
    length = st.one_of(st.sampled_from(edges), st.integers(0, max(1, capacity)))
    q_lens = draw(st.lists(st.integers(0, 5), max_size=6))
    starts: list[int] | None = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    num_tokens = max(0, sum(q_lens) + draw(st.integers(-3, 3)))
    kind = draw(st.sampled_from(("as they are", "even", "garbage ends")))
    if any_starts:
        value = st.one_of(st.integers(-2, 12), st.sampled_from((INT32_MIN, INT32_MAX)))
        starts = draw(st.lists(value, min_size=len(q_lens) + 1, max_size=len(q_lens) + 1))
    elif kind == "even":
        starts, num_tokens = None, len(q_lens) * draw(st.integers(0, 5))
    elif kind == "garbage ends" and q_lens:
        starts = [INT32_MIN, *starts[1:-1], INT32_MAX]
    num_heads, rows_per_tile = draw(st.sampled_from((1, 3, 16, 40))), draw(st.sampled_from((1, 7, 16, 64)))
    seq_lens = draw(st.lists(length, min_size=len(q_lens), max_size=len(q_lens)))
    return Call(seq_lens, starts, num_tokens, num_heads, rows_per_tile, kv_tile, capacity)


def check_every_row_and_tile(call: Call, units: list[Unit], segments: list[Segment]) -> None:
    """How often each row meets each tile, by counting; and every row has somebody who writes it."""
    attended: Counter[tuple[int, int]] = Counter()
    written: Counter[int] = Counter()
    for segment in segments:
        for row in range(units[segment.unit].row_begin, units[segment.unit].row_end):
            written[row] += 1
            attended.update((row, tile) for tile in range(segment.tile_begin, segment.tile_end))
    for token, (_, key_tiles) in enumerate(call.owners()):
        for row in range(token * call.num_heads, (token + 1) * call.num_heads):
            assert written.pop(row, 0) >= 1, row
            assert all(attended.pop((row, tile), 0) == 1 for tile in range(key_tiles)), row
            # a worker of the persistent schedule visits the one tile of a sequence without keys
            assert attended.pop((row, 0), 0) <= (not key_tiles), row
    assert not attended + written


def merge_as_kernels_do(segments: list[Segment], slots: dict[int, list[int]]) -> list[list[int]]:
    """Runs the plan with lists of tiles for states; ``slots``: where the merge looks for a unit's pieces, in its order."""
    out: dict[int, list[int]] = {}
    workspace: dict[int, list[int]] = {}
    for segment in segments:
        place, key = (out, segment.unit) if segment.slot is None else (workspace, segment.slot)
        assert key not in place, "written twice"
        place[key] = list(range(segment.tile_begin, segment.tile_end))
    for unit in slots.keys() - out.keys():
        out[unit] = [tile for slot in slots[unit] for tile in workspace.pop(slot)]
    assert not workspace, "a state that nobody merges"
    return [out[unit] for unit in slots]


def persistent_by_looking(call: Call, num_workers: int) -> list[Segment]:
    """The persistent plan, tile by tile: one array of owners, cut where the worker or the unit changes."""
    tiles: list[tuple[int, int]] = []  # (unit, tile of the unit), all units end to end
    unit = 0
    for (_, key_tiles), tokens in groupby(call.owners()):
        for _ in range(0, len(list(tokens)) * call.num_heads, call.rows_per_tile):
            tiles += [(unit, tile) for tile in range(key_tiles or 1)]
            unit += 1
    total, count = len(tiles), min(num_workers, len(tiles))
    owner = [w for w in range(count) for _ in range(w * total // count, (w + 1) * total // count)]
    pieces = groupby(zip(owner, tiles, strict=True), key=lambda pair: (pair[0], pair[1][0]))
    runs = [(worker, unit, [tile for _, (_, tile) in run]) for (worker, unit), run in pieces]
    plan = []
    for worker, unit, run in runs:
        owners = [other for other, its_unit, _ in runs if its_unit == unit]
        slot = 2 * worker + (worker == owners[0]) if len(owners) > 1 else None
        plan.append(Segment(worker, unit, run[0], run[-1] + 1, slot))
    return plan


def test_query_ranges_are_bounded_whatever_the_starts_are() -> None:
    # first, since unbounded starts would keep the other tests busy for hours
    assert wp.query_ranges(2, 9, [-5, 4, 30]) == [(0, 4), (4, 9), (9, 9)]
    assert wp.query_ranges(3, 9, [12, 3, 2, 6]) == [(0, 3), (3, 3), (3, 6), (6, 9)]
    assert wp.query_ranges(3, 9, [0, 7, 2, 30]) == [(0, 7), (7, 7), (7, 9), (9, 9)]
    assert wp.query_ranges(2, 9, [2, 4, 6]) == [(0, 4), (4, 6), (6, 9)]
    assert wp.query_ranges(2, 8) == [(0, 4), (4, 8)]
    assert wp.query_ranges(0, 3, [1]) == [(0, 3)]


@many
@given(calls())
def test_units_hold_the_rows_of_one_sequence_in_order(call: Call) -> None:
    units = call.units()
    rows = [row for unit in units for row in range(unit.row_begin, unit.row_end)]
    assert rows == list(range(call.num_tokens * call.num_heads))
    owners = call.owners()
    first_tile = 0
    for number, unit in enumerate(units):
        # padding, too, is apart from every sequence
        (owner,) = {owners[row // call.num_heads] for row in range(unit.row_begin, unit.row_end)}
        assert (unit.sequence, unit.key_tiles) == owner
        assert (unit.number, unit.first_tile) == (number, first_tile)
        first_tile += unit.key_tiles or 1
        of_sequence = [other for other in units if other.sequence == unit.sequence]
        assert unit.row_tile == of_sequence.index(unit)
        assert unit.row_begin - of_sequence[0].row_begin == unit.row_tile * call.rows_per_tile
        assert 0 < unit.row_end - unit.row_begin <= call.rows_per_tile


@many
@given(calls(), workers)
def test_persistent_plan_is_the_one_made_tile_by_tile(call: Call, num_workers: int) -> None:
    units = call.units()
    segments = plan_persistent(units, num_workers)
    assert segments == persistent_by_looking(call, num_workers)
    assert check_cover(segments, units) == []
    check_every_row_and_tile(call, units, segments)


@many
@given(calls(), workers)
def test_persistent_shares_are_equal_and_merges_find_their_pieces(call: Call, num_workers: int) -> None:
    units = call.units()
    segments = plan_persistent(units, num_workers)
    num_tiles = sum(unit.key_tiles or 1 for unit in units)
    shares: Counter[int] = Counter()
    for segment in segments:
        shares[segment.worker] += segment.tile_end - segment.tile_begin
        assert segment.tile_begin < segment.tile_end
        assert segment.slot is None or 0 <= segment.slot // 2 == segment.worker < num_workers
    assert sorted(shares) == list(range(min(num_workers, num_tiles)))
    assert not shares or max(shares.values()) - min(shares.values()) <= 1
    slots = {}
    for unit in units:
        owners = wp.unit_workers(unit, num_tiles, min(num_workers, num_tiles))
        slots[unit.number] = [wp.partial_slot(worker, owners) for worker in owners]
        assert slots[unit.number] == sorted(slots[unit.number])
    assert merge_as_kernels_do(segments, slots) == [list(range(unit.key_tiles or 1)) for unit in units]


def check_splits(call: Call, units: list[Unit], segments: list[Segment], num_splits: int) -> None:
    assert check_cover(segments, units) == []
    check_every_row_and_tile(call, units, segments)
    slots = {unit.number: [unit.number * num_splits + s for s in range(num_splits)] for unit in units}
    assert [(s.unit, s.worker) for s in segments] == [(unit, p) for unit in slots for p in slots[unit]]
    assert all(segment.slot == (None if num_splits == 1 else segment.worker) for segment in segments)
    assert merge_as_kernels_do(segments, slots) == [list(range(unit.key_tiles)) for unit in units]


@many
@given(calls(), splits)
def test_split_plan_covers_and_merges(call: Call, num_splits: int) -> None:
    units = call.units()
    segments = wp.plan_split(units, num_splits)
    check_splits(call, units, segments, num_splits)
    for segment in segments:
        # s * n // N <= tile, and s the largest such: s * n < (tile + 1) * N
        n = units[segment.unit].key_tiles
        covered = range(segment.tile_begin, segment.tile_end)
        assert {((tile + 1) * num_splits - 1) // n for tile in covered} <= {segment.worker % num_splits}


@many
@given(calls(), st.integers(1, 12))
def test_fixed_splits_cover_and_merge(call: Call, tiles_per_split: int) -> None:
    units, capacity_tiles = call.units(), call.num_tiles(call.capacity)
    segments = wp.plan_fixed_splits(units, tiles_per_split, capacity_tiles)
    num_splits = len(range(0, capacity_tiles, tiles_per_split)) or 1
    assert wp.fixed_split_count(tiles_per_split, capacity_tiles) == num_splits
    check_splits(call, units, segments, num_splits)
    for segment in segments:
        # which split a tile is in depends on the tile alone: not on the batch, the capacity or the length
        covered = range(segment.tile_begin, segment.tile_end)
        assert {tile // tiles_per_split for tile in covered} <= {segment.worker % num_splits}


@many
@given(calls(any_starts=True), workers, splits)
def test_any_query_starts_give_every_row_one_unit(call: Call, num_workers: int, num_splits: int) -> None:
    units = call.units()
    for segments in (plan_persistent(units, num_workers), wp.plan_split(units, num_splits)):
        assert check_cover(segments, units) == []
        check_every_row_and_tile(call, units, segments)


def test_every_small_batch_on_every_small_machine() -> None:
    for lengths, num_workers in product(product(range(5), repeat=3), range(1, 17)):
        # a query token each, so that the brute force tells equal neighbours apart by their sequence
        call = Call(list(lengths), None, 3, 1, 1, 1, 4)
        segments = plan_persistent(call.units(), num_workers)
        assert check_cover(segments, call.units()) == [], (lengths, num_workers)
        assert segments == persistent_by_looking(call, num_workers), (lengths, num_workers)


@pytest.mark.parametrize("num_workers", [1, 2, 131, 132, 300])
def test_real_sizes(num_workers: int) -> None:
    """Long and short sequences, garbage lengths among them, on the workers of a whole device."""
    lengths = [641, 45118, 0, 1730, 1696, INT32_MAX, -1, 127, 131]
    sizes = {"num_heads": 128, "rows_per_tile": 64, "kv_tile": 64, "capacity": 131072}
    units = plan_units(lengths, num_tokens=18, **sizes)
    assert [unit.key_tiles for unit in units[::4]] == [11, 705, 0, 28, 27, 2048, 0, 2, 3]
    segments = plan_persistent(units, num_workers)
    assert check_cover(segments, units) == []
    assert sum(s.tile_end - s.tile_begin for s in segments) == 4 * 2826
    assert check_cover(wp.plan_fixed_splits(units, 32, 2048), units) == []


def test_nothing_to_do_and_padding() -> None:
    sizes = {"num_heads": 2, "rows_per_tile": 4, "kv_tile": 64, "capacity": 128}
    for lengths, starts in (([], None), ([], [0]), ([5, 9], None), ([5, 9], [0, 0, 0])):
        units = plan_units(lengths, num_tokens=0, cu_seqlens_q=starts, **sizes)
        assert units == plan_persistent(units, 132) == wp.plan_split(units, 4) == []
        assert check_cover([], units) == []
    units = plan_units([100], num_tokens=5, cu_seqlens_q=[0, 2], **sizes)
    assert units == [Unit(0, 0, 0, 0, 4, 2, 0), Unit(1, 1, 0, 4, 8, 0, 2), Unit(2, 1, 1, 8, 10, 0, 3)]


RIGHT = [Segment(0, 0, 0, 3, 1), Segment(1, 0, 3, 5, 2), Segment(1, 1, 0, 1, None)]
RIGHT += [Segment(1, 2, 0, 1, 3), Segment(2, 2, 1, 5, 4), Segment(3, 2, 5, 9, 6)]


def changed(index: int, **fields: int | None) -> list[Segment]:
    return [*RIGHT[:index], replace(RIGHT[index], **fields), *RIGHT[index + 1 :]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("segments", "breach"),
    [
        (RIGHT[:2] + RIGHT[3:], "unit 1 has no writer"),
        (RIGHT[:-1], "unit 2 tile 5 is covered 0 times"),
        (changed(0, tile_end=4), "unit 0 tile 3 is covered 2 times"),
        (changed(0, tile_begin=-1), "unit 0 has 5 tiles, not -1..3"),
        (changed(5, tile_end=10), "unit 2 has 9 tiles, not 5..10"),
        (changed(4, slot=2), "slot 2 is written by workers [1, 2]"),
        (changed(0, slot=-1), "slot -1 is written by workers [0]"),
        (changed(2, slot=0), "unit 1 is whole, and yet goes to slot 0"),
        (changed(4, slot=None), "unit 2 has 3 pieces and 2 slots"),
        (changed(5, worker=4), "unit 2 is cut among workers [1, 2, 4], which are not consecutive"),
        (changed(5, worker=2), "unit 2 is cut among workers [1, 2, 2], which are not consecutive"),
        (changed(3, slot=5), "unit 2 has slots [5, 4, 6], which do not rise"),
        ([*RIGHT, Segment(3, 7, 0, 1, None)], "unit 7 does not exist"),
        ([*RIGHT, Segment(2, 1, 0, 1, 8)], "unit 1 tile 0 is covered 2 times"),
        ([Segment(0, 0, 3, 5, 1), Segment(1, 0, 0, 3, 2)], "unit 0 has pieces that are not in KV order"),
    ],
)
def test_a_planted_fault_is_reported(segments: list[Segment], breach: str) -> None:
    units = plan_units([300, 0, 513], **EXAMPLE)
    assert plan_persistent(units, 4) == RIGHT
    assert check_cover(reversed(RIGHT), units) == []
    assert breach in check_cover(segments, units)


def test_shared_rows_are_reported() -> None:
    """No starts give such units; those of another planner might."""
    units = plan_units([300, 300, 5], cu_seqlens_q=[0, 1, 2, 3], **EXAMPLE | {"rows_per_tile": 64})
    units[1] = replace(units[1], row_end=units[1].row_end + 16)
    assert check_cover(wp.plan_split(units, 2), units) == ["row 32 belongs to units 1 and 2"]


WRONG = [("num_heads", 0), ("rows_per_tile", 0), ("kv_tile", True), ("capacity", -1), ("num_tokens", -1)]
WRONG += [("num_tokens", 4), ("cu_seqlens_q", [0, 1, 2])]


@pytest.mark.parametrize(("argument", "value"), WRONG)
def test_wrong_sizes_are_refused(argument: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as error:
        plan_units([300, 0, 513], **EXAMPLE | {argument: value})
    assert error.value.argument == argument


def test_wrong_counts_are_refused() -> None:
    fixed = wp.plan_fixed_splits
    # the longest unit has 9 tiles, and a capacity of 8 would lose one
    for plan, *counts in ((plan_persistent, 0), (wp.plan_split, 0), (fixed, 0, 16), (fixed, 4, 8)):
        with pytest.raises(InvalidArgument):
            plan(plan_units([300, 0, 513], **EXAMPLE), *counts)


def test_the_examples_in_the_module_and_the_page_are_true() -> None:
    failed, tried = doctest.testmod(wp)
    assert failed == 0
    assert tried > 0
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 2
    for source, printed in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, PAGE.name, "exec"), names)  # the project's own page
        assert out.getvalue() == printed
