"""The work plan, made on the device: see pagedmla.paging.work_plan for the data, the invariants and a worked example.

One small kernel before the decode reads ``seq_lens`` and ``cu_seqlens_q`` and notes down who attends to what, so a captured
graph stays right when they change, and no value comes to the host.  Bounds are applied here, once: what is noted may be
used in an address.

    segments   i32 [segments, 8]   sequence, row tile, first KV tile, KV tile past the last, slot, pieces of the row tile,
                                        the sequence's first query token, its number of query tokens
    shares     i32 [programs, 2]        each decode program's first segment, and the one past its last
    row_pieces i32 [num_tokens * num_heads, 2]   of each row: its place in the first piece (slot * BLOCK_M + row of the tile),
                                        and the number of pieces; one piece is no piece: its row is written at once

``batch`` is (seq_lens, its stride, cu_seqlens_q, its stride, num_seqs, num_tokens, even_q_len, num_heads, capacity);
capacity is what the block table can name, in tokens.  With RAGGED a sequence more, at num_seqs, holds the padding: query
tokens past the last start.  Query starts that fall count as the largest before them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

# sequences that are scanned at a time
SCAN = tl.constexpr(256)
SEGMENT_FIELDS = tl.constexpr(8)


@triton.jit
def larger(a, b):
    """The combination of a running maximum."""
    return tl.maximum(a, b)


@triton.jit
def query_start(index, batch):
    """Query start ``index`` of 0 .. num_seqs + 1, within the query; the first is 0, whatever it says, and the last the end."""
    _, _, cu_seqlens_q, cu_seqlens_q_stride, num_seqs, num_tokens, _, _, _ = batch
    start = tl.load(cu_seqlens_q + tl.minimum(index, num_seqs).to(tl.int64) * cu_seqlens_q_stride)
    start = tl.minimum(tl.maximum(start, 0), num_tokens)
    return tl.where(index <= 0, 0, tl.where(index > num_seqs, num_tokens, start))


@triton.jit
def kv_length(index, batch):
    """Keys of sequences ``index`` in tokens, within 0 .. capacity; 0 for the padding and past the last sequence."""
    seq_lens, seq_lens_stride, _, _, num_seqs, _, _, _, capacity = batch
    length = tl.load(seq_lens + tl.minimum(index, num_seqs - 1).to(tl.int64) * seq_lens_stride)
    return tl.where(index < num_seqs, tl.minimum(tl.maximum(length, 0), capacity), 0)


@triton.jit
def row_tile_count(q_len, batch, BLOCK_M: tl.constexpr):
    """Row tiles of a sequence with ``q_len`` query tokens."""
    return tl.cdiv(q_len * batch[7], BLOCK_M)


@triton.jit
def lane_row_tiles(q_len, lane, num_lanes, batch, BLOCK_M: tl.constexpr):
    """Row tiles lane, lane + num_lanes, ... of a sequence with ``q_len`` query tokens."""
    return (row_tile_count(q_len, batch, BLOCK_M) + (num_lanes - 1 - lane)) // num_lanes


@triton.jit
def kv_tile_count(length, BLOCK_N: tl.constexpr):
    """KV tiles of a sequence, at least one: somebody must write the rows that see no key."""
    return tl.maximum(tl.cdiv(length, BLOCK_N), 1)


@triton.jit
def query_ranges(first, start_before, batch, RAGGED: tl.constexpr):
    """(first query token, number of them) i32 [SCAN] of sequences ``first`` and following.

    ``start_before``: the largest query start before these sequences.
    """
    index = first + tl.arange(0, SCAN)
    if RAGGED:
        begin = tl.maximum(tl.associative_scan(query_start(index, batch), 0, larger), start_before)
        end = tl.maximum(query_start(index + 1, batch), begin)
        return begin, tl.where(index <= batch[4], end - begin, 0)
    else:
        return index * batch[6], tl.where(index < batch[4], batch[6], 0)


@triton.jit
def find_sequence(
    position,
    lane,
    num_lanes,
    batch,
    RAGGED: tl.constexpr,
    COUNT_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Lays the work of all sequences end to end and finds the sequence that holds ``position``.

    Work is a sequence's row tiles, times its KV tiles with COUNT_TILES.  Of its row tiles those count that the lane has: every
    num_lanes-th from ``lane`` on.

    Returns:
        (sequence i32, work before it i64, its first query token i32, all work i64)
    """
    sequence = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    start = tl.zeros([], tl.int32)
    q_begin = tl.zeros([], tl.int32)
    for first in tl.range(0, batch[4] + (1 if RAGGED else 0), SCAN):
        begin, q_len = query_ranges(first, start, batch, RAGGED)
        work = lane_row_tiles(q_len, lane, num_lanes, batch, BLOCK_M).to(tl.int64)
        if COUNT_TILES:
            work *= kv_tile_count(kv_length(first + tl.arange(0, SCAN), batch), BLOCK_N)
        passed = total + tl.cumsum(work, 0) <= position
        sequence += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, work, 0), 0)
        # ranges follow one another: this one begins where the last that was passed ends
        q_begin = tl.maximum(q_begin, tl.max(tl.where(passed, begin + q_len, 0), 0))
        start = tl.maximum(start, tl.max(begin + q_len, 0))
        total += tl.sum(work, 0)
    return sequence, before, q_begin, total


