"""Whether a launch that ``schedule_model`` ran does a batch's work: against all work, laid out in a list."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from .schedule_call import KEYS, Call, Computed, Load, Program, Segment


class RowTile(NamedTuple):
    """Tiles ``begin`` .. ``end`` - 1 of all work; a group of row tiles, where lanes have one each."""

    sequence: int
    q_begin: int
    q_len: int
    kv_len: int
    row_tile: int
    begin: int
    end: int


class Work(NamedTuple):
    """All work of a launch.

    Attributes:
        row_tiles: one after the other.
        kv_tiles: of all row tiles, without those that each counts besides.
        extra: tiles that each row tile counts besides.
        alike: all row tiles have as many KV tiles.
        most_workers: programs, or as many as have tiles enough.
    """

    row_tiles: list[RowTile]
    kv_tiles: int
    extra: int
    alike: bool
    most_workers: int


def work_of(call: Call) -> Work:
    """A launch's work; docs/schedules.md says how much a row tile counts besides its KV tiles."""
    places = [
        (sequence, *place, row_tile)
        for sequence, place in enumerate(call.sequences())
        for row_tile in range(-(-place[1] * call.num_heads // call.group_rows))
    ]
    sizes = [max(1, -(-kv_len // KEYS)) for _, _, _, kv_len, _ in places]
    most_workers = max(1, min(call.programs, sum(sizes) // call.kernel.smallest))
    alike = len(set(sizes)) == 1
    extra = 0 if alike else min(call.kernel.extra, sum(sizes) // most_workers // 4)
    row_tiles: list[RowTile] = []
    tile = 0
    for place, size in zip(places, sizes, strict=True):
        row_tiles.append(RowTile(*place, tile, tile + size + extra))
        tile += size + extra
    return Work(row_tiles, sum(sizes), extra, alike, most_workers)


def check(call: Call, programs: list[Program], *, each_tile: bool = False) -> None:
    """Whether a launch does all of a batch's work once, and its programs agree on who does what.

    ``each_tile``: the programs were run so.

    Raises:
        AssertionError: it does not.
    """
    work = work_of(call)
    check_shares(call, programs, work)
    for lane, part in programs[0].computed:
        check_computed(call, [program.computed[lane, part] for program in programs], work, lane, part)
    for program in programs:
        for (lane, _), loads in program.loaded.items():
            check_loads(call, loads, program.computed[lane, 0], lane, each_tile)
        for computed in program.computed.values():
            check_signals(call, computed, each_tile)


def check_shares(call: Call, programs: list[Program], work: Work) -> None:
    """Borders rise, no share is empty, and shares are as alike as docs/schedules.md says."""
    shares = programs[0].shares
    total, workers = work.row_tiles[-1].end, shares.workers
    assert (shares.total, shares.extra) == (total, work.extra)
    border = 0
    for program in programs:
        assert program.shares == shares
        begin, end = program.share
        if program.worker >= workers:
            assert begin == end
            continue
        assert begin == border < end
        border = end
    assert border == total
    if work.alike and not is_cut_across(programs, work):
        # row tiles that are alike: a sixteenth of the programs goes without at most, if there is something for all
        assert workers <= call.programs
        assert work.most_workers * 15 <= workers * 16 or work.most_workers < call.programs
        tiles = work.row_tiles[0].end
        assert all(end - begin >= min(tiles, call.kernel.smallest) for begin, end in shares_of(programs))
        return
    assert workers == work.most_workers
    each, slack = total // workers, max(total // workers // 16, work.extra)
    assert shares.slack == slack <= each // 4
    for begin, end in shares_of(programs):
        assert each - 2 * slack <= end - begin <= each + 1 + 2 * slack
    for program in programs[:workers]:
        # what a program does: the keys of a segment, and to begin and end it; of the first it may not have the beginning
        segments = program.computed[0, 0].segments
        ends = [*(segment.begin for segment in segments[1:]), program.share[1]]
        done = sum(
            keys_between(segment, end, work.extra) for segment, end in zip(segments, ends, strict=True)
        )
        done += work.extra * len(segments)
        assert each - 2 * slack <= done <= each + 1 + 2 * slack + work.extra


def shares_of(programs: list[Program]) -> list[tuple[int, int]]:
    """Of those that have one."""
    return [program.share for program in programs if program.share[0] < program.share[1]]


def is_cut_across(programs: list[Program], work: Work) -> bool:
    """Whether some share of row tiles that are alike is neither whole ones nor a part of one."""
    tiles = work.row_tiles[0].end
    return any(
        (begin % tiles or end % tiles) and begin // tiles != (end - 1) // tiles
        for begin, end in shares_of(programs)
    )


def keys_between(segment: Segment, end: int, extra: int) -> int:
    """KV tiles that a segment before ``end`` stands for, one for those of a sequence without keys."""
    first = segment.unit.begin + extra
    return max(0, end - max(first, segment.begin))


def check_computed(call: Call, programs: list[Computed], work: Work, lane: int, part: int) -> None:
    """A lane's programs take each tile once, agree on who has which pieces, and write or publish each segment."""
    row_tiles, few = work.row_tiles, call.kernel.few
    takers = defaultdict(list)
    slots: set[int] = set()
    # the row tile that comes next, its next tile of all work, and its next KV tile
    which, tile, key = 0, 0, 0
    for worker, program in enumerate(programs):
        ends = [*(segment.begin for segment in program.segments[1:]), None]
        wanted_unions = []
        for index, segment in enumerate(program.segments):
            # segments follow one another, over programs too, and none leaves its row tile
            assert segment.begin == tile
            wanted = row_tiles[which]
            place = segment.sequence, segment.q_begin, segment.q_len, segment.kv_len
            unit = segment.unit
            assert (*place, unit.row_tile, unit.begin, unit.end) == wanted
            tile = ends[index] if ends[index] is not None else tile_after(programs, worker, row_tiles)
            assert segment.begin < tile <= wanted.end
            first_row = unit.row_tile * call.group_rows + lane * call.lane_rows
            first, last = segment.keys
            if number_of_keys(call, wanted, first_row):
                # each KV tile once, and no piece without one
                assert first == key < last
                key = last
                assert (key == number_of_keys(call, wanted, first_row)) == (tile == wanted.end)
            else:
                assert first >= last
            takers[which].append((worker, unit.first, unit.pieces))
            mine = worker - unit.first
            if unit.pieces > 1:
                # so that a program has two slots at most, and is late for no one
                assert index == (len(program.segments) - 1 if mine == 0 else 0)
            check_outcome(program, worker, index, few, slots)
            if unit.pieces > few:
                rows = (segment.q_begin, segment.q_len, first_row)
                wanted_unions.append((unit.first, unit.pieces, mine, rows, part == 0))
            if tile == wanted.end:
                which, key = which + 1, 0
        if call.lanes == 0:
            wanted_unions = [(*union[:4], True) for union in wanted_unions]
        assert program.united == wanted_unions
    assert (which, tile) == (len(row_tiles), row_tiles[-1].end)
    for found in takers.values():
        first = found[0][0]
        assert found == [(first + piece, first, len(found)) for piece in range(len(found))]


def tile_after(programs: list[Computed], worker: int, row_tiles: list[RowTile]) -> int:
    """Where the next program that has segments begins, or the end."""
    for program in programs[worker + 1 :]:
        if program.segments:
            return program.segments[0].begin
    return row_tiles[-1].end


def number_of_keys(call: Call, row_tile: RowTile, first_row: int) -> int:
    """KV tiles that are read for a lane's row tile: none past the sequence's last row."""
    return -(-row_tile.kv_len // KEYS) if first_row < row_tile.q_len * call.num_heads else 0


def check_outcome(program: Computed, worker: int, index: int, few: int, slots: set[int]) -> None:
    """A segment is written or published, and a slot holds one state."""
    unit = program.segments[index].unit
    if worker == unit.first and unit.pieces <= few:
        assert program.stored[index] == unit.pieces
        assert index not in program.published
        return
    slot = program.published[index]
    assert index not in program.stored
    assert slot == 2 * worker + (worker == unit.first)
    assert slot not in slots
    slots.add(slot)


def check_signals(call: Call, program: Computed, each_tile: bool) -> None:
    """Nobody waits for ever: each segment waits for its query, and frees that and its last tile's place once."""
    k = with_keys = 0
    assert program.phases == [turn & 1 for turn in range(len(program.segments))]
    for segment in program.segments:
        first, last = segment.keys
        # tiles, or pairs of them
        steps = list(range(first, last, call.kernel.parts))
        steps = steps if each_tile else steps[-1:]
        assert segment.steps == [(k + index, tile) for index, tile in enumerate(steps)]
        k += len(steps)
        assert segment.query_freed == 1
        last_k = max(0, k - 1) if call.lanes == 0 else None
        assert segment.freed == [(last_k, first < last)]
        assert segment.summed == ([with_keys] if call.lanes and first < last else [])
        with_keys += first < last


def check_loads(call: Call, loads: list[Load], computed: Computed, lane: int, each_tile: bool) -> None:
    """Who loads has the same segments as who computes, and the same tiles of them in the same places."""
    assert len(loads) == len(computed.segments)
    for load, segment in zip(loads, computed.segments, strict=True):
        row_tile = segment.q_begin * call.num_heads + segment.unit.row_tile * call.group_rows
        assert load.q_row == row_tile + lane * call.lane_rows
        first, last = segment.keys
        assert load.keys == (first, last) or max(load.keys[1] - load.keys[0], last - first) <= 0
        wanted = [
            ((k & 1, of_pair) if call.lanes else k, (segment.sequence, tile + of_pair))
            for k, tile in segment.steps
            for of_pair in range(call.kernel.parts)
            if tile + of_pair < last
        ]
        if each_tile:
            assert load.tiles == wanted
            lengths = [min(KEYS, segment.kv_len - tile * KEYS) for _, (_, tile) in wanted]
            # who copies whole tiles counts no tokens
            assert load.tokens in ([], lengths)
        else:
            # the page of a step that is left out was asked for with another step
            assert [place for place, _ in load.tiles] == [place for place, _ in wanted]
