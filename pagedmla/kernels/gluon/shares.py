"""The schedule of a launch, which each program makes for itself from the lengths: nothing is planned before.

Work is laid end to end: sequence after sequence, each sequence's row tiles one after the other, each row tile's KV tiles
(docs/schedules.md).  Worker w takes tiles border(w) .. border(w + 1) - 1.  Borders lie at equal distances, but for two things,
since a cut costs microseconds: a border that would cut off a sixteenth of a share or less moves to the end that is so near;
and where all row tiles have as many KV tiles as the next, a worker takes whole ones, or an equal part of one, if that leaves
few workers over.  Where they do not, each row tile counts some tiles more than it has, before its first: the time that it takes
to begin and to end one, so that who has many short sequences has fewer keys.

All numbers are i32: the launcher refuses batches whose tiles an i32 could not count.  This code runs once, so most of its time
goes into fetching it: it is kept short, above all free of the long sequences that integer divisions are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagedmla.kernels.gluon.layouts import COMPUTE_WARPS, KEYS, scan_layout

# a border moves by a share / SLACK at most
SLACK = gl.constexpr(16)
# a scan of so many sequences is for fewer than that: there are no others
SMALL_SCAN = gl.constexpr(32)
_MOST = gl.constexpr(2**31 - 1)


class Sequences(NamedTuple):
    """Some sequences in a row.

    Attributes:
        q_end: query token past each one's last.
        row_tiles, kv_tiles: of each; a sequence without query tokens has no row tile.
    """

    q_end: Any
    row_tiles: Any
    kv_tiles: Any


class Shares(NamedTuple):
    """How all tiles are shared out.

    Attributes:
        total: tiles of all row tiles; workers: programs that have some.
        extra: tiles that each row tile counts more than it has KV tiles.
        even_tiles: KV tiles of each row tile, or 0 where they differ.
        base, rest: worker w's ideal first tile is w * base + min(w, rest) within a span.
        slack: tiles by which a border may move.
        span, span_workers: tiles that are shared out among so many workers, and the next tiles among the next: all tiles among
            all workers, or one row tile, or a worker's row tiles.
    """

    total: Any
    workers: Any
    extra: Any
    even_tiles: Any
    base: Any
    rest: Any
    slack: Any
    span: Any
    span_workers: Any


class Place(NamedTuple):
    """A sequence in the row of all work.

    Attributes:
        sequence: its index; num_seqs for the padding, query tokens past the last start.
        before: tiles of the sequences before it.
        q_begin, q_len: its first query token, and how many it has.
        kv_len: its keys, tokens.
    """

    sequence: Any
    before: Any
    q_begin: Any
    q_len: Any
    kv_len: Any


class Unit(NamedTuple):
    """A row tile of a sequence: KV tiles begin .. end - 1 of all work, in pieces of workers first .. first + pieces - 1."""

    row_tile: Any
    begin: Any
    end: Any
    first: Any
    pieces: Any


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def divide(a, b):
    """a // b for a >= 0 and b > 0 whose quotient is below 2^22."""
    quotient = (a.to(gl.float32) / b.to(gl.float32)).to(gl.int32)
    # a float has 24 bits: the quotient is off by a few at most
    for _ in gl.static_range(2):
        rest = a - quotient * b
        quotient += (rest >= b).to(gl.int32) - (rest < 0).to(gl.int32)
    return quotient


@gluon.jit
def query_start(index, batch):
    """Query start ``index`` of 0 .. num_seqs + 1, within the query; the first is 0, whatever it says, and the last the end."""
    start = gl.load(
        batch.cu_seqlens_q + gl.minimum(index, batch.num_seqs).to(gl.int64) * batch.cu_seqlens_q_stride
    )
    start = gl.minimum(gl.maximum(start, 0), batch.num_tokens)
    return gl.where(index <= 0, 0, gl.where(index > batch.num_seqs, batch.num_tokens, start))


@gluon.jit
def kv_length(sequence, batch):
    """Keys of sequences in tokens, within 0 .. capacity; 0 for the padding and past it."""
    last = gl.minimum(sequence, batch.num_seqs - 1).to(gl.int64)
    length = gl.load(batch.seq_lens + last * batch.seq_lens_stride)
    length = gl.minimum(gl.maximum(length, 0), batch.capacity)
    return gl.where(sequence < batch.num_seqs, length, 0)