@triton.jit
def query_end(sequence, q_begin, batch, RAGGED: tl.constexpr):
    """The query token past ``sequence``'s last, which is the next sequence's first."""
    if RAGGED:
        return tl.maximum(query_start(sequence + 1, batch), q_begin)
    else:
        return q_begin + batch[6]


@triton.jit
def row_tile_number(sequence, q_begin, row_tile, batch, BLOCK_M: tl.constexpr):
    """A number for each row tile that grows from one to the next: a sequence has at most one row tile more than whole ones."""
    return q_begin * batch[7] // BLOCK_M + sequence + row_tile


@triton.jit
def share_begin(worker, total, num_workers):
    """i64: the first KV tile of ``worker``'s share; shares differ by one tile at most."""
    return worker.to(tl.int64) * total // num_workers


@triton.jit
def worker_of(tile, total, num_workers):
    """The worker whose share holds ``tile``: the inverse of ``share_begin``."""
    return ((tile + 1) * num_workers - 1) // total


@triton.jit
def write_segment(segment, sequence, row_tile, tile_begin, tile_end, slot, pieces, q_begin, q_len, mask):
    """Notes down one segment, or a vector of them."""
    tl.store(segment, sequence, mask=mask)
    tl.store(segment + 1, row_tile, mask=mask)
    tl.store(segment + 2, tile_begin.to(tl.int32), mask=mask)
    tl.store(segment + 3, tile_end.to(tl.int32), mask=mask)
    tl.store(segment + 4, slot, mask=mask)
    tl.store(segment + 5, pieces, mask=mask)
    tl.store(segment + 6, q_begin, mask=mask)
    tl.store(segment + 7, q_len, mask=mask)


@triton.jit
def write_row_pieces(row_pieces, row_tile, first_slot, pieces, q_begin, q_len, batch, BLOCK_M: tl.constexpr):
    """Notes for each row of the tile where its first piece lies and how many there are."""
    num_heads = batch[7]
    in_tile = tl.arange(0, BLOCK_M)
    row = row_tile * BLOCK_M + in_tile
    is_row = row < q_len * num_heads
    pointers = row_pieces + (q_begin.to(tl.int64) * num_heads + row) * 2
    tl.store(pointers, first_slot * BLOCK_M + in_tile, mask=is_row)
    tl.store(pointers + 1, pieces + tl.zeros([BLOCK_M], tl.int32), mask=is_row)


BATCH_ARGUMENTS = (
    "seq_lens_stride", "cu_seqlens_q_stride", "num_seqs", "num_tokens", "even_q_len", "num_heads", "capacity",
)  # fmt: skip


