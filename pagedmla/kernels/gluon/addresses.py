"""Where rows lie for the four warps that copy them one by one, 16 bytes a thread."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagedmla.kernels.gluon.layouts import CHUNK, KEYS

# columns that are copied at a time, and who copies which
COLUMNS = gl.constexpr(64)
GATHER_WARPS = gl.constexpr(4)
_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def rows_of(first, kv_len, table_row, pages, PAGE_SIZE: gl.constexpr):
    """(rows of the cache, whether there is such a key) [KEYS] of keys ``first`` and following.

    Page ids are clamped to the pool.
    """
    token = first + gl.arange(0, KEYS, gl.SliceLayout(1, _LAYOUT))
    exists = token < kv_len
    page = gl.load(
        table_row + (token // PAGE_SIZE).to(gl.int64) * pages.table_column_stride, mask=exists, other=0
    )
    page = gl.minimum(gl.maximum(page, 0), pages.num_pages - 1)
    return page * pages.rows_per_page + token % PAGE_SIZE, exists


@gluon.jit
def sources(rows, pages):
    """Pointers [KEYS, COLUMNS] to the first columns of rows of the cache."""
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, _LAYOUT))
    # the compiler sees that it is a multiple of what a thread copies at once
    return pages.kv_cache + (rows.to(gl.int64) * pages.token_chunks * CHUNK)[:, None] + column[None, :]


@gluon.jit
def query_sources(
    first_row, place, pointer, token_chunks, head_chunks, ROWS: gl.constexpr, NUM_HEADS: gl.constexpr
):
    """(pointers [ROWS, COLUMNS] to the first columns, whether there is such a row [ROWS]) of a sequence's query rows."""
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, _LAYOUT))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, _LAYOUT))
    token = (place.q_begin + row // NUM_HEADS).to(gl.int64)
    head = (row % NUM_HEADS).to(gl.int64)
    chunks = token * token_chunks + head * head_chunks
    return pointer + (chunks * CHUNK)[:, None] + column[None, :], row < place.q_len * NUM_HEADS
