"""The warpgroup that computes: a program's share, segment by segment.  A segment is what a share has of one row tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pagedmla.kernels.gluon.barriers import arrive
from pagedmla.kernels.gluon.few_heads.layouts import (
    OUT,
    QUERY_EMPTY,
    QUERY_FULL,
    STAGES,
    row_layout,
    transposed,
)
from pagedmla.kernels.gluon.few_heads.tiles import attend_tile
from pagedmla.kernels.gluon.layouts import KEYS, LATENT
from pagedmla.kernels.gluon.pieces import add_pieces, publish, unite
from pagedmla.kernels.gluon.shares import following, key_tiles, sequence_end, unit_at
from pagedmla.kernels.split_kv.merge import LN2

# pieces of a row tile that its first program adds in its own registers
FEW = gl.constexpr(4)


@gluon.jit
def attend_segment(
    shared, k, tile, share_end, unit, extra, place, scale_log2,
    CAUSAL: gl.constexpr, NUM_HEADS: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Tiles of a row tile from ``tile`` on: (o f32 [LATENT, ROWS], m, l f32 [ROWS], tiles of the program so far)."""
    LAYOUT: gl.constexpr = transposed(ROWS)
    first_row = unit.row_tile * ROWS
    seen_by_all = place.kv_len
    visible_len = place.kv_len + gl.zeros([ROWS], gl.int32, row_layout(ROWS))
    if CAUSAL:
        # bottom-right aligned: query j of n sees keys 0 .. kv_len - n + j
        hidden = place.q_len - 1 - (first_row + gl.arange(0, ROWS, row_layout(ROWS))) // NUM_HEADS
        visible_len -= gl.maximum(hidden, 0)
        # the earliest query of the tile sees the least
        seen_by_all -= place.q_len - 1 - first_row // NUM_HEADS
    o = gl.zeros([LATENT, ROWS], gl.float32, LAYOUT)
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout(ROWS))
    l = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
    c = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
    first, last = key_tiles(tile, gl.minimum(share_end, unit.end), unit.begin, place.kv_len, extra)
    for t in range(first, last):
        o, m, l, c = attend_tile(
            shared, o, m, l, c, k, t * KEYS, place.kv_len, visible_len, seen_by_all,
            t == last - 1, scale_log2, CAUSAL, ROWS,
        )  # fmt: skip
        k += 1
    if first >= last:
        # nobody needs the query of a sequence without keys, once all threads have seen that it was there
        arrive(shared.signals.index(QUERY_EMPTY))
    return o, m, gl.sum(l - c, axis=0), k


@gluon.jit
def normalise(o, m, l):
    """(out, base-2 lse) of a state; zeros and -inf without keys."""
    empty = l == 0.0
    divisor = gl.where(empty, 1.0, l)
    # whatever the accumulator holds there, a row without keys is zeros
    o = gl.where(empty[None, :], 0.0, o * (1.0 / divisor)[None, :])
    return o, gl.where(empty, float("-inf"), m + gl.log2(divisor))


@gluon.jit
def release(shared, k, has_keys):
    """Says that nobody needs the place of a segment's last tile, the program's ``k``-th; it may have been written on."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(shared.empty.index(k % STAGES), count=1, pred=has_keys)


@gluon.jit
def store_rows(
    shared, o, lse2, k, has_keys, unit, place, outputs, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr
):
    """Writes the final rows of a row tile, sorted in the place of the segment's last tile, the program's ``k``-th.

    Strides of ``out`` that are multiples of 16 are known as such when this is compiled; if they were not, every number would be
    a store of its own.
    """
    first = unit.row_tile * ROWS
    num_rows = place.q_len * NUM_HEADS
    narrow = gl.zeros([ROWS, LATENT], outputs.out.dtype.element_ty, OUT)
    if has_keys:
        sorted_rows = shared.keys.index(k % STAGES).slice(0, ROWS, dim=0)
        sorted_rows.permute((1, 0)).store(o.to(outputs.out.dtype.element_ty))
        gl.thread_barrier()
        narrow = sorted_rows.load(OUT)
    release(shared, k, has_keys)
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    column = gl.arange(0, LATENT, gl.SliceLayout(0, OUT))
    token = (place.q_begin + row // NUM_HEADS).to(gl.int64)
    head = (row % NUM_HEADS).to(gl.int64)
    final = outputs.out + token * outputs.out_token_stride + head * outputs.out_head_stride
    gl.store(final[:, None] + column[None, :], narrow, mask=(row < num_rows)[:, None])
    row = first + gl.arange(0, ROWS, row_layout(ROWS))
    token = (place.q_begin + row // NUM_HEADS).to(gl.int64)
    head = (row % NUM_HEADS).to(gl.int64)
    lse = outputs.lse + token * outputs.lse_token_stride + head * outputs.lse_head_stride
    gl.store(lse, lse2 * LN2, mask=row < num_rows)


@gluon.jit
def attend_share(
    shared, worker, share, place, shares, batch, outputs, partials, scale_log2,
    RAGGED: gl.constexpr, CAUSAL: gl.constexpr, NUM_HEADS: gl.constexpr,
    ROWS: gl.constexpr, ONE_ROW_TILE: gl.constexpr,
):  # fmt: skip
    """A share, then this program's part of the row tiles of which it has one piece of many.

    ``place`` holds the share's first tile.
    """
    tile, share_end = share
    k = 0
    turn = 0
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
        end_of_sequence = sequence_end(place, shares.extra, NUM_HEADS, ROWS)
        if tile < end_of_sequence:
            unit = unit_at(tile, place, worker, share, shares, ONE_ROW_TILE)
            mbarrier.wait(shared.signals.index(QUERY_FULL), turn & 1)
            o, m, l, k = attend_segment(
                shared, k, tile, share_end, unit, shares.extra, place, scale_log2,
                CAUSAL, NUM_HEADS, ROWS,
            )  # fmt: skip
            turn += 1
            # a segment without keys has taken no tile
            has_keys = place.kv_len > 0
            k_last = gl.maximum(k - 1, 0)
            if RAGGED:
                # query tokens before the first start are nobody's, though the first sequence's row tiles hold them
                row = unit.row_tile * ROWS + gl.arange(0, ROWS, row_layout(ROWS))
                l = gl.where(place.q_begin + row // NUM_HEADS < gl.load(batch.cu_seqlens_q), 0.0, l)
            o, lse2 = normalise(o, m, l)
            begins = worker == unit.first
            if begins & (unit.pieces <= FEW):
                if unit.pieces > 1:
                    rows_first, lse2 = add_pieces(o.permute((1, 0)), lse2, worker, unit.pieces, partials)
                    o = gl.convert_layout(rows_first.permute((1, 0)), transposed(ROWS))
                    lse2 = gl.convert_layout(lse2, row_layout(ROWS))
                store_rows(shared, o, lse2, k_last, has_keys, unit, place, outputs, NUM_HEADS, ROWS)
            else:
                release(shared, k_last, has_keys)
                publish(o.permute((1, 0)), lse2, unit, worker, partials, FEW)
                if unit.pieces > FEW:
                    if begins:
                        pieces_after = unit.pieces
                        q_begin_after = place.q_begin
                        q_len_after = place.q_len
                        row_after = unit.row_tile * ROWS
                    else:
                        pieces_before = unit.pieces
                        first_before = unit.first
                        q_begin_before = place.q_begin
                        q_len_before = place.q_len
                        row_before = unit.row_tile * ROWS
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
            unite(first, pieces, worker - first, rows, outputs, partials, ROWS, LATENT, NUM_HEADS, True)
