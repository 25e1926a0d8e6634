"""One KV tile: its scores, the online softmax, and its products with the values.

The state over the tiles so far:

    o    f32 [LATENT, ROWS]  sum of value * exp2(score - maximum)
    m    f32 [ROWS]          the largest score, in base 2 (scores are multiplied by log2 e, which exp2 wants)
    l, c f32 [KEYS, ROWS]    the sum of exp2(score - maximum) over every KEYS-th key, and what the additions to it have rounded
                             up so far (Kahan 1965; not with 32 rows); summed over the keys at the end: that crosses warps

Keys that a row must not see are hidden from it in every tile, since that is cheap; values are cleaned only where it is needed.
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

from pagedmla.kernels.gluon.few_heads.layouts import COPY, QUERY_EMPTY, ROPE_STAGES, STAGES, transposed
from pagedmla.kernels.gluon.layouts import KEYS

# keys that are cleaned at a time: as many as a swizzle of shared memory goes over
CLEANED = gl.constexpr(8)
# most rows with which there are registers for c; a sum over every KEYS-th key is a short one
COMPENSATED_ROWS = gl.constexpr(16)


@gluon.jit
def scores(shared, k, ROWS: gl.constexpr):
    """Unscaled k . q of the program's ``k``-th tile, f32 [KEYS, ROWS]."""
    LAYOUT: gl.constexpr = transposed(ROWS)
    stage = k % STAGES
    mbarrier.wait(shared.full.index(stage), (k // STAGES) & 1)
    # threads wrote the keys, not the copy engine
    fence_async_shared()
    zero = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
    s = warpgroup_mma(
        shared.keys.index(stage), shared.query.permute((1, 0)), zero, use_acc=False, is_async=True
    )
    s = warpgroup_mma(shared.rope.index(k % ROPE_STAGES), shared.query_rope.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def hide(s, first, visible_len, is_edge, CAUSAL: gl.constexpr, ROWS: gl.constexpr):
    """Scores of keys ``first`` and following, -inf from visible_len [ROWS] on.

    With CAUSAL, a score at the edge that is not finite becomes nan: the values of such a key are cleaned, so that it breaks the
    rows that see it and no others.
    """
    key = first + gl.arange(0, KEYS, gl.SliceLayout(1, transposed(ROWS)))
    if CAUSAL:
        s = gl.where(is_edge & (gl.abs(s) == float("inf")), float("nan"), s)
    return gl.where(key[:, None] < visible_len[None, :], s, float("-inf"))


@gluon.jit
def clean(keys, first, kv_len, seen_by_all, CAUSAL: gl.constexpr):
    """Puts zeros where no key is (from ``kv_len`` on) into values [KEYS, LATENT]; with CAUSAL also for nan and inf of keys that
    some row does not see (from ``seen_by_all`` on).

    A hidden key has weight 0, and memory that nobody owns may hold nan: 0 * nan is nan.
    """
    for group in gl.static_range(KEYS // CLEANED):
        begin = first + group * CLEANED
        if begin + CLEANED > seen_by_all:
            row = begin + gl.arange(0, CLEANED, gl.SliceLayout(1, COPY))
            part = keys.slice(group * CLEANED, CLEANED, dim=0)
            values = part.load(COPY)
            keep = (row < kv_len)[:, None]
            if CAUSAL:
                keep = keep & ((row < seen_by_all)[:, None] | (gl.abs(values.to(gl.float32)) < float("inf")))
            part.store(gl.where(keep, values, 0.0).to(values.dtype))


@gluon.jit
def attend_tile(
    shared, o, m, l, c, k, first, kv_len, visible_len, seen_by_all, is_last, scale_log2,
    CAUSAL: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Adds the program's ``k``-th tile, keys ``first`` and following, to the state; returns (o, m, l, c).

    ``is_last``: of the segment; the query is no longer needed once it is scored.
    """
    values = shared.keys.index(k % STAGES)
    is_edge = first + KEYS > seen_by_all
    s = hide(scores(shared, k, ROWS) * scale_log2, first, visible_len, is_edge, CAUSAL, ROWS)
    # the maximum passes between the warps: behind it, all of them have their scores
    m_new = gl.maximum(m, gl.max(s, axis=0))
    mbarrier.arrive(shared.signals.index(QUERY_EMPTY), count=1, pred=is_last)
    # a row without a key yet: any finite number stands for its maximum, so that -inf - m is -inf and not nan
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - shift[None, :])
    # P lies [row, key] on the rotated part, which nobody needs once the tile is scored: shared memory is full
    weights = shared.rope.index(k % ROPE_STAGES).slice(0, ROWS, dim=0).permute((1, 0))
    weights.store(p.to(values.dtype))
    if is_edge:
        clean(values, first, kv_len, seen_by_all, CAUSAL)
    fence_async_shared()
    factor = gl.exp2(m - shift)
    o = o * factor[None, :]
    gl.thread_barrier()
    o = warpgroup_mma(values.permute((1, 0)), weights, o, is_async=True)
    # in the shadow of the product
    l = l * factor[None, :]
    if COMPENSATED_ROWS >= ROWS:
        term = p - c * factor[None, :]
        total = l + term
        c = (total - l) - term
        l = total
    else:
        l += p
    o = warpgroup_mma_wait(0, deps=(o,))
    gl.thread_barrier()
    # the last tile's place serves to sort the rows in, and is free after that
    mbarrier.arrive(shared.empty.index(k % STAGES), count=1, pred=is_last == 0)
    return o, m_new, l, c
