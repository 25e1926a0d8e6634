"""One pair of KV tiles: its scores, the online softmax over both, and the products with one half of the values.

The state of a warpgroup, for its half of the values, over the pairs so far:

    o    f32 [ROWS, HALF]   sum of exp2(score - maximum) * value
    m    f32 [ROWS]         the largest score, in base 2 (scores are multiplied by log2 e, which exp2 wants)
    l, c f32 [ROWS]         the sum of exp2(score - maximum) over the tiles that this warpgroup scored, and what the additions
                            to it have rounded up so far (Kahan 1965)

Both tiles of a pair count against one maximum: left's first, then the larger of that and right's.  The matrix unit is to have
work all the time, and a tile's place is to be free early, since it takes a third of a pair's time until the next tile is there.
So both products with the first tile run while the second one's softmax does, and are rescaled afterwards.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pagedmla.kernels.gluon.barriers import arrive
from pagedmla.kernels.gluon.layouts import KEYS, TILE_LAYOUT
from pagedmla.kernels.gluon.many_heads.layouts import (
    COPY,
    FACTOR_FIRST,
    FACTOR_SECOND,
    HALF,
    KEY,
    MAX_FIRST,
    MAX_SECOND,
    OUT_ROW,
    QUERY_EMPTY,
    ROW,
    ROWS,
    SCORE,
    SCORED_FIRST,
    SCORED_SECOND,
    SUM_LEFT,
    SUM_RIGHT,
    SUMMED_LEFT,
    SUMMED_RIGHT,
    WEIGHTS,
)
from pagedmla.kernels.gluon.opaque import zero_here

# columns of a tile that lie together in shared memory: 128 bytes
SWIZZLED = gl.constexpr(64)


@gluon.jit
def await_keys(barrier, phase, GATHER: gl.constexpr):
    """Waits until keys are there, or the other warpgroup has them."""
    mbarrier.wait(barrier, phase)
    if GATHER:
        # threads wrote the keys, not the copy engine
        fence_async_shared()


@gluon.jit
def scores(shared, TILE_OF_PAIR: gl.constexpr, phase, GATHER: gl.constexpr):
    """Unscaled q . k of one tile, f32 [ROWS, KEYS].  The left half of the keys is used while the right one is on its way."""
    nothing = zero_here()
    k_left, k_right = (
        shared.k_left.index(TILE_OF_PAIR + nothing),
        shared.k_right.index(TILE_OF_PAIR + nothing),
    )
    k_rope = shared.k_rope.index(TILE_OF_PAIR + nothing)
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    await_keys(shared.full.index(TILE_OF_PAIR), phase, GATHER)
    s = warpgroup_mma(
        shared.q_left.index(nothing), k_left.permute((1, 0)), zero, use_acc=False, is_async=True
    )
    await_keys(shared.full.index(TILE_OF_PAIR + 2), phase, GATHER)
    s = warpgroup_mma(shared.q_right.index(nothing), k_right.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(shared.q_rope.index(nothing), k_rope.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def hide(s, first, key_end, visible_len, CAUSAL: gl.constexpr):
    """Scores of keys ``first`` and following, -inf from key_end on and, with CAUSAL, where a row does not see the key.

    With CAUSAL, row r sees the keys below visible_len[r], and a score that is not finite becomes nan: the values of such a key
    are cleaned, so that it breaks the rows that see it and no others.
    """
    key = first + gl.arange(0, KEYS, KEY)
    if CAUSAL:
        s = gl.where(gl.abs(s) < float("inf"), s, float("nan"))
        return gl.where(key[None, :] < gl.minimum(visible_len, key_end)[:, None], s, float("-inf"))
    return gl.where((key < key_end)[None, :], s, float("-inf"))


@gluon.jit
def clean(tile, first, key_end, CAUSAL: gl.constexpr):
    """Puts zeros from ``key_end`` on into values [KEYS, HALF]; with CAUSAL also for nan and inf.

    A hidden key has weight 0, and memory that nobody owns may hold nan: 0 * nan is nan.  With CAUSAL that holds for a key that
    only some rows see, too.
    """
    row = first + gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    # A few columns at a time: the accumulators leave few registers.  As they lie in shared memory, 128 bytes of each row.
    parts = tile._reinterpret(tile.dtype, [HALF // SWIZZLED, KEYS, SWIZZLED], TILE_LAYOUT)
    # a loop, and not its code four times
    for chunk in range(HALF // SWIZZLED + zero_here()):
        part = parts.index(chunk)
        values = part.load(COPY)
        keep = (row < key_end)[:, None]
        if CAUSAL:
            keep = keep & (gl.abs(values.to(gl.float32)) < float("inf"))
        part.store(gl.where(keep, values, 0.0).to(values.dtype))
    # the matrix unit reads what threads have written
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def finite(m):
    """``m``, or any finite number for a row without a key yet: so that -inf - m is -inf and not nan.

    A score that overflows is to break its row, and scores are multiplied and subtracted from at once, which would hide that.
    So weights count from a maximum that was rounded by itself, which all of a row share: docs/contract.md says from where on
    that matters.
    """
    return gl.where(m == float("-inf"), 0.0, gl.where(m == float("inf"), float("nan"), m))


@gluon.jit
def add_compensated(total, error, term):
    """(total + term, its rounding error), with the rounding error of the additions before taken off first."""
    term = term - error
    result = total + term
    return result, (result - total) - term


@gluon.jit
def rescale(o, factor):
    return o * gl.convert_layout(factor, OUT_ROW)[:, None]


@gluon.jit
def left_pair(
    shared, o, m, l, c, k, first, key_end, visible_len, is_last, is_edge, scale_log2,
    CAUSAL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """The left warpgroup's part of keys ``first`` and following, the program's ``k``-th pair; returns (o, m, l, c).

    ``is_last``: of the segment; ``is_edge``: somebody must not see some key of the pair.
    """
    phase = k & 1
    s = scores(shared, 0, phase, GATHER)
    if is_edge:
        s = hide(s, first, key_end, visible_len, CAUSAL)
    m_first = gl.maximum(m, gl.max(s, axis=1) * scale_log2)
    shift = finite(m_first)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    factor = gl.exp2(m - shift)
    shared.vectors.index(MAX_FIRST).store(m_first)
    shared.vectors.index(FACTOR_FIRST).store(factor)
    narrow = p.to(shared.p0.dtype)
    # right has multiplied the last weights here before this tile could come
    shared.p0.store(narrow)
    fence_async_shared()
    arrive(shared.signals.index(SCORED_FIRST))
    mbarrier.arrive(shared.signals.index(QUERY_EMPTY), count=1, pred=is_last)
    o = rescale(o, factor)
    weights = gl.convert_layout(narrow, WEIGHTS)
    if is_edge:
        clean(shared.k_left.index(0 + zero_here()), first, key_end, CAUSAL)
    o = warpgroup_mma(weights, shared.k_left.index(0 + zero_here()), o, is_async=True)
    l, c = add_compensated(l * factor, c * factor, gl.sum(p, axis=1))
    await_keys(shared.signals.index(SCORED_SECOND), phase, GATHER)
    factor_second = shared.vectors.index(FACTOR_SECOND).load(ROW)
    m = shared.vectors.index(MAX_SECOND).load(ROW)
    l = l * factor_second
    c = c * factor_second
    o = warpgroup_mma_wait(0, deps=(o,))
    arrive(shared.empty_left.index(0))
    o = rescale(o, factor_second)
    if is_edge:
        # right has scored it: SCORED_SECOND
        clean(shared.k_left.index(1 + zero_here()), first + KEYS, key_end, CAUSAL)
    o = warpgroup_mma(shared.p1, shared.k_left.index(1 + zero_here()), o, is_async=True)
    if is_last:
        shared.vectors.index(SUM_LEFT).store(l - c)
        arrive(shared.signals.index(SUMMED_LEFT))
    o = warpgroup_mma_wait(0, deps=(o,))
    gl.thread_barrier()
    # The loader waits for this before it copies over p1, too (loader.py).  The last pair's place serves to sort the rows in,
    # and is free after that.
    mbarrier.arrive(shared.empty_left.index(1), count=1, pred=is_last == 0)
    return o, m, l, c


@gluon.jit
def right_pair(
    shared, o, m, l, c, k, first, key_end, visible_len, is_last, is_edge, scale_log2,
    CAUSAL: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """The right warpgroup's part of keys ``first`` and following, the program's ``k``-th pair; returns (o, m, l, c).

    Arguments are `left_pair`'s; ``m`` is the pair's, and was the one before.
    """
    phase = k & 1
    s = scores(shared, 1, phase, GATHER)
    await_keys(shared.signals.index(SCORED_FIRST), phase, GATHER)
    m_first = shared.vectors.index(MAX_FIRST).load(ROW)
    factor_first = shared.vectors.index(FACTOR_FIRST).load(ROW)
    o = rescale(o, factor_first)
    if is_edge:
        # left has scored it: SCORED_FIRST
        clean(shared.k_right.index(0 + zero_here()), first, key_end, CAUSAL)
    o = warpgroup_mma(shared.p0, shared.k_right.index(0 + zero_here()), o, is_async=True)
    if is_edge:
        s = hide(s, first + KEYS, key_end, visible_len, CAUSAL)
    m = gl.maximum(m_first, gl.max(s, axis=1) * scale_log2)
    shift = finite(m)
    factor_second = gl.exp2(m_first - shift)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    shared.vectors.index(MAX_SECOND).store(m)
    shared.vectors.index(FACTOR_SECOND).store(factor_second)
    narrow = p.to(shared.p0.dtype)
    # p1 lies on the tile's rotated part: all warps must have their scores
    gl.thread_barrier()
    shared.p1.store(narrow)
    fence_async_shared()
    arrive(shared.signals.index(SCORED_SECOND))
    mbarrier.arrive(shared.signals.index(QUERY_EMPTY), count=1, pred=is_last)
    factor = factor_first * factor_second
    l, c = add_compensated(l * factor, c * factor, gl.sum(p, axis=1))
    weights = gl.convert_layout(narrow, WEIGHTS)
    o = warpgroup_mma_wait(0, deps=(o,))
    arrive(shared.empty_right.index(0))
    o = rescale(o, factor_second)
    if is_edge:
        clean(shared.k_right.index(1 + zero_here()), first + KEYS, key_end, CAUSAL)
    o = warpgroup_mma(weights, shared.k_right.index(1 + zero_here()), o, is_async=True)
    if is_last:
        shared.vectors.index(SUM_RIGHT).store(l - c)
        arrive(shared.signals.index(SUMMED_RIGHT))
    o = warpgroup_mma_wait(0, deps=(o,))
    gl.thread_barrier()
    # the last pair's place serves to sort the rows in, and is free after that
    mbarrier.arrive(shared.empty_right.index(1), count=1, pred=is_last == 0)
    return o, m, l, c
