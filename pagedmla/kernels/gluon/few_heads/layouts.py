"""Sizes, register and shared-memory layouts of the few-heads kernel.

S^T [KEYS, ROWS] = K Q^T and O^T [LATENT, ROWS] += V^T P^T: keys, then latent columns, are on the matrix unit's M side, rows
(query token, head) on its N side, which may be as small as 8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# tokens of a KV tile: what one warpgroup has on its M side
KEYS = gl.constexpr(64)
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
# KV tiles in shared memory
STAGES = gl.constexpr(2)
NUMBER_BYTES = gl.constexpr(2)
# warps of the warpgroup that computes
COMPUTE_WARPS = gl.constexpr(4)

# how keys and queries lie in shared memory: as the copy engine writes them and the matrix unit reads them
TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
TILE_LAYOUT = gl.constexpr(TILE)
# how a few keys pass through registers to be cleaned
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
# how final rows pass to memory: [LATENT, ROWS], 8 numbers of a row at once
OUT = gl.constexpr(gl.BlockedLayout([8, 1], [32, 1], [1, 4], [0, 1]))


@gluon.constexpr_function
def transposed(rows: int) -> Any:
    """Layout of S^T and O^T with ``rows`` rows on the N side."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16])


@gluon.constexpr_function
def weights_layout(rows: int) -> Any:
    """Layout of P^T [KEYS, rows] in shared memory: a row of it is 32, 64 or 128 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * rows, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def row_layout(rows: int) -> Any:
    """Layout of a vector over the rows."""
    return gl.SliceLayout(0, transposed(rows))


@gluon.constexpr_function
def state_layout(rows: int) -> Any:
    """Layout of a finished state [LATENT, rows]: as it passes to memory, if shared memory has room to sort it in."""
    return transposed(rows) if rows > 16 else OUT.value


@gluon.constexpr_function
def scan_layout(scan: int, warps: int) -> Any:
    """Layout of a vector over ``scan`` sequences: whole in every warp, so that sums over it need no shared memory."""
    return gl.BlockedLayout([scan // 32], [32], [warps], [0])


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
        keys, rope: [STAGES, KEYS, LATENT], [STAGES, KEYS, ROPE].
        query, query_rope: [ROWS, LATENT], [ROWS, ROPE].
        weights: [KEYS, ROWS].
        full, empty: barriers [STAGES] of a tile.
        signals: barriers [SIGNALS].
    """

    keys: Any
    rope: Any
    query: Any
    query_rope: Any
    weights: Any
    full: Any
    empty: Any
    signals: Any


# The loader's: the query of a segment is there.
QUERY_FULL = gl.constexpr(0)
# To the loader: nobody needs the last query.
QUERY_EMPTY = gl.constexpr(1)
SIGNALS = gl.constexpr(2)


class Batch(NamedTuple):
    """What a kernel asks of the batch.

    Attributes:
        seq_lens, seq_lens_stride: i32 pointer, numbers.
        cu_seqlens_q, cu_seqlens_q_stride: i32 pointer, numbers; read only with RAGGED.
        num_seqs, num_tokens: sequences, query tokens.
        even_q_len: query tokens of each sequence, without RAGGED.
        capacity: tokens of one sequence that the block table can name.
    """

    seq_lens: Any
    seq_lens_stride: Any
    cu_seqlens_q: Any
    cu_seqlens_q_stride: Any
    num_seqs: Any
    num_tokens: Any
    even_q_len: Any
    capacity: Any


class Partials(NamedTuple):
    """Partial states of cut row tiles; a program has two slots.

    Attributes:
        out: f32 [slots, ROWS, LATENT].
        lse: f32 [slots, ROWS], base 2.
        flags: i64 [slots, programs]: see pieces.py.
    """

    out: Any
    lse: Any
    flags: Any
