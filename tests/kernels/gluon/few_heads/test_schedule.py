"""The schedule of the few-heads kernel on a CPU: its own code, run by ``schedule_model``, against work laid out in a list."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .schedule_model import FEW, KEYS, Call, Language, Number, Program, number, run, schedule

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
# what choice.py lets the kernel divide: quotients of fewer bits than a float has
MOST_QUOTIENT = 2**22

# no kernel and no tensors: an example is as long as its programs are many
many = settings(max_examples=max(60, settings().max_examples))


class RowTile(NamedTuple):
    """Tiles ``begin`` .. ``end`` - 1 of all work."""

    sequence: int
    q_begin: int
    q_len: int
    kv_len: int
    row_tile: int
    begin: int
    end: int


def row_tiles_of(call: Call) -> list[RowTile]:
    """All row tiles, one after the other."""
    found: list[RowTile] = []
    tile = 0
    for sequence, (q_begin, q_len, kv_len) in enumerate(call.sequences()):
        for row_tile in range(-(-q_len * call.num_heads // call.rows)):
            tiles = max(1, -(-kv_len // KEYS))
            found.append(RowTile(sequence, q_begin, q_len, kv_len, row_tile, tile, tile + tiles))
            tile += tiles
    return found


def check(call: Call, programs: list[Program]) -> None:
    """Whether a launch does all of a batch's work once, and its programs agree on who does what.

    Raises:
        AssertionError: it does not.
    """
    row_tiles = row_tiles_of(call)
    check_shares(call, programs, row_tiles)
    takers = defaultdict(list)
    slots: set[int] = set()
    which, tile = 0, 0
    for program in programs:
        for index, segment in enumerate(program.segments):
            # each tile once: segments follow one another, over programs too, and none leaves its row tile
            assert segment.begin == tile < segment.end
            wanted = row_tiles[which]
            place = segment.sequence, segment.q_begin, segment.q_len, segment.kv_len
            unit = segment.unit
            assert (*place, unit.row_tile, unit.begin, unit.end) == wanted
            takers[which].append((program.worker, unit.first, unit.pieces))
            piece = program.worker - unit.first
            if unit.pieces > 1:
                # so that a program has two slots at most, and is late for no one
                assert index == (len(program.segments) - 1 if piece == 0 else 0)
            check_outcome(program, index, piece, slots)
            tile = segment.end
            which += tile == wanted.end
        rows = [(s.q_begin * call.num_heads + s.unit.row_tile * call.rows, s.begin) for s in program.segments]
        assert program.loaded == rows
        wanted_unions = [
            (
                s.unit.first,
                s.unit.pieces,
                program.worker - s.unit.first,
                (s.q_begin, s.q_len, s.unit.row_tile),
            )
            for s in program.segments
            if s.unit.pieces > FEW
        ]
        assert program.united == wanted_unions
    assert (which, tile) == (len(row_tiles), row_tiles[-1].end)
    for found in takers.values():
        first = found[0][0]
        assert found == [(first + piece, first, len(found)) for piece in range(len(found))]


def check_shares(call: Call, programs: list[Program], row_tiles: list[RowTile]) -> None:
    """Borders rise, no share is empty, and shares are as alike as docs/schedules.md says."""
    total = row_tiles[-1].end
    workers, slack = programs[0].workers, programs[0].slack
    most = min(call.programs, total)
    alike = len({row_tile.end - row_tile.begin for row_tile in row_tiles}) == 1
    # where row tiles are alike, a sixteenth of the programs may go without
    assert workers == most or (alike and most * 15 <= workers * 16 < most * 16)
    assert slack <= total // workers // 16
    border = 0
    for program in programs:
        assert (program.workers, program.slack) == (workers, slack)
        begin, end = program.share
        if program.worker >= workers:
            assert begin == end
            continue
        assert begin == border < end
        assert alike or total // workers - 2 * slack <= end - begin <= -(-total // workers) + 2 * slack
        border = end
    assert border == total


def check_outcome(program: Program, index: int, piece: int, slots: set[int]) -> None:
    """A segment is written or published, and a slot holds one state."""
    pieces = program.segments[index].unit.pieces
    if piece == 0 and pieces <= FEW:
        assert program.stored[index] == pieces
        assert index not in program.published
        return
    slot = program.published[index]
    assert index not in program.stored
    assert slot == 2 * program.worker + (piece == 0)
    assert slot not in slots
    slots.add(slot)


def spread(num_seqs: int, longest: int) -> list[int]:
    """Lengths of all sizes, in no order."""
    return [int(longest * (0.618034 * i % 1.0) ** 3) for i in range(num_seqs)]


FIXED = {
    "one sequence, all programs": Call([131072]),
    "one sequence, fewer tiles than programs": Call([5 * KEYS + 1]),
    "one key": Call([1]),
    "no keys": Call([0, 0, -3], programs=2),
    "even, a row tile each": Call([1000] * 128),
    "even, two workers each": Call([4096] * 64),
    "even, seven programs": Call([4096] * 3, programs=7),
    "nearly even": Call([4096] * 40 + [4160] + [4096] * 23, programs=16),
    "a border a sixteenth before an end": Call([34 * KEYS, 30 * KEYS], programs=2),
    "a border a sixteenth behind a beginning": Call([30 * KEYS, 34 * KEYS], programs=2),
    "a last piece of a sixteenth": Call([66 * KEYS, 30 * KEYS], programs=3),
    "all sizes": Call(spread(31, 60000)),
    "all sizes, 32 sequences": Call(spread(32, 60000), num_heads=5, programs=60),
    "255, 256 and 257 sequences": Call(spread(257, 9000), programs=16),
    "past a scan": Call(spread(600, 3000), programs=7),
    "a long one among short ones": Call([10] * 60 + [200000] + [10] * 60),
    "lengths past the table": Call([INT32_MAX, 5, INT32_MIN, 300], capacity=1024, programs=3),
    "several row tiles each": Call([700, 0, 5000], even_q_len=4, num_heads=12, programs=7),
    "ragged": Call(spread(9, 20000), [0, 1, 1, 4, 4, 4, 9, 10, 12, 12], 12, num_heads=16, programs=16),
    "ragged, padding around": Call([500, 900], [3, 4, 6], 11, num_heads=8, programs=3),
    "ragged, starts that fall": Call(spread(5, 7000), [0, 4, 2, INT32_MAX, -1, 6], 8, programs=7),
    "ragged, past a scan": Call(
        spread(300, 4000), [i - i // 3 for i in range(301)], 203, num_heads=4, programs=7
    ),
    "ragged, all in the padding": Call([900] * 40, [0] * 41, 5, programs=3),
    "row tiles of 32 rows": Call(spread(20, 9000), even_q_len=3, rows=32, programs=16),
}

# code that only saves time has none here
MUTANTS = {
    "a border that moves a tile further": ("border", "begin <= shares.slack", "begin <= shares.slack + 1"),
    "a border that moves a tile less": (
        "border",
        "end - ideal <= shares.slack",
        "end - ideal < shares.slack",
    ),
    "another slack for the first worker": ("unit_at", "begin <= shares.slack", "begin < shares.slack"),
    "another slack for the last worker": (
        "unit_at",
        "end - last_border <= shares.slack",
        "end - last_border < shares.slack",
    ),
    "shares of base tiles": ("ideal_border", " + gl.minimum(within, shares.rest)", ""),
    "a worker too early": ("ideal_worker", "gl.where(is_longer, 0, shares.rest)", "0"),
    "a second scan from nothing": ("find", "total + gl.associative_scan", "gl.associative_scan"),
    "queries that go back": (
        "look_at",
        "gl.maximum(query_start(index + 1, batch), begin)",
        "query_start(index + 1, batch)",
    ),
    "a state in the slot of another": ("slot_of", "piece == 0, 1, 0", "piece == 0, 0, 0"),
    "unions of the wrong row tile": ("attend_share", "q_begin_after = place.q_begin", "q_begin_after = 0"),
    "a loader that keeps its sequence": ("load_share", "place = following(", "following("),
}


@pytest.mark.parametrize("name", FIXED)
def test_all_work_is_done_once(name: str) -> None:
    check(FIXED[name], run(FIXED[name]))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_schedule_is_found(name: str) -> None:
    for call in sorted(FIXED.values(), key=lambda call: call.programs):
        try:
            check(call, run(call, MUTANTS[name]))
        except (AssertionError, IndexError):
            return
    pytest.fail("no batch shows it")


@pytest.mark.parametrize(
    ("num_seqs", "workers", "smallest", "largest"),
    [
        # whole row tiles, and programs left over
        (128, 128, 64, 64),
        (264, 132, 128, 128),
        (256, 128, 128, 128),
        # equal parts of a row tile
        (64, 128, 32, 32),
        (1, 64, 1, 1),
        # row tiles in twos would be for 100: so borders are cut, and each may move by 6 tiles
        (200, 132, 96 - 2 * 6, 97 + 2 * 6),
    ],
)
def test_equal_lengths(num_seqs: int, workers: int, smallest: int, largest: int) -> None:
    call = Call([4096] * num_seqs)
    programs = run(call)
    check(call, programs)
    assert programs[0].workers == workers
    sizes = [end - begin for begin, end in (program.share for program in programs[:workers])]
    assert smallest <= min(sizes) <= max(sizes) <= largest


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Batches of all kinds that choice.py gives to the kernel, in small launches more often than in large ones."""
    num_seqs = draw(st.one_of(st.integers(1, 8), st.integers(1, 40), st.sampled_from((255, 256, 257, 300))))
    capacity = draw(st.sampled_from((0, 1, 63, 640, 5000, 1 << 20)))
    longest = draw(st.sampled_from((1, 200, 5000, 200_000)))
    length = st.one_of(
        st.integers(0, longest), st.just(longest), st.just(0), st.sampled_from((INT32_MIN, INT32_MAX))
    )
    few = draw(st.lists(length, min_size=1, max_size=8))
    kind = draw(st.sampled_from(("some of few", "all sizes")))
    lens = [few[i * 7 % 11 % len(few)] for i in range(num_seqs)]
    if kind == "all sizes":
        lens = [few[0], *spread(num_seqs, longest)][:num_seqs]
    programs = draw(st.sampled_from((1, 2, 3, 7, 16, 16, 60)))
    given = {
        "num_heads": draw(st.sampled_from((1, 3, 8, 12, 16))),
        "rows": draw(st.sampled_from((16, 16, 32))),
        "capacity": capacity,
        "programs": programs,
    }
    if draw(st.booleans()):
        return Call(lens, even_q_len=draw(st.sampled_from((1, 1, 2, 5))), **given)
    steps = draw(st.lists(st.sampled_from((0, 0, 1, 1, 2, 5, -2)), min_size=1, max_size=9))
    starts = [draw(st.integers(0, 2))]
    for i in range(num_seqs):
        starts.append(starts[-1] + steps[i % len(steps)])
    num_tokens = max(1, starts[-1] + draw(st.sampled_from((-3, 0, 0, 1, 20))))
    return Call(lens, starts, num_tokens, **given)


@many
@given(calls(), st.integers(-2, 2))
def test_any_batch(call: Call, ulps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Number, "ulps", ulps)
        check(call, run(call))


@pytest.mark.parametrize("ulps", range(-2, 3))
def test_divide(ulps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Number, "ulps", ulps)
    divide = schedule(Language(1))["divide"]
    rng = np.random.default_rng(ulps + 2)
    # of all sizes, and on both sides of multiples
    b = np.exp2(rng.uniform(0, 31, 20000)).astype(np.int64)
    q = np.minimum(np.exp2(rng.uniform(0, 22, b.size)).astype(np.int64), MOST_QUOTIENT - 1)
    b, q = np.append(b, [1, 1, 512, INT32_MAX]), np.append(q, [MOST_QUOTIENT - 1, 0, MOST_QUOTIENT - 1, 1])
    a = np.concatenate([q * b + shift for shift in (-1, 0, 1)] + [(q + 1) * b - 1])
    b = np.tile(b, 4)
    fits = (a >= 0) & (a <= INT32_MAX) & (a // b < MOST_QUOTIENT)
    a, b = a[fits], b[fits]
    assert a.size > 20000
    np.testing.assert_array_equal(divide(number(a), number(b)), a // b)
