"""The warp that loads: it issues the copies of queries and keys into shared memory as soon as their place is free.

All addresses come from descriptors of the given tensors, so nothing outside them is read: page ids are clamped to the pool, and
rows past the last query are zeros.  Loading runs on across the borders of sequences.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from pagedmla.kernels.gluon.few_heads.layouts import (
    KEYS,
    LATENT,
    NUMBER_BYTES,
    QUERY_EMPTY,
    QUERY_FULL,
    ROPE,
    STAGES,
)
from pagedmla.kernels.gluon.few_heads.shares import (
    following,
    kv_tiles,
    row_tile_at,
    row_tiles,
)


@gluon.jit
def load_query(shared, q_row, turn, queries, ROWS: gl.constexpr):
    """The ROWS query rows from ``q_row`` on, which may run into the next sequence's: no row looks at another."""
    full = shared.signals.index(QUERY_FULL)
    # a barrier that nobody has waited for yet: the phase before its first one counts as done
    mbarrier.wait(shared.signals.index(QUERY_EMPTY), (turn & 1) ^ 1)
    mbarrier.expect(full, ROWS * (LATENT + ROPE) * NUMBER_BYTES)
    tma.async_copy_global_to_shared(queries.latent, [q_row, 0], full, shared.query)
    tma.async_copy_global_to_shared(queries.rope, [q_row, queries.rope_column], full, shared.query_rope)


@gluon.jit
def load_tile(shared, row, k, cache):
    """The KEYS rows of the cache from ``row`` on, into the place of the program's ``k``-th tile."""
    stage = k % STAGES
    full = shared.full.index(stage)
    mbarrier.wait(shared.empty.index(stage), ((k // STAGES) & 1) ^ 1)
    mbarrier.expect(full, KEYS * (LATENT + ROPE) * NUMBER_BYTES)
    tma.async_copy_global_to_shared(cache.latent, [row, 0], full, shared.keys.index(stage))
    tma.async_copy_global_to_shared(cache.rope, [row, LATENT], full, shared.rope.index(stage))


@gluon.jit
def page_of(tile, table_row, cache, PAGE_SIZE: gl.constexpr):
    """The page id of a sequence's KV tile as the table has it."""
    return gl.load(table_row + (tile * KEYS // PAGE_SIZE).to(gl.int64) * cache.table_column_stride)


@gluon.jit
def load_share(
    shared, share, place, batch, cache, queries,
    RAGGED: gl.constexpr, NUM_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr, ONE_ROW_TILE: gl.constexpr,
):  # fmt: skip
    """All that a share needs, in the order in which it is needed; ``place`` holds its first tile."""
    tile, share_end = share
    k = 0
    turn = 0
    while tile < share_end:
        sequence_end = place.before + row_tiles(place.q_len, NUM_HEADS, ROWS) * kv_tiles(place.kv_len)
        if tile < sequence_end:
            row_tile, begin, end = row_tile_at(tile, place, ONE_ROW_TILE)
            load_query(shared, place.q_begin * NUM_HEADS + row_tile * ROWS, turn, queries, ROWS)
            turn += 1
            segment_end = gl.minimum(end, share_end)
            # a sequence without keys has one tile, of which nothing is read
            key_end = gl.minimum(segment_end, begin + (place.kv_len + KEYS - 1) // KEYS)
            table_row = cache.block_table + place.sequence.to(gl.int64) * cache.table_stride
            page = 0
            if tile < key_end:
                page = page_of(tile - begin, table_row, cache, PAGE_SIZE)
            for t in range(tile, key_end):
                row = gl.minimum(gl.maximum(page, 0), cache.num_pages - 1) * cache.rows_per_page
                row += (t - begin) * KEYS % PAGE_SIZE
                # the next page id is on its way while this tile's place is waited for
                page = page_of(gl.minimum(t + 1, key_end - 1) - begin, table_row, cache, PAGE_SIZE)
                load_tile(shared, row, k, cache)
                k += 1
            tile = segment_end
        if tile >= sequence_end:
            place = following(place, sequence_end, share_end, batch, RAGGED)
