"""The two warpgroups that compute: each goes through a program's share, segment by segment, for its half of the values.

A segment is what a share has of one row tile.  The halves share out nothing further: each publishes and unites its own numbers
(pieces.py), with what both have: the maximum, and the sum of both sums of weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from pagedmla.kernels.gluon.barriers import arrive
from pagedmla.kernels.gluon.layouts import KEYS
from pagedmla.kernels.gluon.many_heads.layouts import (
    ACCUMULATOR,
    HALF,
    LEFT,
    OUT,
    OUT_ROW,
    PAIR,
    QUERY_EMPTY,
    QUERY_FULL,
    ROW,
    ROWS,
    SUM_LEFT,
    SUM_RIGHT,
    SUMMED_LEFT,
    SUMMED_RIGHT,
)
from pagedmla.kernels.gluon.many_heads.loader import keys_of
from pagedmla.kernels.gluon.many_heads.pair import left_pair, right_pair
from pagedmla.kernels.gluon.opaque import zero_here
from pagedmla.kernels.gluon.pieces import publish, unite
from pagedmla.kernels.gluon.shares import following, key_tiles, sequence_end, unit_at
from pagedmla.kernels.split_kv.merge import LN2

# pieces of a row tile that its first program would add in its own registers: they hold no second state
FEW = gl.constexpr(1)


@gluon.jit
def sum_of_both(shared, l, turn, SIDE: gl.constexpr):
    """The sum of both warpgroups' sums of weights f32 [ROWS], of the program's ``turn``-th segment that has keys.

    They put them there in the last pair, and nobody ends another one before the other has read what lies here.
    """
    if SIDE == LEFT:
        mbarrier.wait(shared.signals.index(SUMMED_RIGHT), turn & 1)
        return l + shared.vectors.index(SUM_RIGHT).load(ROW)
    else:
        mbarrier.wait(shared.signals.index(SUMMED_LEFT), turn & 1)
        return l + shared.vectors.index(SUM_LEFT).load(ROW)


@gluon.jit
def attend_segment(
    shared, k, key_turn, tile, share_end, unit, extra, kv_len, place, first_row, scale_log2,
    CAUSAL: gl.constexpr, NUM_HEADS: gl.constexpr, SIDE: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Tiles of a row tile from ``tile`` on: (o f32 [ROWS, HALF], m, l f32 [ROWS], pairs of the program so far)."""
    visible_len = gl.zeros([ROWS], gl.int32, ROW)
    # tokens
    first_tile, last_tile = key_tiles(tile, gl.minimum(share_end, unit.end), unit.begin, kv_len, extra)
    begin, end = first_tile * KEYS, gl.minimum(last_tile * KEYS, kv_len)
    seen_by_all = end
    if CAUSAL:
        # bottom-right aligned: query j of n sees keys 0 .. kv_len - n + j
        hidden = place.q_len - 1 - (first_row + gl.arange(0, ROWS, ROW)) // NUM_HEADS
        visible_len += place.kv_len - gl.maximum(hidden, 0)
        # the earliest query of the tile sees the least
        seen_by_all = gl.minimum(end, place.kv_len - (place.q_len - 1 - first_row // NUM_HEADS))
    o = gl.zeros([ROWS, HALF], gl.float32, ACCUMULATOR)
    m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    l = gl.zeros([ROWS], gl.float32, ROW)
    c = gl.zeros([ROWS], gl.float32, ROW)
    for first in range(begin, end, PAIR):
        is_last = first + PAIR >= end
        is_edge = first + PAIR > seen_by_all
        if SIDE == LEFT:
            o, m, l, c = left_pair(
                shared, o, m, l, c, k, first, end, visible_len, is_last, is_edge, scale_log2, CAUSAL, GATHER
            )
        else:
            o, m, l, c = right_pair(
                shared, o, m, l, c, k, first, end, visible_len, is_last, is_edge, scale_log2, CAUSAL, GATHER
            )
        k += 1
    l = l - c
    if begin < end:
        l = sum_of_both(shared, l, key_turn, SIDE)
    else:
        # nobody needs the query of a sequence without keys
        arrive(shared.signals.index(QUERY_EMPTY))
    return o, m, l, k


@gluon.jit
def normalise(o, m, l, RAGGED: gl.constexpr):
    """(out, base-2 lse) of a state; zeros and -inf without keys."""
    l = gl.convert_layout(l, OUT_ROW)
    m = gl.convert_layout(m, OUT_ROW)
    empty = l == 0.0
    divisor = gl.where(empty, 1.0, l)
    o = o * (1.0 / divisor)[:, None]
    if RAGGED:
        # a row that sees no key has zeros, but nobody's rows have seen the first sequence's keys
        o = gl.where(empty[:, None], 0.0, o)
    return o, gl.where(empty, float("-inf"), m + gl.log2(divisor))


@gluon.jit
def last_tile(shared, SIDE: gl.constexpr):
    """This half of the last pair's second tile, which nobody but this warpgroup reads any more."""
    if SIDE == LEFT:
        return shared.k_left.index(1 + zero_here())
    else:
        return shared.k_right.index(1 + zero_here())


@gluon.jit
def release(shared, has_keys, SIDE: gl.constexpr):
    """Says that nobody needs the half of a segment's last tile any more; it may have been written on."""
    fence_async_shared()
    gl.thread_barrier()
    if SIDE == LEFT:
        mbarrier.arrive(shared.empty_left.index(1), count=1, pred=has_keys)
    else:
        mbarrier.arrive(shared.empty_right.index(1), count=1, pred=has_keys)


@gluon.jit
def store_rows(
    shared, o, lse2, has_keys, first_row, place, outputs, NUM_HEADS: gl.constexpr, SIDE: gl.constexpr
):
    """Writes the final rows of a row tile, sorted in the place of the segment's last tile; left writes the logarithms, too.

    Strides of ``out`` that are multiples of 16 are known as such when this is compiled; if they were not, every number would be
    a store of its own.
    """
    num_rows = place.q_len * NUM_HEADS
    narrow = gl.zeros([ROWS, HALF], outputs.out.dtype.element_ty, OUT)
    if has_keys:
        sorted_rows = last_tile(shared, SIDE)
        sorted_rows.store(o.to(outputs.out.dtype.element_ty))
        gl.thread_barrier()
        narrow = sorted_rows.load(OUT)
    release(shared, has_keys, SIDE)
    row = first_row + zero_here() + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    column = gl.arange(0, HALF, gl.SliceLayout(0, OUT))
    token = (place.q_begin + row // NUM_HEADS).to(gl.int64)
    head = (row % NUM_HEADS).to(gl.int64)
    final = outputs.out + token * outputs.out_token_stride + head * outputs.out_head_stride
    gl.store(final[:, None] + column[None, :], narrow, mask=(row < num_rows)[:, None])
    if SIDE == LEFT:
        row = first_row + gl.arange(0, ROWS, OUT_ROW)
        token = (place.q_begin + row // NUM_HEADS).to(gl.int64)
        head = (row % NUM_HEADS).to(gl.int64)
        lse = outputs.lse + token * outputs.lse_token_stride + head * outputs.lse_head_stride
        gl.store(lse, lse2 * LN2, mask=row < num_rows)


@gluon.jit
def attend_share(
    shared, worker, lane, share, place, shares, batch, outputs, partials, scale_log2,
    RAGGED: gl.constexpr, CAUSAL: gl.constexpr, NUM_HEADS: gl.constexpr,
    LANES: gl.constexpr, ONE_ROW_TILE: gl.constexpr, SIDE: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """A share, then this program's part of the row tiles of which it has one piece of many.

    ``place`` holds the share's first tile.  ``outputs`` and ``partials`` are this half's.
    """
    GROUP: gl.constexpr = ROWS * LANES
    tile, share_end = share
    k = 0
    turn = 0
    key_turn = 0
    # row tiles that are left to be united: the one that the share begins in, and the one that it ends in
    pieces_before = 0
    first_before = 0
    q_begin_before = 0
    q_len_before = 0
    row_before = 0
    pieces_after = 0
    q_begin_after = 0
    q_len_after = 0
    row_after = 0
    while tile < share_end:
        end_of_sequence = sequence_end(place, shares.extra, NUM_HEADS, GROUP)
        if tile < end_of_sequence:
            unit = unit_at(tile, place, worker, share, shares, ONE_ROW_TILE)
            first_row = unit.row_tile * GROUP + lane * ROWS
            kv_len = keys_of(first_row, place, NUM_HEADS)
            mbarrier.wait(shared.signals.index(QUERY_FULL), turn & 1)
            o, m, l, k = attend_segment(
                shared, k, key_turn, tile, share_end, unit, shares.extra, kv_len, place, first_row, scale_log2,
                CAUSAL, NUM_HEADS, SIDE, GATHER,
            )  # fmt: skip
            turn += 1
            # a segment without keys has taken no tile
            has_keys = kv_len > 0
            key_turn += has_keys.to(gl.int32)
            if RAGGED:
                # query tokens before the first start are nobody's, though the first sequence's row tiles hold them
                row = first_row + gl.arange(0, ROWS, ROW)
                l = gl.where(place.q_begin + row // NUM_HEADS < gl.load(batch.cu_seqlens_q), 0.0, l)
            o, lse2 = normalise(o, m, l, RAGGED)
            if unit.pieces <= FEW:
                store_rows(shared, o, lse2, has_keys, first_row, place, outputs, NUM_HEADS, SIDE)
            else:
                release(shared, has_keys, SIDE)
                publish(o, lse2, unit, worker, partials, FEW)
                if worker == unit.first:
                    pieces_after = unit.pieces
                    q_begin_after = place.q_begin
                    q_len_after = place.q_len
                    row_after = first_row
                else:
                    pieces_before = unit.pieces
                    first_before = unit.first
                    q_begin_before = place.q_begin
                    q_len_before = place.q_len
                    row_before = first_row
            tile = gl.minimum(unit.end, share_end)
        if (tile >= end_of_sequence) & (tile < share_end):
            place = following(place, end_of_sequence, share_end, batch, RAGGED)
    # one loop, so that the code of it is there once
    for which in range(2):
        is_before = which == 0
        pieces = gl.where(is_before, pieces_before, pieces_after)
        if pieces > 0:
            first = gl.where(is_before, first_before, worker)
            rows = (
                gl.where(is_before, q_begin_before, q_begin_after),
                gl.where(is_before, q_len_before, q_len_after),
                gl.where(is_before, row_before, row_after),
            )
            unite(
                first, pieces, worker - first, rows, outputs, partials,
                ROWS, HALF, NUM_HEADS, SIDE == LEFT,
            )  # fmt: skip
