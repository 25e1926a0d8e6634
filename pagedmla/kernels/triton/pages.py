"""Reading KV tiles through the block table: the only device code that touches the cache for reading.

A KV tile is BLOCK_N consecutive tokens of one sequence; it has nothing to do with the page size.  All offsets are 64-bit from
the first multiplication.  Page ids are clamped to the pool, so a table full of garbage leads nowhere, and tokens past the
sequence's end are not loaded: their numbers are zeros, and the caller's mask drops their scores.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_pages(cache_row, first_token, last_token, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids i32 of a KV tile: one number when the tile lies in one page, else [BLOCK_N].

    ``cache_row`` is (kv_cache, its page stride, its token stride, num_pages, one row of the block table, its stride);
    ``first_token`` is a multiple of BLOCK_N; past ``last_token`` that one's page is given.
    """
    _, _, _, _, table_row, table_stride = cache_row
    if PAGE_SIZE % BLOCK_N == 0:
        column = tl.minimum(first_token, last_token) // PAGE_SIZE
    else:
        column = tl.minimum(first_token + tl.arange(0, BLOCK_N), last_token) // PAGE_SIZE
    # a sequence without tokens may have no row in the table either
    return tl.load(table_row + column.to(tl.int64) * table_stride, mask=last_token >= 0, other=0)


@triton.jit
def load_columns(
    cache_row,
    pages,
    first_token,
    last_token,
    first_column,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[BLOCK_N, BLOCK_COLUMNS] of the cache: the tile's tokens, ``first_column`` and following.

    Tokens past ``last_token`` and columns past NUM_COLUMNS are zeros.  PACKED: numbers of a token where tokens and pages lie
    behind one another, else 0; constant strides turn most of the address arithmetic into constants.
    """
    kv_cache, kv_page_stride, kv_token_stride, num_pages, _, _ = cache_row
    token_stride = kv_token_stride if PACKED == 0 else PACKED
    page_stride = kv_page_stride if PACKED == 0 else PACKED * PAGE_SIZE
    # as an unsigned number, a negative page id is past the pool as well
    page = tl.minimum(pages.to(tl.uint32), (num_pages - 1).to(tl.uint32)).to(tl.int64)
    in_tile = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_COLUMNS)
    if PAGE_SIZE % BLOCK_N == 0:
        # the tile's tokens lie behind one another: one address, and steps from it
        base = (
            kv_cache
            + page * page_stride
            + (first_token % PAGE_SIZE).to(tl.int64) * token_stride
            + first_column
        )
        step = in_tile * token_stride if PACKED > 0 else in_tile.to(tl.int64) * token_stride
        pointers = base + (step[:, None] + column[None, :])
    else:
        slot = (first_token + in_tile) % PAGE_SIZE
        offsets = page * page_stride + slot.to(tl.int64) * token_stride
        pointers = (kv_cache + first_column + column)[None, :] + offsets[:, None]
    mask = (in_tile <= last_token - first_token)[:, None]
    if NUM_COLUMNS < BLOCK_COLUMNS:
        mask = mask & (column < NUM_COLUMNS)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)
