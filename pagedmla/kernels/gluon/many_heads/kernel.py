"""The decode kernel for many rows a sequence: two warpgroups that compute, one warp that loads, and no other launch."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pagedmla.kernels.gluon.addresses import GATHER_WARPS
from pagedmla.kernels.gluon.barriers import open_barriers
from pagedmla.kernels.gluon.layouts import (
    KEYS,
    ROPE,
    TILE_LAYOUT,
    Batch,
    Outputs,
    Pages,
    Partials,
)
from pagedmla.kernels.gluon.many_heads.gather import gather_share
from pagedmla.kernels.gluon.many_heads.halves import attend_share
from pagedmla.kernels.gluon.many_heads.layouts import (
    EXTRA,
    HALF,
    LEFT,
    QUERY_EMPTY,
    RIGHT,
    ROWS,
    SIGNALS,
    SMALLEST,
    VECTOR_LAYOUT,
    VECTORS,
    KeyTiles,
    Queries,
    Shared,
)
from pagedmla.kernels.gluon.many_heads.loader import load_share
from pagedmla.kernels.gluon.shares import share_of

# arguments that vary from step to step: a compilation for each kind of value would be one too many
STEP_ARGUMENTS = (
    "q_rope_column", "rows_per_page", "token_chunks", "num_pages", "num_seqs", "num_tokens", "even_q_len", "capacity",
    "block_table_stride", "seq_lens_stride", "cu_seqlens_q_stride", "lse_token_stride", "lse_head_stride",
)  # fmt: skip


@gluon.jit
def partials_of(lane, SIDE: gl.constexpr, team_programs, partial_out, partial_lse, flags):
    """The ``Partials`` of a lane's half, which share out their work for themselves."""
    team = 2 * lane + SIDE
    slots = 2 * team_programs
    return Partials(
        partial_out + (team * slots).to(gl.int64) * (ROWS * HALF),
        partial_lse + team * slots * ROWS,
        flags + team * slots * team_programs,
        team_programs,
    )


