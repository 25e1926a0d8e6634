"""The decode kernel for few rows a sequence: one warpgroup that computes, four warps that load, and no other launch."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pagedmla.kernels.gluon.addresses import GATHER_WARPS
from pagedmla.kernels.gluon.barriers import open_barriers
from pagedmla.kernels.gluon.few_heads.consumer import attend_share
from pagedmla.kernels.gluon.few_heads.layouts import (
    EXTRA,
    QUERY_EMPTY,
    QUERY_FULL,
    ROPE_STAGES,
    SIGNALS,
    STAGES,
    Queries,
    Shared,
)
from pagedmla.kernels.gluon.few_heads.loader import load_share
from pagedmla.kernels.gluon.layouts import (
    CHUNK,
    KEYS,
    LATENT,
    ROPE,
    TILE_LAYOUT,
    Batch,
    Outputs,
    Pages,
    Partials,
)
from pagedmla.kernels.gluon.shares import share_of

# arguments that vary from step to step: a compilation for each kind of value would be one too many
STEP_ARGUMENTS = (
    "q_token_chunks", "q_head_chunks", "q_rope_token_chunks", "q_rope_head_chunks", "q_rope_column",
    "rows_per_page", "num_pages", "token_chunks", "num_seqs", "num_tokens", "even_q_len", "capacity",
    "block_table_stride", "seq_lens_stride", "cu_seqlens_q_stride", "lse_token_stride", "lse_head_stride",
)  # fmt: skip


@gluon.jit(do_not_specialize=STEP_ARGUMENTS)
def decode_few_heads(
    q,
    q_token_chunks: gl.int64,
    q_head_chunks: gl.int64,
    q_rope,
    q_rope_token_chunks: gl.int64,
    q_rope_head_chunks: gl.int64,
    q_rope_column,
    rows_per_page,
    num_pages,
    kv_cache,
    token_chunks: gl.int64,
    block_table,
    block_table_stride: gl.int64,
    block_table_column_stride: gl.int64,
    seq_lens,
    seq_lens_stride: gl.int64,
    cu_seqlens_q,
    cu_seqlens_q_stride: gl.int64,
    num_seqs,
    num_tokens,
    even_q_len,
    capacity,
    out,
    out_token_stride: gl.int64,
    out_head_stride: gl.int64,
    lse,
    lse_token_stride: gl.int64,
    lse_head_stride: gl.int64,
    partial_out,
    partial_lse,
    flags,
    scale_log2,
    RAGGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SCAN: gl.constexpr,
    ONE_ROW_TILE: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Grid (programs), launched cooperatively: see pieces.py.

    Rows are copied 16 bytes at a time, and what is called chunks counts those from one token, head or row to the next; rotated
    parts of queries begin at column q_rope_column of q_rope.  A row of the cache is a token, latent first, and page p begins at
    row p * rows_per_page.  PAGE_SIZE: tokens.
    CAUSAL: rows of a tile may differ in what they see.  RAGGED: there are query starts; otherwise each sequence has even_q_len
    query tokens.  SCAN: sequences that are looked at at a time; SMALL_SCAN, if there are
    fewer than that.  ONE_ROW_TILE: without RAGGED, where a sequence has ROWS rows or fewer.

    ``Partials`` says what partial_out, partial_lse and flags are; they may hold anything, and flags hold 0 where they were
    needed.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    shared = Shared(
        keys=gl.allocate_shared_memory(dtype, [STAGES, KEYS, LATENT], TILE_LAYOUT),
        rope=gl.allocate_shared_memory(dtype, [ROPE_STAGES, KEYS, ROPE], TILE_LAYOUT),
        query=gl.allocate_shared_memory(dtype, [ROWS, LATENT], TILE_LAYOUT),
        query_rope=gl.allocate_shared_memory(dtype, [ROWS, ROPE], TILE_LAYOUT),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        signals=gl.allocate_shared_memory(gl.int64, [SIGNALS, 1], mbarrier.MBarrierLayout()),
    )
    open_barriers(shared.full, STAGES, 32 * GATHER_WARPS)
    open_barriers(shared.empty, STAGES, 1)
    mbarrier.init(shared.signals.index(QUERY_FULL), count=32 * GATHER_WARPS)
    mbarrier.init(shared.signals.index(QUERY_EMPTY), count=1)
    batch = Batch(
        seq_lens, seq_lens_stride, cu_seqlens_q, cu_seqlens_q_stride,
        num_seqs, num_tokens, even_q_len, capacity,
    )  # fmt: skip
    pages = Pages(
        kv_cache, token_chunks, rows_per_page, num_pages,
        block_table, block_table_stride, block_table_column_stride,
    )  # fmt: skip
    queries = Queries(
        q, q_token_chunks, q_head_chunks,
        # a multiple of what a thread copies at once, which the compiler is to see
        q_rope + q_rope_column // CHUNK * CHUNK, q_rope_token_chunks, q_rope_head_chunks,
    )  # fmt: skip
    outputs = Outputs(out, out_token_stride, out_head_stride, lse, lse_token_stride, lse_head_stride)
    partials = Partials(partial_out, partial_lse, flags, gl.num_programs(0))
    worker = gl.program_id(0)
    share, place, shares = share_of(
        worker, gl.num_programs(0), batch, RAGGED, NUM_HEADS, ROWS, SCAN, ONE_ROW_TILE, 1, EXTRA
    )
    # the tuples stand here: in a variable, a constant would be none any more
    gl.warp_specialize(
        [
            (
                attend_share,
                (
                    shared, worker, share, place, shares, batch, outputs, partials, scale_log2,
                    RAGGED, CAUSAL, NUM_HEADS, ROWS, ONE_ROW_TILE,
                ),
            ),
            (
                load_share,
                (
                    shared, share, shares.extra, place, batch, pages, queries,
                    RAGGED, NUM_HEADS, PAGE_SIZE, ROWS, ONE_ROW_TILE,
                ),
            ),
        ],
        [GATHER_WARPS],
        [LOADER_REGISTERS],
    )  # fmt: skip
