"""The warp that loads: it issues the copies of queries and keys into shared memory as soon as their place is free.

All addresses come from descriptors of the given tensors, so nothing outside them is read: page ids are clamped to the pool, and
rows past the last query are zeros.  Loading runs on across the borders of sequences.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from pagedmla.kernels.gluon.layouts import KEYS, LATENT, NUMBER_BYTES, ROPE
from pagedmla.kernels.gluon.many_heads.layouts import HALF, QUERY_EMPTY, QUERY_FULL, ROWS
from pagedmla.kernels.gluon.shares import following, key_tiles, row_tile_at, sequence_end


@gluon.jit
def load_query(shared, q_row, turn, queries):
    """The ROWS query rows from ``q_row`` on, which may run into the next sequence's: no row looks at another."""
    full = shared.signals.index(QUERY_FULL)
    # a barrier that nobody has waited for yet: the phase before its first one counts as done
    mbarrier.wait(shared.signals.index(QUERY_EMPTY), (turn & 1) ^ 1)
    mbarrier.expect(full, ROWS * (LATENT + ROPE) * NUMBER_BYTES)
    tma.async_copy_global_to_shared(queries.latent, [q_row, 0], full, shared.q_left.index(0))
    tma.async_copy_global_to_shared(queries.latent, [q_row, HALF], full, shared.q_right.index(0))
    tma.async_copy_global_to_shared(queries.rope, [q_row, queries.rope_column], full, shared.q_rope.index(0))


@gluon.jit
def announce(full, NUM_BYTES: gl.constexpr, exists):
    """Completes the barrier when so many bytes have come, or at once if nothing is to come."""
    mbarrier.expect(full, NUM_BYTES, pred=exists)
    mbarrier.arrive(full, count=1, pred=exists == 0)


@gluon.jit
def load_tile(shared, TILE_OF_PAIR: gl.constexpr, row, exists, phase, tiles):
    """The KEYS rows of the cache from ``row`` on, in two halves with a barrier each: scores begin with the left one.

    The left half's place is waited for first.  That also keeps the second tile's rotated part, on which p1 lies, from being
    copied over while the left warpgroup multiplies p1.  A tile that does not exist is announced like others, as it lies.
    """
    full_left, full_right = shared.full.index(TILE_OF_PAIR), shared.full.index(TILE_OF_PAIR + 2)
    mbarrier.wait(shared.empty_left.index(TILE_OF_PAIR), phase)
    announce(full_left, KEYS * HALF * NUMBER_BYTES, exists)
    tma.async_copy_global_to_shared(
        tiles.latent, [row, 0], full_left, shared.k_left.index(TILE_OF_PAIR), pred=exists
    )
    mbarrier.wait(shared.empty_right.index(TILE_OF_PAIR), phase)
    announce(full_right, KEYS * (HALF + ROPE) * NUMBER_BYTES, exists)
    tma.async_copy_global_to_shared(
        tiles.latent, [row, HALF], full_right, shared.k_right.index(TILE_OF_PAIR), pred=exists
    )
    tma.async_copy_global_to_shared(
        tiles.rope, [row, LATENT], full_right, shared.k_rope.index(TILE_OF_PAIR), pred=exists
    )


@gluon.jit
def keys_of(first_row, place, NUM_HEADS: gl.constexpr):
    """Keys for the row tile that begins with ``first_row`` of a sequence's: none, if that is past its last."""
    return gl.where(first_row < place.q_len * NUM_HEADS, place.kv_len, 0)


@gluon.jit
def page_of(tile, table_row, pages, PAGE_SIZE: gl.constexpr):
    """The page id of a sequence's KV tile as the table has it."""
    return gl.load(table_row + (tile * KEYS // PAGE_SIZE).to(gl.int64) * pages.table_column_stride)


@gluon.jit
def load_share(
    shared, lane, share, extra, place, batch, tiles, pages, queries,
    RAGGED: gl.constexpr, NUM_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    LANES: gl.constexpr, ONE_ROW_TILE: gl.constexpr,
):  # fmt: skip
    """All that a share needs, in the order in which it is needed; ``place`` holds its first tile."""
    GROUP: gl.constexpr = ROWS * LANES
    tile, share_end = share
    k = 0
    turn = 0
    while tile < share_end:
        end_of_sequence = sequence_end(place, extra, NUM_HEADS, GROUP)
        if tile < end_of_sequence:
            group, begin, end = row_tile_at(tile, place, extra, ONE_ROW_TILE)
            first_row = group * GROUP + lane * ROWS
            load_query(shared, place.q_begin * NUM_HEADS + first_row, turn, queries)
            turn += 1
            segment_end = gl.minimum(end, share_end)
            kv_len = keys_of(first_row, place, NUM_HEADS)
            first, last = key_tiles(tile, segment_end, begin, kv_len, extra)
            table_row = pages.block_table + place.sequence.to(gl.int64) * pages.table_stride
            for t in range(first, last, 2):
                for tile_of_pair in gl.static_range(2):
                    exists = t + tile_of_pair < last
                    at = gl.minimum(t + tile_of_pair, last - 1)
                    page = page_of(at, table_row, pages, PAGE_SIZE)
                    row = gl.minimum(gl.maximum(page, 0), pages.num_pages - 1) * pages.rows_per_page
                    row += at * KEYS % PAGE_SIZE
                    load_tile(shared, tile_of_pair, row, exists, (k & 1) ^ 1, tiles)
                k += 1
            tile = segment_end
        if (tile >= end_of_sequence) & (tile < share_end):
            place = following(place, end_of_sequence, share_end, batch, RAGGED)
