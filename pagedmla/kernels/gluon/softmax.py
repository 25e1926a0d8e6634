"""One pair of key blocks: its scores, the online softmax over both, and the products with one half of the values.

The state of a warpgroup, for its half of the values, over the pairs so far:

    o    f32 [ROWS, HALF]   sum of exp2(score - maximum) * value
    m    f32 [ROWS]         the largest score, in base 2 (scores are multiplied by log2 e, which exp2 wants); left's alone
    l, c f32 [ROWS]         the sum of exp2(score - maximum) over the blocks that this warpgroup scored, and what the additions
                            to it have rounded up so far (Kahan 1965)

Both blocks of a pair count against one maximum, left's first, then the larger of that and right's.  A pair in which somebody
must not see some key takes the longer way, EDGE; so no way of the common ones hides anything.
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

from pagedmla.kernels.gluon.layouts import (
    COPY,
    FACTOR_FIRST,
    FACTOR_SECOND,
    HALF,
    KEY,
    KEYS,
    MAX_FIRST,
    MAX_SECOND,
    OUT_ROW,
    PAIR,
    ROW,
    ROWS,
    SCORE,
    SCORED_FIRST,
    SCORED_SECOND,
    WEIGHTS,
    WEIGHTS_FIRST,
    WEIGHTS_SECOND,
)


@gluon.jit
def arrive(barrier):
    """Arrives for the whole warpgroup: one of its threads does, after all of them have come here."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def scores(shared, BLOCK: gl.constexpr, phase):
    """Unscaled q . k of one block, f32 [ROWS, KEYS].  The left half of the keys is used while the right one is on its way."""
    k_left, k_right = shared.k_left.index(BLOCK), shared.k_right.index(BLOCK)
    k_rope = shared.k_rope.index(BLOCK)
    zero = gl.zeros([ROWS, KEYS], gl.float32, SCORE)
    mbarrier.wait(shared.full.index(BLOCK), phase)
    s = warpgroup_mma(shared.q_left, k_left.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.full.index(BLOCK + 2), phase)
    s = warpgroup_mma(shared.q_right, k_right.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(shared.q_rope, k_rope.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def hide(s, first, kv_len, visible_len, CAUSAL: gl.constexpr):
    """Scores of keys ``first`` and following, -inf where a row does not see the key.

    With CAUSAL, row r sees the keys below visible_len[r], and a score that is not finite becomes nan: the values of such a key
    are cleaned, so that it breaks the rows that see it and no others.
    """
    key = first + gl.arange(0, KEYS, KEY)
    if CAUSAL:
        s = gl.where(gl.abs(s) < float("inf"), s, float("nan"))
        return gl.where(key[None, :] < visible_len[:, None], s, float("-inf"))
    return gl.where((key < kv_len)[None, :], s, float("-inf"))


@gluon.jit
def clean(block, first, kv_len, COLUMNS: gl.constexpr, CAUSAL: gl.constexpr):
    """Puts zeros where no key is (from ``kv_len`` on) into a block of values [KEYS, COLUMNS]; with CAUSAL also for nan and inf.

    A hidden key has weight 0, and memory that nobody owns may hold nan: 0 * nan is nan.  With CAUSAL that holds for a key that
    only some rows see, too.
    """
    row = first + gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    # a few columns at a time: the accumulators leave few registers
    for chunk in gl.static_range(COLUMNS // 64):
        part = block.slice(chunk * 64, 64, dim=1)
        values = part.load(COPY)
        keep = (row < kv_len)[:, None]
        if CAUSAL:
            keep = keep & (gl.abs(values.to(gl.float32)) < float("inf"))
        part.store(gl.where(keep, values, 0.0).to(values.dtype))
    # the matrix unit reads what threads have written
    fence_async_shared()


@gluon.jit
def add_compensated(total, error, term):
    """(total + term, its rounding error), with the rounding error of the additions before taken off first."""
    term = term - error
    result = total + term
    return result, (result - total) - term


@gluon.jit
def left_pair(
    shared, o, m, l, c, k, pair, kv_len, visible_len, scale_log2, EDGE: gl.constexpr, CAUSAL: gl.constexpr
):
    """The left warpgroup's part of pair ``pair``, which is the program's ``k``-th; returns (o, m, l, c)."""
    phase = k & 1
    s = scores(shared, 0, phase) * scale_log2
    if EDGE:
        s = hide(s, pair * PAIR, kv_len, visible_len, CAUSAL)
    m_first = gl.maximum(m, gl.max(s, axis=1))
    # a row without a key yet: any finite number stands for its maximum, so that -inf - m is -inf and not nan
    shift = gl.where(m_first == float("-inf"), 0.0, m_first) if EDGE else m_first
    p = gl.exp2(s - shift[:, None])
    factor = gl.exp2(m - shift)
    shared.vectors.index(MAX_FIRST).store(m_first)
    shared.vectors.index(FACTOR_FIRST).store(factor)
    arrive(shared.signals.index(SCORED_FIRST))
    l, c = add_compensated(l * factor, c * factor, gl.sum(p, axis=1))
    o = o * gl.convert_layout(factor, OUT_ROW)[:, None]
    weights = gl.convert_layout(p.to(shared.p0.dtype), WEIGHTS)
    if EDGE:
        clean(shared.k_left.index(0), pair * PAIR, kv_len, HALF, CAUSAL)
        gl.thread_barrier()
    # the second block's maximum is not waited for: this product runs in the meantime, and is rescaled afterwards
    acc = warpgroup_mma(weights, shared.k_left.index(0), o, is_async=True)
    mbarrier.wait(shared.signals.index(SCORED_SECOND), phase)
    factor_second = shared.vectors.index(FACTOR_SECOND).load(ROW)
    m = shared.vectors.index(MAX_SECOND).load(ROW)
    # right multiplies these weights after it has seen the second block: against the pair's last maximum
    shared.p0.store((p * factor_second[:, None]).to(shared.p0.dtype))
    fence_async_shared()
    arrive(shared.signals.index(WEIGHTS_FIRST))
    l = l * factor_second
    c = c * factor_second
    o = warpgroup_mma_wait(0, deps=(acc,))
    arrive(shared.empty_left.index(0))
    o = o * gl.convert_layout(factor_second, OUT_ROW)[:, None]
    if EDGE:
        # right has scored it: SCORED_SECOND
        clean(shared.k_left.index(1), pair * PAIR + KEYS, kv_len, HALF, CAUSAL)
        gl.thread_barrier()
    mbarrier.wait(shared.signals.index(WEIGHTS_SECOND), phase)
    acc = warpgroup_mma(shared.p1, shared.k_left.index(1), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(acc,))
    # the loader waits for this before it copies over p1, too (loader.py)
    arrive(shared.empty_left.index(1))
    return o, m, l, c


@gluon.jit
def right_pair(
    shared, o, l, c, k, pair, kv_len, visible_len, scale_log2, EDGE: gl.constexpr, CAUSAL: gl.constexpr
):
    """The right warpgroup's part of pair ``pair``, which is the program's ``k``-th; returns (o, l, c)."""
    phase = k & 1
    s = scores(shared, 1, phase) * scale_log2
    if EDGE:
        s = hide(s, pair * PAIR + KEYS, kv_len, visible_len, CAUSAL)
    largest = gl.max(s, axis=1)
    mbarrier.wait(shared.signals.index(SCORED_FIRST), phase)
    m_first = shared.vectors.index(MAX_FIRST).load(ROW)
    factor_first = shared.vectors.index(FACTOR_FIRST).load(ROW)
    m_second = gl.maximum(m_first, largest)
    shift = gl.where(m_second == float("-inf"), 0.0, m_second) if EDGE else m_second
    factor_second = gl.exp2(m_first - shift)
    p = gl.exp2(s - shift[:, None])
    shared.vectors.index(MAX_SECOND).store(m_second)
    shared.vectors.index(FACTOR_SECOND).store(factor_second)
    # all threads have come here, so nobody reads the rotated keys that p1 lies on any more
    arrive(shared.signals.index(SCORED_SECOND))
    narrow = p.to(shared.p0.dtype)
    shared.p1.store(narrow)
    fence_async_shared()
    arrive(shared.signals.index(WEIGHTS_SECOND))
    factor = factor_first * factor_second
    l, c = add_compensated(l * factor, c * factor, gl.sum(p, axis=1))
    o = o * gl.convert_layout(factor, OUT_ROW)[:, None]
    weights = gl.convert_layout(narrow, WEIGHTS)
    if EDGE:
        clean(shared.k_right.index(1), pair * PAIR + KEYS, kv_len, HALF, CAUSAL)
        # left has scored it: SCORED_FIRST
        clean(shared.k_right.index(0), pair * PAIR, kv_len, HALF, CAUSAL)
        gl.thread_barrier()
    # the block at hand first: left may still be at its weights
    acc = warpgroup_mma(weights, shared.k_right.index(1), o, is_async=True)
    mbarrier.wait(shared.signals.index(WEIGHTS_FIRST), phase)
    acc = warpgroup_mma(shared.p0, shared.k_right.index(0), acc, is_async=True)
    o = warpgroup_mma_wait(0, deps=(acc,))
    gl.thread_barrier()
    mbarrier.arrive(shared.empty_right.index(0), count=1)
    mbarrier.arrive(shared.empty_right.index(1), count=1)
    return o, l, c
