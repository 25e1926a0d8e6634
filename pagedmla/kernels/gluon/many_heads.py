"""The decode kernel for many rows a sequence: a share of the plan, segment by segment, by two warpgroups and a loading warp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pagedmla.kernels.gluon.halves import left, right
from pagedmla.kernels.gluon.layouts import (
    COMPUTE_REGISTERS,
    COMPUTE_WARPS,
    HALF,
    KEYS,
    LOADER_REGISTERS,
    Q_EMPTY,
    ROPE,
    ROWS,
    SIGNALS,
    TILE_LAYOUT,
    VECTOR_LAYOUT,
    VECTORS,
    Batch,
    Cache,
    Outputs,
    Partials,
    Queries,
    Shared,
)
from pagedmla.kernels.gluon.loader import load_tiles

# arguments that vary from step to step: a compilation for each kind of value would be one too many
STEP_ARGUMENTS = (
    "q_rope_column", "rows_per_page", "num_pages", "num_seqs", "capacity",
    "block_table_stride", "seq_lens_stride", "lse_token_stride", "lse_head_stride",
)  # fmt: skip


@gluon.jit
def open_barriers(barriers, COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    for barrier in gl.static_range(COUNT):
        mbarrier.init(barriers.index(barrier), count=ARRIVALS)


@gluon.jit(do_not_specialize=STEP_ARGUMENTS)
def decode_many_heads(
    shares,
    segments,
    q_desc,
    q_rope_desc,
    q_rope_column,
    latent_desc,
    rope_desc,
    rows_per_page,
    num_pages,
    block_table,
    block_table_stride: gl.int64,
    block_table_column_stride: gl.int64,
    seq_lens,
    seq_lens_stride: gl.int64,
    cu_seqlens_q,
    num_seqs,
    capacity,
    out,
    out_token_stride: gl.int64,
    out_head_stride: gl.int64,
    lse,
    lse_token_stride: gl.int64,
    lse_head_stride: gl.int64,
    partial_out,
    partial_lse,
    scale_log2,
    RAGGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Grid (programs of the plan).  Segments and shares are those of split_kv/schedule.py for ROWS rows and PAIR tokens.

    Descriptors are of matrices [rows, numbers]; q_desc and latent_desc copy [64, 256] at once, the others [64, 64].  A row of
    the cache is a token, latent first, and page p begins at row p * rows_per_page.  PAGE_SIZE: tokens, a multiple of 64, so
    that a block of keys lies in one page.  CAUSAL: rows of a tile may differ in what they see.

    Nothing here waits for another program.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    k_rope = gl.allocate_shared_memory(dtype, [2, KEYS, ROPE], TILE_LAYOUT)
    shared = Shared(
        q_left=gl.allocate_shared_memory(dtype, [ROWS, HALF], TILE_LAYOUT),
        q_right=gl.allocate_shared_memory(dtype, [ROWS, HALF], TILE_LAYOUT),
        q_rope=gl.allocate_shared_memory(dtype, [ROWS, ROPE], TILE_LAYOUT),
        k_left=gl.allocate_shared_memory(dtype, [2, KEYS, HALF], TILE_LAYOUT),
        k_right=gl.allocate_shared_memory(dtype, [2, KEYS, HALF], TILE_LAYOUT),
        k_rope=k_rope,
        p0=gl.allocate_shared_memory(dtype, [ROWS, KEYS], TILE_LAYOUT),
        # Another 8 KiB would not fit.  The second block's rotated keys are read for its scores alone, by the right warpgroup,
        # which then puts its weights there.
        p1=k_rope.index(1),
        vectors=gl.allocate_shared_memory(gl.float32, [VECTORS, ROWS], VECTOR_LAYOUT),
        full=gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout()),
        empty_left=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        empty_right=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        signals=gl.allocate_shared_memory(gl.int64, [SIGNALS, 1], mbarrier.MBarrierLayout()),
    )
    open_barriers(shared.full, 4, 1)
    open_barriers(shared.empty_left, 2, 1)
    open_barriers(shared.empty_right, 2, 1)
    open_barriers(shared.signals, Q_EMPTY, 1)
    # both warpgroups must have done with a query
    mbarrier.init(shared.signals.index(Q_EMPTY), count=2)
    batch = Batch(seq_lens, seq_lens_stride, cu_seqlens_q, num_seqs, capacity)
    cache = Cache(
        latent_desc, rope_desc, rows_per_page, num_pages,
        block_table, block_table_stride, block_table_column_stride,
    )  # fmt: skip
    queries = Queries(q_desc, q_rope_desc, q_rope_column)
    outputs = Outputs(out, out_token_stride, out_head_stride, lse, lse_token_stride, lse_head_stride)
    partials = Partials(partial_out, partial_lse)
    program = gl.program_id(0)
    share = (gl.load(shares + 2 * program), gl.load(shares + 2 * program + 1))
    # the tuples stand here: in a variable, a constant would be none any more
    gl.warp_specialize(
        [
            (
                left,
                (shared, share, segments, batch, outputs, partials, scale_log2, RAGGED, CAUSAL, NUM_HEADS),
            ),
            (
                right,
                (shared, share, segments, batch, outputs, partials, scale_log2, RAGGED, CAUSAL, NUM_HEADS),
            ),
            (load_tiles, (shared, share, segments, batch, cache, queries, CAUSAL, NUM_HEADS, PAGE_SIZE)),
        ],
        [COMPUTE_WARPS, 1],
        [COMPUTE_REGISTERS, LOADER_REGISTERS],
    )