@triton.jit(do_not_specialize=(*BATCH_ARGUMENTS, "num_lanes", "lane_segments"))
def plan_persistent_kernel(
    segments,
    shares,
    row_pieces,
    num_lanes,
    lane_segments,
    seq_lens,
    seq_lens_stride: tl.int64,
    cu_seqlens_q,
    cu_seqlens_q_stride: tl.int64,
    num_seqs,
    num_tokens,
    even_q_len,
    num_heads,
    capacity,
    RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Grid (num_lanes * workers of a lane): each notes down the segments of its equal share of all KV tiles of its lane.

    A lane has every num_lanes-th row tile of each sequence.  A share begins in its lane's part of ``segments``, which has room
    for lane_segments, at its worker plus the number of its first row tile: the shares before it have at most so many
    segments, since each ends a share or a row tile.  OVERLAPPED: the decode kernel may be launched at once; it waits for the
    end of this one by itself.
    """
    batch = (
        seq_lens, seq_lens_stride, cu_seqlens_q, cu_seqlens_q_stride,
        num_seqs, num_tokens, even_q_len, num_heads, capacity,
    )  # fmt: skip
    if OVERLAPPED:
        gdc_launch_dependents()
    # neighbours among the programs run side by side: with the same share in each lane, they read the same keys at the same time
    lane = tl.program_id(0) % num_lanes
    worker = tl.program_id(0) // num_lanes
    lane_workers = tl.num_programs(0) // num_lanes
    first_worker_of_lane = lane * lane_workers
    # the sum first: nobody's share is known without it
    _, _, _, total = find_sequence(
        tl.zeros([], tl.int64), lane, num_lanes, batch, RAGGED, True, BLOCK_M, BLOCK_N
    )
    # a worker without a tile would make the count of pieces wrong
    num_workers = tl.maximum(tl.minimum(lane_workers.to(tl.int64), total), 1)
    tile = share_begin(worker, total, num_workers)
    end = tl.where(worker < num_workers, share_begin(worker + 1, total, num_workers), tile)
    sequence, sequence_begin, q_begin, _ = find_sequence(
        tile, lane, num_lanes, batch, RAGGED, True, BLOCK_M, BLOCK_N
    )
    kv_tiles = kv_tile_count(kv_length(sequence, batch), BLOCK_N)
    row_tile = lane + num_lanes * ((tile - sequence_begin) // kv_tiles).to(tl.int32)
    first = lane * lane_segments + worker + row_tile_number(sequence, q_begin, row_tile, batch, BLOCK_M)
    last = (lane + 1) * lane_segments
    place = first
    while tile < end:
        q_stop = query_end(sequence, q_begin, batch, RAGGED)
        q_len = q_stop - q_begin
        kv_tiles = kv_tile_count(kv_length(sequence, batch), BLOCK_N)
        row_tiles = lane_row_tiles(q_len, lane, num_lanes, batch, BLOCK_M)
        sequence_end = sequence_begin + row_tiles.to(tl.int64) * kv_tiles
        if tile < sequence_end:
            in_lane = (tile - sequence_begin) // kv_tiles
            row_tile = lane + num_lanes * in_lane.to(tl.int32)
            unit_begin = sequence_begin + in_lane * kv_tiles
            unit_end = unit_begin + kv_tiles
            segment_end = tl.minimum(unit_end, end)
            first_worker = worker_of(unit_begin, total, num_workers).to(tl.int32)
            pieces = worker_of(unit_end - 1, total, num_workers).to(tl.int32) - first_worker + 1
            # the piece that begins the row tile has the worker's second slot, a later piece its first
            begins = tile == unit_begin
            slot = 2 * (first_worker_of_lane + worker) + tl.where(begins, 1, 0)
            if begins:
                write_row_pieces(row_pieces, row_tile, slot, pieces, q_begin, q_len, batch, BLOCK_M)
            write_segment(
                segments + place.to(tl.int64) * SEGMENT_FIELDS,
                sequence, row_tile, tile - unit_begin, segment_end - unit_begin, slot, pieces, q_begin, q_len,
                place < last,
            )  # fmt: skip
            place += 1
            tile = segment_end
        if tile >= sequence_end:
            sequence_begin = sequence_end
            sequence += 1
            q_begin = q_stop
            if (tile < end) & (query_end(sequence, q_begin, batch, RAGGED) == q_begin):
                # a captured step may hold hundreds of sequences without queries: not one by one
                sequence, sequence_begin, q_begin, _ = find_sequence(
                    tile, lane, num_lanes, batch, RAGGED, True, BLOCK_M, BLOCK_N
                )
    share = shares + 2 * tl.program_id(0)
    tl.store(share, tl.minimum(first, last))
    tl.store(share + 1, tl.minimum(place, last))


@triton.jit(do_not_specialize=(*BATCH_ARGUMENTS, "num_splits", "tiles_per_split"))
def plan_split_kernel(
    segments,
    shares,
    row_pieces,
    num_splits,
    tiles_per_split,
    seq_lens,
    seq_lens_stride: tl.int64,
    cu_seqlens_q,
    cu_seqlens_q_stride: tl.int64,
    num_seqs,
    num_tokens,
    even_q_len,
    num_heads,
    capacity,
    RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Grid (most row tiles): notes down the num_splits segments of one row tile, one for each decode program.

    tiles_per_split 0: a sequence's tiles are cut into num_splits equal ranges.  Otherwise a split has that many tiles, counted
    from the sequence's start, whatever its length: the batch-invariant cut.
    """
    batch = (
        seq_lens, seq_lens_stride, cu_seqlens_q, cu_seqlens_q_stride,
        num_seqs, num_tokens, even_q_len, num_heads, capacity,
    )  # fmt: skip
    if OVERLAPPED:
        gdc_launch_dependents()
    unit = tl.program_id(0)
    sequence, units_before, q_begin, total = find_sequence(
        unit.to(tl.int64), 0, 1, batch, RAGGED, False, BLOCK_M, BLOCK_N
    )
    row_tile = unit - units_before.to(tl.int32)
    exists = unit < total
    q_len = query_end(sequence, q_begin, batch, RAGGED) - q_begin
    kv_tiles = tl.cdiv(kv_length(sequence, batch), BLOCK_N).to(tl.int64)
    if exists:
        write_row_pieces(row_pieces, row_tile, unit * num_splits, num_splits, q_begin, q_len, batch, BLOCK_M)
    for first in tl.range(0, num_splits, SCAN):
        split = first + tl.arange(0, SCAN)
        place = unit * num_splits + split
        if tiles_per_split > 0:
            begin = tl.minimum(split.to(tl.int64) * tiles_per_split, kv_tiles)
            end = tl.minimum(begin + tiles_per_split, kv_tiles)
        else:
            begin = split.to(tl.int64) * kv_tiles // num_splits
            end = (split + 1).to(tl.int64) * kv_tiles // num_splits
        write_segment(
            segments + place.to(tl.int64) * SEGMENT_FIELDS,
            sequence, row_tile, begin, end, place, num_splits, q_begin, q_len, (split < num_splits) & exists,
        )  # fmt: skip
        tl.store(shares + 2 * place, place, mask=split < num_splits)
        tl.store(shares + 2 * place + 1, place + exists.to(tl.int32), mask=split < num_splits)
