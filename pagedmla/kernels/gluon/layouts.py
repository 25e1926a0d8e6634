"""Sizes, register and shared-memory layouts of the Gluon kernel, and what its warpgroups tell each other.

A program has three partitions: ``left`` and ``right``, a warpgroup each, which compute, and one warp that loads.  Keys come in
pairs of blocks of 64.  Left scores the pair's first block and right the second; then left multiplies the weights of both by
the first half of the values (latent columns 0 .. 255), and right by the second half.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from pagedmla.kernels.policy import GLUON_DECODE_CONFIG

ROWS = gl.constexpr(GLUON_DECODE_CONFIG.block_m)
PAIR = gl.constexpr(GLUON_DECODE_CONFIG.block_n)
# keys of a block
KEYS = gl.constexpr(GLUON_DECODE_CONFIG.block_n // 2)
# latent columns of one half, and rotated ones
HALF = gl.constexpr(256)
ROPE = gl.constexpr(64)
# queries and keys: two bytes a number
NUMBER_BYTES = gl.constexpr(2)
COMPUTE_WARPS = gl.constexpr(GLUON_DECODE_CONFIG.num_warps)
# registers that a thread of the second warpgroup, and of the loading warp, may use
COMPUTE_REGISTERS = gl.constexpr(GLUON_DECODE_CONFIG.compute_registers)
LOADER_REGISTERS = gl.constexpr(GLUON_DECODE_CONFIG.loader_registers)

_ACCUMULATOR = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
_SCORE = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
ACCUMULATOR = gl.constexpr(_ACCUMULATOR)
SCORE = gl.constexpr(_SCORE)
# weights that a warpgroup multiplies out of its own registers
WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_ACCUMULATOR, k_width=2))
# a vector over the rows or the keys of scores, over the rows or the columns of an accumulator
ROW = gl.constexpr(gl.SliceLayout(1, _SCORE))
KEY = gl.constexpr(gl.SliceLayout(0, _SCORE))
OUT_ROW = gl.constexpr(gl.SliceLayout(1, _ACCUMULATOR))
OUT_COLUMN = gl.constexpr(gl.SliceLayout(0, _ACCUMULATOR))
# how a block passes through registers to be cleaned
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""How a tile lies in shared memory: as the copy engine writes it and the matrix unit reads it."""

TILE_LAYOUT = gl.constexpr(TILE)
VECTOR_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# Vectors f32 [ROWS] that pass between the warpgroups, all but the sums once a pair.
# The maximum after the pair's first block, and what the state before that is multiplied by.
MAX_FIRST, FACTOR_FIRST = gl.constexpr(0), gl.constexpr(1)
# the same after its second block
MAX_SECOND, FACTOR_SECOND = gl.constexpr(2), gl.constexpr(3)
# the sum of weights of left's blocks, of right's
SUM_LEFT, SUM_RIGHT = gl.constexpr(4), gl.constexpr(5)
VECTORS = gl.constexpr(6)

# Signals; each is a barrier that one arrival completes.  Left says SCORED_FIRST: MAX_FIRST and FACTOR_FIRST are there, and
# nobody reads the first block for scores any more; and WEIGHTS_FIRST: p0 is there.  Right says SCORED_SECOND and
# WEIGHTS_SECOND (p1) of the second block.
SCORED_FIRST, SCORED_SECOND = gl.constexpr(0), gl.constexpr(1)
WEIGHTS_FIRST, WEIGHTS_SECOND = gl.constexpr(2), gl.constexpr(3)
# the sums of a segment are there
SUMMED_LEFT, SUMMED_RIGHT = gl.constexpr(4), gl.constexpr(5)
# The loader's: a segment's query is there.  To the loader, from both warpgroups: nobody needs the last one's.
Q_FULL, Q_EMPTY = gl.constexpr(6), gl.constexpr(7)
SIGNALS = gl.constexpr(8)


class Shared(NamedTuple):
    """Shared memory of a program: 226 KiB.

    Attributes:
        q_left, q_right, q_rope: [ROWS, HALF], [ROWS, HALF], [ROWS, ROPE], the segment's queries.
        k_left, k_right, k_rope: [2, KEYS, HALF], [2, KEYS, HALF], [2, KEYS, ROPE], the pair's keys.
        p0, p1: [ROWS, KEYS], the weights of the first block as right reads them, and of the second as left does.
        vectors: f32 [VECTORS, ROWS].
        full: barriers [4]: the left half of block 0, of block 1, the right half (and rotated part) of block 0, of block 1.
        empty_left, empty_right: barriers [2]: nobody needs that half of the block any more.
        signals: barriers [SIGNALS].
    """

    q_left: Any
    q_right: Any
    q_rope: Any
    k_left: Any
    k_right: Any
    k_rope: Any
    p0: Any
    p1: Any
    vectors: Any
    full: Any
    empty_left: Any
    empty_right: Any
    signals: Any


class Batch(NamedTuple):
    """What a kernel asks of the batch: see split_kv/schedule.py.

    Attributes:
        seq_lens, seq_lens_stride: i32 pointer, numbers.
        cu_seqlens_q: i32 pointer, read only with RAGGED.
        num_seqs: sequences; capacity: tokens of one that the block table can name.
    """

    seq_lens: Any
    seq_lens_stride: Any
    cu_seqlens_q: Any
    num_seqs: Any
    capacity: Any


class Cache(NamedTuple):
    """The pages as rows of one matrix.

    Attributes:
        latent, rope: descriptors of that matrix, for blocks of [KEYS, HALF] and [KEYS, ROPE].
        rows_per_page: rows from one page to the next; num_pages: pages of the pool.
        block_table, table_stride, table_column_stride: i32 pointer, numbers.
    """

    latent: Any
    rope: Any
    rows_per_page: Any
    num_pages: Any
    block_table: Any
    table_stride: Any
    table_column_stride: Any


class Queries(NamedTuple):
    """The query rows, (token, head) after (token, head).

    Attributes:
        latent, rope: descriptors for tiles of [ROWS, HALF] and [ROWS, ROPE].
        rope_column: where the rotated part begins in a row of the second.
    """

    latent: Any
    rope: Any
    rope_column: Any


class Outputs(NamedTuple):
    """Final rows: pointers, and their strides in numbers."""

    out: Any
    out_token_stride: Any
    out_head_stride: Any
    lse: Any
    lse_token_stride: Any
    lse_head_stride: Any


class Partials(NamedTuple):
    """Partial states of cut row tiles: see split_kv/workspace.py."""

    out: Any
    lse: Any
