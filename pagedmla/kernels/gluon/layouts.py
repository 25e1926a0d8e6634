"""Sizes, layouts and records that both decode kernels share: what a kernel is told, and what its partitions pass on."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# tokens of a KV tile, the unit in which work is shared out
KEYS = gl.constexpr(64)
LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
# queries and keys: two bytes a number
NUMBER_BYTES = gl.constexpr(2)
# numbers of 16 bytes, of which all distances between rows that are copied are multiples
CHUNK = gl.constexpr(8)
# warps of each warpgroup that computes
COMPUTE_WARPS = gl.constexpr(4)

TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""How a tile lies in shared memory: as the copy engine writes it and the matrix unit reads it."""

TILE_LAYOUT = gl.constexpr(TILE)


@gluon.constexpr_function
def scan_layout(scan: int, warps: int) -> Any:
    """Layout of a vector over ``scan`` sequences: whole in every warp, so that sums over it need no shared memory."""
    return gl.BlockedLayout([scan // 32], [32], [warps], [0])


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


class Pages(NamedTuple):
    """The pages, whose tokens are rows of one matrix.

    Attributes:
        kv_cache: pointer; token_chunks: 16 bytes from one row to the next.
        rows_per_page: rows from one page to the next; num_pages: pages of the pool.
        block_table, table_stride, table_column_stride: i32 pointer, numbers.
    """

    kv_cache: Any
    token_chunks: Any
    rows_per_page: Any
    num_pages: Any
    block_table: Any
    table_stride: Any
    table_column_stride: Any


class Outputs(NamedTuple):
    """Final rows: pointers, and their strides in numbers."""

    out: Any
    out_token_stride: Any
    out_head_stride: Any
    lse: Any
    lse_token_stride: Any
    lse_head_stride: Any


class Partials(NamedTuple):
    """Partial states of cut row tiles, of one team: the programs that share out the same work.  A program has two slots.

    Attributes:
        out: f32 [slots, ROWS, COLUMNS].
        lse: f32 [slots, ROWS], base 2.
        flags: i64 [slots, programs]: see pieces.py.
        programs: of the team.
    """

    out: Any
    lse: Any
    flags: Any
    programs: Any
