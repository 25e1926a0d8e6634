"""Attention of one row tile to a range of KV tiles, with an online softmax (Milakov and Gimelshein 2018).

A row tile is BLOCK_M (query token, head) pairs of one sequence; all of them use a KV tile that is read once.  The state:

    acc f32   sum of exp2(score - m) * value; [BLOCK_M, BLOCK_D], transposed with KEYS_ON_M
    m   f32   [BLOCK_M], largest score so far, in base 2 (scores are multiplied by log2 e, which exp2 wants)
    l   f32   [BLOCK_M], sum of exp2(score - m)
    c   f32   [BLOCK_M], what the additions to l have rounded up so far (Kahan 1965): with one dominating key, thousands of
              tiles that each add less than half an ulp would be lost, and lse with them

KEYS_ON_M puts the KV tile's tokens, not the rows, on the matrix unit's M side: Hopper's unit takes 64 at least there, and with
16 rows three quarters of it would idle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedmla.kernels.triton.pages import load_columns, tile_pages

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """acc + a @ b in f32.  WIDEN: operands as f32, since Triton's interpreter multiplies the raw bits of bf16."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def along_keys(rows, KEYS_ON_M: tl.constexpr):
    """A vector over rows, ready to be broadcast along the keys of a score matrix."""
    return rows[None, :] if KEYS_ON_M else rows[:, None]


@triton.jit
def along_rows(keys, KEYS_ON_M: tl.constexpr):
    """A vector over keys, ready to be broadcast along the rows of a score matrix."""
    return keys[:, None] if KEYS_ON_M else keys[None, :]