@gluon.jit(do_not_specialize=STEP_ARGUMENTS)
def decode_many_heads(
    q_desc,
    q_rope_desc,
    q_rope_column,
    latent_desc,
    rope_desc,
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
    LANES: gl.constexpr,
    SCAN: gl.constexpr,
    ONE_ROW_TILE: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,
):
    """Grid (programs, a multiple of LANES), launched cooperatively: see pieces.py.

    Descriptors are of matrices [rows, numbers]; q_desc and latent_desc copy [64, 256] at once, the others [64, 64].  A row of
    the cache is a token, latent first, and page p begins at row p * rows_per_page.  PAGE_SIZE: tokens; if that is no multiple
    of 64, keys are copied token by token, from kv_cache, and there are token_chunks times 16 bytes from one to the next.
    CAUSAL: rows of a tile may differ in what they see.  RAGGED: there are query starts; otherwise each sequence has even_q_len
    query tokens.
    SCAN: sequences that are looked at at a time; SMALL_SCAN, if there are fewer than that.

    LANES: neighbouring programs that go through the same keys side by side, with a row tile each of a sequence's, so that what
    one has read is near for the others.  What is shared out among the programs of a lane are groups of LANES row tiles.
    ONE_ROW_TILE: without RAGGED, where a sequence has one such group.

    ``Partials`` says what partial_out, partial_lse and flags are, of each lane's halves one after the other; they may hold
    anything, and flags hold 0 where they were needed.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    GATHER: gl.constexpr = PAGE_SIZE % KEYS != 0
    k_rope = gl.allocate_shared_memory(dtype, [2, KEYS, ROPE], TILE_LAYOUT)
    shared = Shared(
        q_left=gl.allocate_shared_memory(dtype, [1, ROWS, HALF], TILE_LAYOUT),
        q_right=gl.allocate_shared_memory(dtype, [1, ROWS, HALF], TILE_LAYOUT),
        q_rope=gl.allocate_shared_memory(dtype, [1, ROWS, ROPE], TILE_LAYOUT),
        k_left=gl.allocate_shared_memory(dtype, [2, KEYS, HALF], TILE_LAYOUT),
        k_right=gl.allocate_shared_memory(dtype, [2, KEYS, HALF], TILE_LAYOUT),
        k_rope=k_rope,
        p0=gl.allocate_shared_memory(dtype, [ROWS, KEYS], TILE_LAYOUT),
        # Another 8 KiB would not fit.  The second tile's rotated keys are read for its scores alone, by the right warpgroup,
        # which then puts its weights there.
        p1=k_rope.index(1),
        vectors=gl.allocate_shared_memory(gl.float32, [VECTORS, ROWS], VECTOR_LAYOUT),
        full=gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout()),
        empty_left=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        empty_right=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        signals=gl.allocate_shared_memory(gl.int64, [SIGNALS, 1], mbarrier.MBarrierLayout()),
    )
    open_barriers(shared.full, 4, 32 * GATHER_WARPS if GATHER else 1)
    open_barriers(shared.empty_left, 2, 1)
    open_barriers(shared.empty_right, 2, 1)
    open_barriers(shared.signals, QUERY_EMPTY, 1)
    # both warpgroups must have done with a query
    mbarrier.init(shared.signals.index(QUERY_EMPTY), count=2)
    batch = Batch(
        seq_lens, seq_lens_stride, cu_seqlens_q, cu_seqlens_q_stride,
        num_seqs, num_tokens, even_q_len, capacity,
    )  # fmt: skip
    tiles = KeyTiles(latent_desc, rope_desc)
    pages = Pages(
        kv_cache, token_chunks, rows_per_page, num_pages,
        block_table, block_table_stride, block_table_column_stride,
    )  # fmt: skip
    queries = Queries(q_desc, q_rope_desc, q_rope_column)
    left_outputs = Outputs(out, out_token_stride, out_head_stride, lse, lse_token_stride, lse_head_stride)
    right_outputs = Outputs(
        out + HALF, out_token_stride, out_head_stride, lse, lse_token_stride, lse_head_stride
    )
    program = gl.program_id(0)
    worker = program // LANES
    lane = program % LANES
    team_programs = gl.num_programs(0) // LANES
    left_partials = partials_of(lane, LEFT, team_programs, partial_out, partial_lse, flags)
    right_partials = partials_of(lane, RIGHT, team_programs, partial_out, partial_lse, flags)
    share, place, shares = share_of(
        worker, team_programs, batch, RAGGED, NUM_HEADS, ROWS * LANES, SCAN, ONE_ROW_TILE, SMALLEST, EXTRA
    )
    # the tuples stand here: in a variable, a constant would be none any more
    if GATHER:
        gl.warp_specialize(
            [
                (
                    attend_share,
                    (
                        shared, worker, lane, share, place, shares, batch, left_outputs, left_partials, scale_log2,
                        RAGGED, CAUSAL, NUM_HEADS, LANES, ONE_ROW_TILE, LEFT, GATHER,
                    ),
                ),
                (
                    attend_share,
                    (
                        shared, worker, lane, share, place, shares, batch, right_outputs, right_partials, scale_log2,
                        RAGGED, CAUSAL, NUM_HEADS, LANES, ONE_ROW_TILE, RIGHT, GATHER,
                    ),
                ),
                (
                    gather_share,
                    (
                        shared, lane, share, shares.extra, place, batch, pages, queries,
                        RAGGED, NUM_HEADS, PAGE_SIZE, LANES, ONE_ROW_TILE,
                    ),
                ),
            ],
            [4, GATHER_WARPS],
            [COMPUTE_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    attend_share,
                    (
                        shared, worker, lane, share, place, shares, batch, left_outputs, left_partials, scale_log2,
                        RAGGED, CAUSAL, NUM_HEADS, LANES, ONE_ROW_TILE, LEFT, GATHER,
                    ),
                ),
                (
                    attend_share,
                    (
                        shared, worker, lane, share, place, shares, batch, right_outputs, right_partials, scale_log2,
                        RAGGED, CAUSAL, NUM_HEADS, LANES, ONE_ROW_TILE, RIGHT, GATHER,
                    ),
                ),
                (
                    load_share,
                    (
                        shared, lane, share, shares.extra, place, batch, tiles, pages, queries,
                        RAGGED, NUM_HEADS, PAGE_SIZE, LANES, ONE_ROW_TILE,
                    ),
                ),
            ],
            [4, 1],
            [COMPUTE_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
