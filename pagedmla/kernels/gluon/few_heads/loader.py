"""The warps that load: they copy queries and keys into shared memory as soon as their place is free.

They do so row by row from where they lie, by copies of 16 bytes a thread (cp.async).  With few rows that is faster than the
copy engine; neither has a page to hold a whole tile, nor have query rows to lie at even distances.  Page ids are clamped to the
pool, and rows are those that exist, so nothing outside the tensors is read.  Loading runs on across the borders of sequences.

All of these are ordinary writes to shared memory: who multiplies with them must fence them from the matrix unit's reads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pagedmla.kernels.gluon.addresses import COLUMNS, query_sources, rows_of, sources
from pagedmla.kernels.gluon.few_heads.layouts import QUERY_EMPTY, QUERY_FULL, ROPE_STAGES, STAGES
from pagedmla.kernels.gluon.layouts import KEYS, LATENT
from pagedmla.kernels.gluon.shares import following, key_tiles, row_tile_at, sequence_end


@gluon.jit
def load_query(shared, first_row, place, turn, queries, ROWS: gl.constexpr, NUM_HEADS: gl.constexpr):
    """Copies ROWS query rows of a sequence from ``first_row`` on; what is no row stays what it was.

    No row looks at another.
    """
    latent, exists = query_sources(
        first_row,
        place,
        queries.latent,
        queries.latent_token_chunks,
        queries.latent_head_chunks,
        ROWS,
        NUM_HEADS,
    )
    rope, _ = query_sources(
        first_row, place, queries.rope, queries.rope_token_chunks, queries.rope_head_chunks, ROWS, NUM_HEADS
    )
    # a barrier that nobody has waited for yet: the phase before its first one counts as done
    mbarrier.wait(shared.signals.index(QUERY_EMPTY), (turn & 1) ^ 1)
    for chunk in gl.static_range(LATENT // COLUMNS):
        part = shared.query.slice(chunk * COLUMNS, COLUMNS, dim=1)
        async_copy.async_copy_global_to_shared(part, latent + chunk * COLUMNS, mask=exists[:, None])
    async_copy.async_copy_global_to_shared(shared.query_rope, rope, mask=exists[:, None])
    async_copy.mbarrier_arrive(shared.signals.index(QUERY_FULL), increment_count=False)


@gluon.jit
def load_tile(shared, rows, exists, k, pages):
    """Copies rows of the cache into the place of the program's ``k``-th tile; what is no key stays what it was."""
    stage = k % STAGES
    source = sources(rows, pages)
    if k >= ROPE_STAGES:
        # The place of the rotated part, on which weights lay, is free; that of the latent one has been for a tile longer, but
        # copies that begin as early as they could end later, as runs on an H200 showed.
        last = k - ROPE_STAGES
        mbarrier.wait(shared.empty.index(last % STAGES), (last // STAGES) & 1)
    for chunk in gl.static_range(LATENT // COLUMNS):
        place = shared.keys.index(stage).slice(chunk * COLUMNS, COLUMNS, dim=1)
        async_copy.async_copy_global_to_shared(place, source + chunk * COLUMNS, mask=exists[:, None])
    async_copy.async_copy_global_to_shared(
        shared.rope.index(k % ROPE_STAGES), source + LATENT, mask=exists[:, None]
    )
    async_copy.mbarrier_arrive(shared.full.index(stage), increment_count=False)


@gluon.jit
def load_share(
    shared, share, extra, place, batch, pages, queries,
    RAGGED: gl.constexpr, NUM_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr, ONE_ROW_TILE: gl.constexpr,
):  # fmt: skip
    """All that a share needs, in the order in which it is needed; ``place`` holds its first tile."""
    tile, share_end = share
    k = 0
    turn = 0
    while tile < share_end:
        end_of_sequence = sequence_end(place, extra, NUM_HEADS, ROWS)
        if tile < end_of_sequence:
            row_tile, begin, end = row_tile_at(tile, place, extra, ONE_ROW_TILE)
            load_query(shared, row_tile * ROWS, place, turn, queries, ROWS, NUM_HEADS)
            turn += 1
            segment_end = gl.minimum(end, share_end)
            first, last = key_tiles(tile, segment_end, begin, place.kv_len, extra)
            table_row = pages.block_table + place.sequence.to(gl.int64) * pages.table_stride
            rows, exists = rows_of(first * KEYS, place.kv_len, table_row, pages, PAGE_SIZE)
            for t in range(first, last):
                # the next tile's page ids are on their way while this one's place is waited for
                next_rows, next_exists = rows_of((t + 1) * KEYS, place.kv_len, table_row, pages, PAGE_SIZE)
                load_tile(shared, rows, exists, k, pages)
                rows = next_rows
                exists = next_exists
                k += 1
            tile = segment_end
        if (tile >= end_of_sequence) & (tile < share_end):
            place = following(place, end_of_sequence, share_end, batch, RAGGED)
