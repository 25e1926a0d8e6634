"""The warp that loads: it issues the copies of queries and keys into shared memory as soon as their place is free.

All addresses come from descriptors of the given tensors, so nothing outside them is read: page ids are clamped to the pool, and
rows past the last query are zeros.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from pagedmla.kernels.gluon.layouts import HALF, KEYS, NUMBER_BYTES, PAIR, Q_EMPTY, Q_FULL, ROPE, ROWS
from pagedmla.kernels.gluon.segments import (
    FIELDS,
    Q_BEGIN,
    Q_LEN,
    ROW_TILE,
    SEQUENCE,
    kv_length,
    pair_range,
)


@gluon.jit
def load_query(shared, q_row, turn, queries):
    """The ROWS query rows from ``q_row`` on, which may run into the next sequence's: no row looks at another."""
    full = shared.signals.index(Q_FULL)
    # a barrier that nobody has waited for yet: the phase before its first one counts as done
    mbarrier.wait(shared.signals.index(Q_EMPTY), turn ^ 1)
    mbarrier.expect(full, ROWS * (2 * HALF + ROPE) * NUMBER_BYTES)
    tma.async_copy_global_to_shared(queries.latent, [q_row, 0], full, shared.q_left)
    tma.async_copy_global_to_shared(queries.latent, [q_row, HALF], full, shared.q_right)
    tma.async_copy_global_to_shared(queries.rope, [q_row, queries.rope_column], full, shared.q_rope)


@gluon.jit
def load_block(shared, BLOCK: gl.constexpr, row, phase, cache):
    """The KEYS rows of the cache from ``row`` on, in two halves with a barrier each: scores begin with the left one.

    The left half's place is waited for first.  That also keeps the second block's rotated part, on which p1 lies, from being
    copied over while the left warpgroup multiplies p1.
    """
    full_left, full_right = shared.full.index(BLOCK), shared.full.index(BLOCK + 2)
    mbarrier.wait(shared.empty_left.index(BLOCK), phase)
    mbarrier.expect(full_left, KEYS * HALF * NUMBER_BYTES)
    tma.async_copy_global_to_shared(cache.latent, [row, 0], full_left, shared.k_left.index(BLOCK))
    mbarrier.wait(shared.empty_right.index(BLOCK), phase)
    mbarrier.expect(full_right, KEYS * (HALF + ROPE) * NUMBER_BYTES)
    tma.async_copy_global_to_shared(cache.rope, [row, 2 * HALF], full_right, shared.k_rope.index(BLOCK))
    tma.async_copy_global_to_shared(cache.latent, [row, HALF], full_right, shared.k_right.index(BLOCK))


@gluon.jit
def load_tiles(
    shared, share, segments, batch, cache, queries,
    CAUSAL: gl.constexpr, NUM_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """All that segments share[0] .. share[1] - 1 need, in the order in which it is needed."""
    k = 0
    for index in range(share[0], share[1]):
        segment = segments + index * FIELDS
        sequence = gl.load(segment + SEQUENCE)
        kv_len = kv_length(sequence, batch)
        begin, _, end = pair_range(segment, kv_len, gl.load(segment + Q_LEN), CAUSAL, NUM_HEADS)
        q_row = gl.load(segment + Q_BEGIN) * NUM_HEADS + gl.load(segment + ROW_TILE) * ROWS
        load_query(shared, q_row, (index - share[0]) & 1, queries)
        # the padding is one row past the table: its length is 0, so the row is never read
        table_row = cache.block_table + sequence.to(gl.int64) * cache.table_stride
        for pair in range(begin, end):
            for block in gl.static_range(2):
                first = pair * PAIR + block * KEYS
                # a pair's second block may lie past the end: its first one stands in, and is hidden
                first = gl.where(first < kv_len, first, pair * PAIR)
                page = gl.load(table_row + (first // PAGE_SIZE).to(gl.int64) * cache.table_column_stride)
                page = gl.minimum(gl.maximum(page, 0), cache.num_pages - 1)
                row = page * cache.rows_per_page + first % PAGE_SIZE
                load_block(shared, block, row, (k & 1) ^ 1, cache)
            k += 1
