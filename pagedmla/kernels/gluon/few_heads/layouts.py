"""Sizes, register and shared-memory layouts of the few-heads kernel.

S^T [KEYS, ROWS] = K Q^T and O^T [LATENT, ROWS] += V^T P^T: keys, then latent columns, are on the matrix unit's M side, rows
(query token, head) on its N side, which may be as small as 8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# KV tiles in shared memory, and rotated parts: a third of these would not fit
STAGES = gl.constexpr(3)
ROPE_STAGES = gl.constexpr(2)
# KV tiles that last as long as to begin and to end a row tile
EXTRA = gl.constexpr(2)

# how a few keys pass through registers to be cleaned
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
# how final rows pass to memory: [ROWS, LATENT], 8 numbers of a row at once
OUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@gluon.constexpr_function
def transposed(rows: int) -> Any:
    """Layout of S^T and O^T with ``rows`` rows on the N side."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16])


@gluon.constexpr_function
def row_layout(rows: int) -> Any:
    """Layout of a vector over the rows."""
    return gl.SliceLayout(0, transposed(rows))


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
        keys, rope: [STAGES, KEYS, LATENT], [ROPE_STAGES, KEYS, ROPE].
        query, query_rope: [ROWS, LATENT], [ROWS, ROPE].
        full, empty: barriers [STAGES] of a tile.
        signals: barriers [SIGNALS].
    """

    keys: Any
    rope: Any
    query: Any
    query_rope: Any
    full: Any
    empty: Any
    signals: Any


# The loader's: the query of a segment is there.
QUERY_FULL = gl.constexpr(0)
# To the loader: nobody needs the last query.
QUERY_EMPTY = gl.constexpr(1)
SIGNALS = gl.constexpr(2)


class Queries(NamedTuple):
    """The query rows: token, then head.

    Attributes:
        latent, rope: pointers to the first row's latent part, and to its rotated one.
        latent_token_chunks, latent_head_chunks, rope_token_chunks, rope_head_chunks: 16 bytes from one to the next.
    """

    latent: Any
    latent_token_chunks: Any
    latent_head_chunks: Any
    rope: Any
    rope_token_chunks: Any
    rope_head_chunks: Any
