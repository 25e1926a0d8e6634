"""Keys whose pages hold no whole tile: each token is copied from where it lies, by the threads of four warps.

Copies are of 16 bytes a thread (cp.async), so tokens lie at multiples of that.  They are ordinary writes to shared memory: who
multiplies with them must fence them from the matrix unit's reads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pagedmla.kernels.gluon.addresses import COLUMNS, rows_of, sources
from pagedmla.kernels.gluon.layouts import KEYS, LATENT
from pagedmla.kernels.gluon.many_heads.layouts import HALF, ROWS
from pagedmla.kernels.gluon.many_heads.loader import keys_of, load_query
from pagedmla.kernels.gluon.shares import following, key_tiles, row_tile_at, sequence_end


@gluon.jit
def gather_half(place, source, exists):
    """Starts to copy KEYS rows of HALF columns; what is no key stays what it was."""
    for chunk in gl.static_range(HALF // COLUMNS):
        part = place.slice(chunk * COLUMNS, COLUMNS, dim=1)
        async_copy.async_copy_global_to_shared(part, source + chunk * COLUMNS, mask=exists[:, None])


@gluon.jit
def gather_tile(shared, TILE_OF_PAIR: gl.constexpr, rows, exists, phase, pages):
    """Copies rows of the cache in two halves with a barrier each, as loader.py does."""
    source = sources(rows, pages)
    mbarrier.wait(shared.empty_left.index(TILE_OF_PAIR), phase)
    gather_half(shared.k_left.index(TILE_OF_PAIR), source, exists)
    async_copy.mbarrier_arrive(shared.full.index(TILE_OF_PAIR), increment_count=False)
    mbarrier.wait(shared.empty_right.index(TILE_OF_PAIR), phase)
    gather_half(shared.k_right.index(TILE_OF_PAIR), source + HALF, exists)
    async_copy.async_copy_global_to_shared(
        shared.k_rope.index(TILE_OF_PAIR), source + LATENT, mask=exists[:, None]
    )
    async_copy.mbarrier_arrive(shared.full.index(TILE_OF_PAIR + 2), increment_count=False)


@gluon.jit
def gather_share(
    shared, lane, share, extra, place, batch, pages, queries,
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
            # one thread arrives with the query: the others must not be a sequence behind
            gl.thread_barrier()
            load_query(shared, place.q_begin * NUM_HEADS + first_row, turn, queries)
            turn += 1
            segment_end = gl.minimum(end, share_end)
            kv_len = keys_of(first_row, place, NUM_HEADS)
            first, last = key_tiles(tile, segment_end, begin, kv_len, extra)
            # a share may end in the middle of a pair
            key_end = gl.minimum(kv_len, last * KEYS)
            table_row = pages.block_table + place.sequence.to(gl.int64) * pages.table_stride
            rows, exists = rows_of(first * KEYS, key_end, table_row, pages, PAGE_SIZE)
            for t in range(first, last, 2):
                for tile_of_pair in gl.static_range(2):
                    # the next tile's page ids are on their way while this one's place is waited for
                    next_rows, next_exists = rows_of(
                        (t + tile_of_pair + 1) * KEYS, key_end, table_row, pages, PAGE_SIZE
                    )
                    gather_tile(shared, tile_of_pair, rows, exists, (k & 1) ^ 1, pages)
                    rows = next_rows
                    exists = next_exists
                k += 1
            tile = segment_end
        if (tile >= end_of_sequence) & (tile < share_end):
            place = following(place, end_of_sequence, share_end, batch, RAGGED)