@gluon.jit
def kv_tiles(kv_len):
    """KV tiles of a sequence, at least one: somebody must write the rows that see no key."""
    return gl.maximum((kv_len + KEYS - 1) // KEYS, 1)


@gluon.jit
def key_tiles(tile, end, begin, kv_len, extra):
    """(first, the one past the last) KV tile of a row tile, which begins at ``begin``, in tiles ``tile`` .. ``end`` - 1 of all
    work; a sequence without keys has one tile, of which nothing is read.
    """
    last = gl.minimum(end - begin - extra, (kv_len + KEYS - 1) // KEYS)
    return gl.maximum(tile - begin - extra, 0), last


@gluon.jit
def row_tiles(q_len, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr):
    """Row tiles of a sequence with ``q_len`` query tokens."""
    return (q_len * NUM_HEADS + ROWS - 1) // ROWS


@gluon.jit
def look_at(
    first, start_before, batch,
    RAGGED: gl.constexpr, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr, SCAN: gl.constexpr,
):  # fmt: skip
    """``Sequences`` ``first`` and following, [SCAN].

    ``start_before``: the largest query start before them; starts that fall count as the largest before.
    """
    index = first + gl.arange(0, SCAN, scan_layout(SCAN, COMPUTE_WARPS))
    tiles = kv_tiles(kv_length(index, batch))
    if RAGGED:
        begin = gl.maximum(gl.associative_scan(query_start(index, batch), 0, larger), start_before)
        end = gl.maximum(query_start(index + 1, batch), begin)
        rows = row_tiles(gl.where(index <= batch.num_seqs, end - begin, 0), NUM_HEADS, ROWS)
        return Sequences(end, rows, tiles)
    else:
        rows = gl.where(index < batch.num_seqs, row_tiles(batch.even_q_len, NUM_HEADS, ROWS), 0)
        return Sequences(index, rows, tiles)


@gluon.jit
def share_out(
    sequences, programs, batch,
    RAGGED: gl.constexpr, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr, SCAN: gl.constexpr,
    SMALLEST: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """The ``Shares`` of so many programs; ``sequences`` are the first SCAN."""
    total = gl.sum(sequences.row_tiles * sequences.kv_tiles, 0)
    units = gl.sum(sequences.row_tiles, 0)
    longest = gl.max(gl.where(sequences.row_tiles > 0, sequences.kv_tiles, 0), 0)
    shortest = gl.min(gl.where(sequences.row_tiles > 0, sequences.kv_tiles, _MOST), 0)
    if SCAN > SMALL_SCAN:  # noqa: SIM102  (known when this is compiled)
        if batch.num_seqs >= SCAN:
            start = gl.max(sequences.q_end, 0)
            for first in range(SCAN, batch.num_seqs + 1, SCAN):
                more = look_at(first, start, batch, RAGGED, NUM_HEADS, ROWS, SCAN)
                total += gl.sum(more.row_tiles * more.kv_tiles, 0)
                units += gl.sum(more.row_tiles, 0)
                longest = gl.maximum(longest, gl.max(gl.where(more.row_tiles > 0, more.kv_tiles, 0), 0))
                shortest = gl.minimum(shortest, gl.min(gl.where(more.row_tiles > 0, more.kv_tiles, _MOST), 0))
                start = gl.maximum(start, gl.max(more.q_end, 0))
    workers = gl.maximum(gl.minimum(programs, total // SMALLEST), 1)
    extra = 0
    even_tiles = longest
    if longest != shortest:
        even_tiles = 0
        # a quarter of a share at most, so that no two borders are within the extra tiles of one row tile
        extra = gl.minimum(EXTRA, divide(total, workers) // 4)
        total += units * extra
    span = total
    span_workers = workers
    if even_tiles > 0:
        # row tiles of a worker, or workers of a row tile: with one of the two 1
        units_each = gl.maximum(divide(units + programs - 1, programs), 1)
        workers_each = gl.minimum(
            gl.maximum(divide(programs, gl.maximum(units, 1)), 1), gl.maximum(longest // SMALLEST, 1)
        )
        takers = divide(units + units_each - 1, units_each) * workers_each
        # no more than a sixteenth of the programs goes without, but for those that there are no tiles for
        if (takers * 16 >= workers * 15) | (workers < programs):
            workers = takers
            span = units_each * longest
            span_workers = workers_each
    base = divide(span, span_workers)
    rest = span - base * span_workers
    slack = gl.where(span == total, gl.maximum(base // SLACK, extra), 0)
    return Shares(total, workers, extra, even_tiles, base, rest, slack, span, span_workers)


@gluon.jit
def ideal_border(worker, shares):
    """Where ``worker``'s share would begin if borders did not move."""
    whole = divide(worker, shares.span_workers)
    within = worker - whole * shares.span_workers
    tile = whole * shares.span + within * shares.base + gl.minimum(within, shares.rest)
    return gl.minimum(tile, shares.total)


@gluon.jit
def ideal_worker(tile, shares):
    """The worker whose ideal share holds ``tile``."""
    whole = divide(tile, shares.span)
    tile -= whole * shares.span
    longer = shares.rest * (shares.base + 1)
    is_longer = tile < longer
    offset = gl.where(is_longer, tile, tile - longer)
    length = gl.where(is_longer, shares.base + 1, gl.maximum(shares.base, 1))
    return whole * shares.span_workers + gl.where(is_longer, 0, shares.rest) + divide(offset, length)


@gluon.jit
def find(
    position, sequences, extra, batch,
    RAGGED: gl.constexpr, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr, SCAN: gl.constexpr,
):  # fmt: skip
    """The ``Place`` of the sequence that holds tile ``position``; past the last tile, some place past the last sequence."""
    all_before = gl.associative_scan(sequences.row_tiles * (sequences.kv_tiles + extra), 0, plus)
    passed = all_before <= position
    sequence = gl.sum(passed.to(gl.int32), 0)
    before = gl.max(gl.where(passed, all_before, 0), 0)
    q_begin = 0
    if RAGGED:
        # ranges follow one another: this one begins where the last that was passed ends
        q_begin = gl.max(gl.where(passed, sequences.q_end, 0), 0)
    if SCAN > SMALL_SCAN:  # noqa: SIM102
        if (batch.num_seqs >= SCAN) & (sequence == SCAN):
            total = before
            start = gl.max(sequences.q_end, 0)
            for first in range(SCAN, batch.num_seqs + 1, SCAN):
                more = look_at(first, start, batch, RAGGED, NUM_HEADS, ROWS, SCAN)
                all_before = total + gl.associative_scan(more.row_tiles * (more.kv_tiles + extra), 0, plus)
                passed = all_before <= position
                sequence += gl.sum(passed.to(gl.int32), 0)
                before = gl.maximum(before, gl.max(gl.where(passed, all_before, 0), 0))
                total = gl.max(all_before, 0)
                if RAGGED:
                    q_begin = gl.maximum(q_begin, gl.max(gl.where(passed, more.q_end, 0), 0))
                    start = gl.maximum(start, gl.max(more.q_end, 0))
    if RAGGED:
        q_len = gl.maximum(query_start(sequence + 1, batch), q_begin) - q_begin
    else:
        q_begin = sequence * batch.even_q_len
        q_len = batch.even_q_len
    return Place(sequence, before, q_begin, q_len, kv_length(sequence, batch))


@gluon.jit
def find_even(position, tiles, batch, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr):
    """`find` in a batch of sequences that are all alike, with ``tiles`` KV tiles each."""
    each = row_tiles(batch.even_q_len, NUM_HEADS, ROWS) * tiles
    sequence = divide(position, each)
    q_begin = sequence * batch.even_q_len
    return Place(sequence, sequence * each, q_begin, batch.even_q_len, kv_length(sequence, batch))


@gluon.jit
def following(place, tile, end, batch, RAGGED: gl.constexpr):
    """The sequence after ``place``, which ends before ``tile``; the next with query tokens, if the share goes on."""
    q_begin = place.q_begin + place.q_len
    sequence = place.sequence + 1
    q_len = place.q_len
    if RAGGED:
        q_len = gl.maximum(query_start(sequence + 1, batch), q_begin) - q_begin
        while (q_len == 0) & (tile < end):
            sequence += 1
            q_len = gl.maximum(query_start(sequence + 1, batch), q_begin) - q_begin
    return Place(sequence, tile, q_begin, q_len, kv_length(sequence, batch))


@gluon.jit
def sequence_end(place, extra, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr):
    """The tile past the last of ``place``'s."""
    return place.before + row_tiles(place.q_len, NUM_HEADS, ROWS) * (kv_tiles(place.kv_len) + extra)


@gluon.jit
def row_tile_at(tile, place, extra, ONE_ROW_TILE: gl.constexpr):
    """(row tile, its first tile, the one past its last) of ``place``'s that holds ``tile``."""
    tiles = kv_tiles(place.kv_len) + extra
    if ONE_ROW_TILE:
        return 0, place.before, place.before + tiles
    else:
        row_tile = divide(tile - place.before, tiles)
        begin = place.before + row_tile * tiles
        return row_tile, begin, begin + tiles


@gluon.jit
def border(worker, place, shares, ONE_ROW_TILE: gl.constexpr):
    """Where ``worker``'s share begins; ``place`` holds its ideal border."""
    ideal = ideal_border(worker, shares)
    _, begin, end = row_tile_at(ideal, place, shares.extra, ONE_ROW_TILE)
    moved = gl.where(ideal - begin <= shares.slack, begin, gl.where(end - ideal <= shares.slack, end, ideal))
    return gl.where(ideal >= shares.total, shares.total, moved)


@gluon.jit
def unit_at(tile, place, worker, share, shares, ONE_ROW_TILE: gl.constexpr):
    """The ``Unit`` of sequence ``place`` that holds ``tile`` of ``worker``'s share, by the rule that ``border`` follows."""
    row_tile, begin, end = row_tile_at(tile, place, shares.extra, ONE_ROW_TILE)
    first = worker
    pieces = 1
    if (begin < share[0]) | (end > share[1]):
        first = ideal_worker(begin, shares)
        next_border = ideal_border(first + 1, shares)
        first += ((next_border < end) & (next_border - begin <= shares.slack)).to(gl.int32)
        last = ideal_worker(end - 1, shares)
        last_border = ideal_border(last, shares)
        last -= ((last_border - begin > shares.slack) & (end - last_border <= shares.slack)).to(gl.int32)
        pieces = last - first + 1
    return Unit(row_tile, begin, end, first, pieces)


@gluon.jit
def share_of(
    worker, programs, batch,
    RAGGED: gl.constexpr, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr, SCAN: gl.constexpr,
    ONE_ROW_TILE: gl.constexpr, SMALLEST: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """((first tile, tile past the last) of ``worker``'s share, ``Place`` of the first, ``Shares`` of all ``programs``).

    SMALLEST: KV tiles that are worth a program of their own.  EXTRA: those that last as long as to begin and to end a row tile.
    """
    sequences = look_at(0, 0, batch, RAGGED, NUM_HEADS, ROWS, SCAN)
    shares = share_out(sequences, programs, batch, RAGGED, NUM_HEADS, ROWS, SCAN, SMALLEST, EXTRA)
    ideal = ideal_border(worker, shares)
    next_ideal = ideal_border(worker + 1, shares)
    if RAGGED:
        first = find(ideal, sequences, shares.extra, batch, RAGGED, NUM_HEADS, ROWS, SCAN)
        after = find(next_ideal, sequences, shares.extra, batch, RAGGED, NUM_HEADS, ROWS, SCAN)
    else:
        if shares.even_tiles > 0:
            first = find_even(ideal, shares.even_tiles, batch, NUM_HEADS, ROWS)
            after = find_even(next_ideal, shares.even_tiles, batch, NUM_HEADS, ROWS)
        else:
            first = find(ideal, sequences, shares.extra, batch, RAGGED, NUM_HEADS, ROWS, SCAN)
            after = find(next_ideal, sequences, shares.extra, batch, RAGGED, NUM_HEADS, ROWS, SCAN)
    tile = border(worker, first, shares, ONE_ROW_TILE)
    end = border(worker + 1, after, shares, ONE_ROW_TILE)
    end = gl.where(worker < shares.workers, end, tile)
    return (tile, end), first, shares
