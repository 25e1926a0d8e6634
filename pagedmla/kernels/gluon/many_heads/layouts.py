"""Sizes, register and shared-memory layouts of the many-heads kernel.

S [ROWS, KEYS] = Q K^T and O [ROWS, HALF] += P V: rows (query token, head) are on the matrix unit's M side.  Two warpgroups have
one half of the latent columns each, left and right, and score one KV tile of a pair each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from pagedmla.kernels.gluon.layouts import KEYS

# rows of a row tile: the least that the warpgroup instruction takes
ROWS = gl.constexpr(64)
# latent columns of one half
HALF = gl.constexpr(256)
# tokens of a pair of KV tiles
PAIR = gl.constexpr(2 * KEYS.value)
# KV tiles that are worth a program of their own: to publish a state takes longer than a pair
SMALLEST = gl.constexpr(2)
# those that last as long as to begin and to end a row tile
EXTRA = gl.constexpr(4)
# the two warpgroups
LEFT, RIGHT = gl.constexpr(0), gl.constexpr(1)

_ACCUMULATOR = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
_SCORE = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
ACCUMULATOR = gl.constexpr(_ACCUMULATOR)
SCORE = gl.constexpr(_SCORE)
# weights that a warpgroup multiplies out of its own registers
WEIGHTS = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=_ACCUMULATOR, k_width=2))
# a vector over the rows or the keys of scores, and over the rows of an accumulator
ROW = gl.constexpr(gl.SliceLayout(1, _SCORE))
KEY = gl.constexpr(gl.SliceLayout(0, _SCORE))
OUT_ROW = gl.constexpr(gl.SliceLayout(1, _ACCUMULATOR))
# how a KV tile passes through registers to be cleaned
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# how final rows pass to memory: [ROWS, HALF], 8 numbers of a row at once
OUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
VECTOR_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

# Vectors f32 [ROWS] that pass between the warpgroups, all but the sums once a pair.
# The maximum after the pair's first tile, and what the state before that is multiplied by.
MAX_FIRST, FACTOR_FIRST = gl.constexpr(0), gl.constexpr(1)
# the same after its second tile
MAX_SECOND, FACTOR_SECOND = gl.constexpr(2), gl.constexpr(3)
# the sum of weights of left's tiles, of right's
SUM_LEFT, SUM_RIGHT = gl.constexpr(4), gl.constexpr(5)
VECTORS = gl.constexpr(6)

# Signals; each is a barrier that one arrival completes.  Left says SCORED_FIRST of a pair's first tile: MAX_FIRST,
# FACTOR_FIRST and its weights p0 are there, and nobody reads the tile for scores any more.  Right says SCORED_SECOND of the
# second.
SCORED_FIRST, SCORED_SECOND = gl.constexpr(0), gl.constexpr(1)
# the sums of a segment are there
SUMMED_LEFT, SUMMED_RIGHT = gl.constexpr(2), gl.constexpr(3)
# the loader's: a segment's query is there
QUERY_FULL = gl.constexpr(4)
# To the loader, from both warpgroups: nobody needs the last query.
QUERY_EMPTY = gl.constexpr(5)
SIGNALS = gl.constexpr(6)


class Shared(NamedTuple):
    """Shared memory of a program: 226 KiB.

    Attributes:
        q_left, q_right, q_rope: [ROWS, HALF], [ROWS, HALF], [ROWS, ROPE], the segment's queries.
        k_left, k_right, k_rope: [2, KEYS, HALF], [2, KEYS, HALF], [2, KEYS, ROPE], the pair's keys.
        p0, p1: [ROWS, KEYS], the weights of the first tile and of the second, for the warpgroup that did not score it.
        vectors: f32 [VECTORS, ROWS].
        full: barriers [4]: the left half of tile 0, of tile 1, the right half (and rotated part) of tile 0, of tile 1.
        empty_left, empty_right: barriers [2]: nobody needs that half of the tile any more.
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


class KeyTiles(NamedTuple):
    """Descriptors of the matrix of all tokens, for copies of [KEYS, HALF] latent columns and of [KEYS, ROPE]."""

    latent: Any
    rope: Any


class Queries(NamedTuple):
    """The query rows, (token, head) after (token, head).

    Attributes:
        latent, rope: descriptors for copies of [ROWS, HALF] latent columns, and of [ROWS, ROPE].
        rope_column: where the rotated part begins in a row of the second.
    """

    latent: Any
    rope: Any
    rope_column: Any