@triton.jit
def score(
    q_latent,
    q_rope,
    latent,
    rope,
    scale_log2,
    HAS_ROPE: tl.constexpr,
    KEYS_ON_M: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Scaled q . k: [BLOCK_M, BLOCK_N], transposed with KEYS_ON_M.

    The two products are scaled one by one: Triton would make a sum of them one chain of products, and a product that
    another one waits for gets a layout in which both of Hopper's warpgroups compute all of it.
    """
    if KEYS_ON_M:
        s = (
            dot(latent, tl.trans(q_latent), tl.zeros([latent.shape[0], q_latent.shape[0]], tl.float32), WIDEN)
            * scale_log2
        )
        if HAS_ROPE:
            s += (
                dot(rope, tl.trans(q_rope), tl.zeros([latent.shape[0], q_latent.shape[0]], tl.float32), WIDEN)
                * scale_log2
            )
    else:
        s = (
            dot(q_latent, tl.trans(latent), tl.zeros([q_latent.shape[0], latent.shape[0]], tl.float32), WIDEN)
            * scale_log2
        )
        if HAS_ROPE:
            s += (
                dot(q_rope, tl.trans(rope), tl.zeros([q_latent.shape[0], latent.shape[0]], tl.float32), WIDEN)
                * scale_log2
            )
    return s


@triton.jit
def add_compensated(total, error, factor, term):
    """(factor * total + term, its rounding error), with the rounding error of the additions before taken off first.

    Products and sums are fused by name: left to the compiler, they would be fused in one loop and not in the other, and a row's
    bits would depend on which loop met its keys.
    """
    term = tl.fma(-error, factor, term)
    result = tl.fma(total, factor, term)
    return result, tl.fma(-total, factor, result) - term


@triton.jit
def ordered_sum(p, KEYS_ON_M: tl.constexpr):
    """Sums over keys as a tree of neighbours, f32 [BLOCK_M].

    tl.sum adds in the order of the threads that hold the numbers, which differs between the two loops below.
    """
    if KEYS_ON_M:
        p = tl.trans(p)
    # tiles of this mode have 32 keys at most (policy.CAUSAL_END_BLOCK_N)
    for _ in tl.static_range(5):
        if p.shape[1] > 1:
            even, odd = tl.split(tl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
            p = even + odd
    return tl.reshape(p, [p.shape[0]])


@triton.jit
def accumulate(
    s,
    latent,
    acc,
    m,
    l,
    c,
    MAY_BE_HIDDEN: tl.constexpr,
    ORDERED: tl.constexpr,
    KEYS_ON_M: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One step of the online softmax; hidden scores are -inf.

    MAY_BE_HIDDEN: a row may have seen no key so far.  ORDERED: the bits do not depend on the loop that this step is in.
    """
    m_new = tl.maximum(m, tl.max(s, 0 if KEYS_ON_M else 1))
    # a row without a key yet: any finite number stands for its maximum, so that -inf - m is -inf and not nan
    shift = tl.where(m_new == NEG_INF, 0.0, m_new) if MAY_BE_HIDDEN else m_new
    p = tl.exp2(s - along_keys(shift, KEYS_ON_M))
    alpha = tl.exp2(m - shift)
    p_sum = ordered_sum(p, KEYS_ON_M) if ORDERED else tl.sum(p, 0 if KEYS_ON_M else 1)
    l, c = add_compensated(l, c, alpha, p_sum)
    acc = acc * along_keys(alpha, KEYS_ON_M)
    weights = p.to(latent.dtype)
    acc = dot(tl.trans(latent), weights, acc, WIDEN) if KEYS_ON_M else dot(weights, latent, acc, WIDEN)
    return acc, m_new, l, c


@triton.jit
def attend(
    q_latent,
    q_rope,
    cache_row,
    kv_len,
    tile_begin,
    tile_end,
    scale_log2,
    acc,
    m,
    l,
    c,
    PAGE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ORDERED: tl.constexpr,
    KEYS_ON_M: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """KV tiles tile_begin .. tile_end - 1, of which every row sees every key below ``kv_len``."""
    last = kv_len - 1
    # page ids are read one tile ahead: a load that waits for another load would not be pipelined far enough
    pages = tile_pages(cache_row, tile_begin * BLOCK_N, last, PAGE_SIZE, BLOCK_N)
    for tile in range(tile_begin, tile_end):
        first = tile * BLOCK_N
        latent = load_columns(cache_row, pages, first, last, 0, D, BLOCK_D, PAGE_SIZE, PACKED, BLOCK_N)
        rope = latent
        if R > 0:
            rope = load_columns(cache_row, pages, first, last, D, R, BLOCK_R, PAGE_SIZE, PACKED, BLOCK_N)
        pages = tile_pages(cache_row, first + BLOCK_N, last, PAGE_SIZE, BLOCK_N)
        s = score(q_latent, q_rope, latent, rope, scale_log2, R > 0, KEYS_ON_M, WIDEN)
        if first + BLOCK_N > kv_len:
            s = tl.where(along_rows(first + tl.arange(0, BLOCK_N) < kv_len, KEYS_ON_M), s, NEG_INF)
        acc, m, l, c = accumulate(s, latent, acc, m, l, c, False, ORDERED, KEYS_ON_M, WIDEN)
    return acc, m, l, c


@triton.jit
def attend_causal_end(
    q_latent,
    q_rope,
    cache_row,
    kv_len,
    visible_len,
    key_begin,
    key_end,
    scale_log2,
    acc,
    m,
    l,
    c,
    PAGE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ORDERED: tl.constexpr,
    KEYS_ON_M: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Keys key_begin .. key_end - 1, where rows differ in what they see.

    ``visible_len`` i32 [BLOCK_M]: row r sees the keys below visible_len[r].

    ``key_begin`` is a multiple of BLOCK_N, which is this loop's own: a tile passes through registers here.

    A hidden key has weight 0, but 0 times nan or inf is nan: a broken value must not reach the rows that do not see it.  Values
    are therefore multiplied without their nan and inf, and the rows that do see such a key are turned into nan by its score.
    """
    last = kv_len - 1
    for step in tl.range(0, tl.cdiv(key_end - key_begin, BLOCK_N), num_stages=1):
        first = key_begin + step * BLOCK_N
        pages = tile_pages(cache_row, first, last, PAGE_SIZE, BLOCK_N)
        latent = load_columns(cache_row, pages, first, last, 0, D, BLOCK_D, PAGE_SIZE, PACKED, BLOCK_N)
        rope = latent
        if R > 0:
            rope = load_columns(cache_row, pages, first, last, D, R, BLOCK_R, PAGE_SIZE, PACKED, BLOCK_N)
        finite = tl.abs(latent.to(tl.float32)) < float("inf")
        broken = tl.max(tl.where(finite, 0, 1), 1) > 0
        latent = tl.where(finite, latent, 0.0).to(latent.dtype)
        s = score(q_latent, q_rope, latent, rope, scale_log2, R > 0, KEYS_ON_M, WIDEN)
        s = tl.where(along_rows(broken, KEYS_ON_M), float("nan"), s)
        key = along_rows(first + tl.arange(0, BLOCK_N), KEYS_ON_M)
        s = tl.where(key < along_keys(visible_len, KEYS_ON_M), s, NEG_INF)
        acc, m, l, c = accumulate(s, latent, acc, m, l, c, True, ORDERED, KEYS_ON_M, WIDEN)
    return acc, m, l, c
