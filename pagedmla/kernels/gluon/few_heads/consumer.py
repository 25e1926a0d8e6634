"""The warpgroup that computes: a program's share, segment by segment.  A segment is what a share has of one row tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pagedmla.kernels.gluon.few_heads.layouts import (
    KEYS,
    LATENT,
    OUT,
    QUERY_EMPTY,
    QUERY_FULL,
    row_layout,
    state_layout,
    transposed,
)
from pagedmla.kernels.gluon.few_heads.pieces import FEW, add_pieces, publish, unite
from pagedmla.kernels.gluon.few_heads.shares import (
    following,
    kv_tiles,
    row_tiles,
    unit_at,
)
from pagedmla.kernels.gluon.few_heads.tiles import attend_tile
from pagedmla.kernels.split_kv.merge import LN2


@gluon.jit
def attend_segment(
    shared, k, tile, share_end, unit, place, scale_log2,
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
    key_end = gl.minimum(share_end, unit.begin + (place.kv_len + KEYS - 1) // KEYS)
    for t in range(tile, key_end):
        o, m, l, c = attend_tile(
            shared, o, m, l, c, k, (t - unit.begin) * KEYS, place.kv_len, visible_len, seen_by_all,
            t == key_end - 1, scale_log2, CAUSAL, ROWS,
        )  # fmt: skip
        k += 1
    if tile >= key_end:
        # nobody needs the query of a sequence without keys
        mbarrier.arrive(shared.signals.index(QUERY_EMPTY), count=1)
    return o, m, gl.sum(l - c, axis=0), k


@gluon.jit
def normalise(o, m, l, ROWS: gl.constexpr):
    """(out, base-2 lse) of a state, in ``state_layout``; zeros and -inf without keys."""
    empty = l == 0.0
    divisor = gl.where(empty, 1.0, l)
    # whatever the accumulator holds there, a row without keys is zeros
    o = gl.where(empty[None, :], 0.0, o * (1.0 / divisor)[None, :])
    lse2 = gl.where(empty, float("-inf"), m + gl.log2(divisor))
    LAYOUT: gl.constexpr = state_layout(ROWS)
    return gl.convert_layout(o, LAYOUT), gl.convert_layout(lse2, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def store_rows(o, lse2, unit, place, outputs, NUM_HEADS: gl.constexpr, ROWS: gl.constexpr):
    """Writes the final rows of a row tile.

    Strides of ``out`` that are multiples of 16 are known as such when this is compiled; if they were not, every number would be
    a store of its own.
    """
    first = unit.row_tile * ROWS
    num_rows = place.q_len * NUM_HEADS
    narrow = gl.convert_layout(o.to(outputs.out.dtype.element_ty), OUT)
    row = first + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    column = gl.arange(0, LATENT, gl.SliceLayout(1, OUT))
    token = (place.q_begin + row // NUM_HEADS).to(gl.int64)
    head = (row % NUM_HEADS).to(gl.int64)
    final = outputs.out + token * outputs.out_token_stride + head * outputs.out_head_stride
    gl.store(final[None, :] + column[:, None], narrow, mask=(row < num_rows)[None, :])
    row = first + gl.arange(0, ROWS, gl.SliceLayout(0, state_layout(ROWS)))
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
    row_tile_before = 0
    pieces_after = 0
    q_begin_after = 0
    q_len_after = 0
    row_tile_after = 0
    while tile < share_end:
        sequence_end = place.before + row_tiles(place.q_len, NUM_HEADS, ROWS) * kv_tiles(place.kv_len)
        if tile < sequence_end:
            unit = unit_at(tile, place, worker, share, shares, ONE_ROW_TILE)
            mbarrier.wait(shared.signals.index(QUERY_FULL), turn & 1)
            o, m, l, k = attend_segment(
                shared, k, tile, share_end, unit, place, scale_log2,
                CAUSAL, NUM_HEADS, ROWS,
            )  # fmt: skip
            turn += 1
            if RAGGED:
                # query tokens before the first start are nobody's, though the first sequence's row tiles hold them
                row = unit.row_tile * ROWS + gl.arange(0, ROWS, row_layout(ROWS))
                l = gl.where(place.q_begin + row // NUM_HEADS < gl.load(batch.cu_seqlens_q), 0.0, l)
            o, lse2 = normalise(o, m, l, ROWS)
            begins = worker == unit.first
            if begins & (unit.pieces <= FEW):
                if unit.pieces > 1:
                    o, lse2 = add_pieces(o, lse2, worker, unit.pieces, partials, ROWS)
                store_rows(o, lse2, unit, place, outputs, NUM_HEADS, ROWS)
            else:
                publish(o, lse2, unit, worker, partials, ROWS)
                if unit.pieces > FEW:
                    if begins:
                        pieces_after = unit.pieces
                        q_begin_after = place.q_begin
                        q_len_after = place.q_len
                        row_tile_after = unit.row_tile
                    else:
                        pieces_before = unit.pieces
                        first_before = unit.first
                        q_begin_before = place.q_begin
                        q_len_before = place.q_len
                        row_tile_before = unit.row_tile
            tile = gl.minimum(unit.end, share_end)
        if tile >= sequence_end:
            place = following(place, sequence_end, share_end, batch, RAGGED)
    # one loop, so that the code of it is there once
    for which in range(2):
        is_before = which == 0
        pieces = gl.where(is_before, pieces_before, pieces_after)
        if pieces > 0:
            first = gl.where(is_before, first_before, worker)
            rows = (
                gl.where(is_before, q_begin_before, q_begin_after),
                gl.where(is_before, q_len_before, q_len_after),
                gl.where(is_before, row_tile_before, row_tile_after),
            )
            unite(first, pieces, worker - first, rows, outputs, partials, ROWS, NUM_HEADS)
