"""Unites the partial states of one decode: out = sum_i 2^(lse_i - lse) out_i, the log-sum-exp in natural logarithm at last.

Pieces are taken in the order of their keys.  A piece without keys (lse -inf) is the identity, bit for bit, and its out is never
read; a nan stays visible.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

# turns a log-sum-exp in base 2 into a natural one
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def place_of(piece, first_place, pieces, num_places, PERSISTENT: tl.constexpr, BLOCK_M: tl.constexpr):
    """(place i64 of a piece, whether there is one).  ``piece`` is a number for many rows, or a vector for one."""
    if PERSISTENT:
        # slots 2 w + 1, 2 (w + 1), 2 (w + 2), ...
        place = first_place + piece * (2 * BLOCK_M) - tl.where(piece > 0, BLOCK_M, 0)
    else:
        place = first_place + piece * BLOCK_M
    return place, (piece < pieces) & (place >= 0) & (place < num_places)


@triton.jit(do_not_specialize=("num_rows", "num_heads", "num_places"))
def merge_partials_kernel(
    partial_out,
    partial_lse,
    row_pieces,
    out,
    lse,
    num_rows,
    num_heads,
    num_places,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    lse_token_stride: tl.int64,
    lse_head_stride: tl.int64,
    PERSISTENT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    IN_ORDER: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Grid (num_rows / BLOCK_ROWS, BLOCK_D / BLOCK_COLUMNS); num_rows = num_tokens * num_heads.  schedule.py and
    workspace.py have the layout of what is read.

    num_places: slots * BLOCK_M, past which nothing is read whatever the plan says.  OVERLAPPED: the launch did not wait for
    the decode kernel.
    """
    if OVERLAPPED:
        gdc_wait()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    first_place = tl.load(row_pieces + row.to(tl.int64) * 2, mask=is_row, other=0).to(tl.int64)
    pieces = tl.load(row_pieces + row.to(tl.int64) * 2 + 1, mask=is_row, other=0)
    most_pieces = tl.minimum(tl.max(pieces, 0), num_places)
    if most_pieces > 1:
        column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        m = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        denominator = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for first in tl.range(0, most_pieces, BLOCK_PIECES):
            if IN_ORDER:
                # Many rows: a program's threads have enough to do with one piece of each, and several are read at a time.  The
                # order of the sums depends on nothing but the pieces.
                m_new = m
                for step in tl.static_range(BLOCK_PIECES):
                    place, exists = place_of(
                        first + step, first_place, pieces, num_places, PERSISTENT, BLOCK_M
                    )
                    m_new = tl.maximum(m_new, tl.load(partial_lse + place, mask=exists, other=float("-inf")))
                shift = tl.where(m_new == float("-inf"), 0.0, m_new)
                alpha = tl.exp2(m - shift)
                acc = acc * alpha[:, None]
                denominator = denominator * alpha
                for step in tl.static_range(BLOCK_PIECES):
                    place, exists = place_of(
                        first + step, first_place, pieces, num_places, PERSISTENT, BLOCK_M
                    )
                    piece_lse = tl.load(partial_lse + place, mask=exists, other=float("-inf"))
                    weight = tl.exp2(piece_lse - shift)
                    piece_out = tl.load(
                        partial_out + (place * BLOCK_D)[:, None] + column[None, :],
                        mask=(piece_lse != float("-inf"))[:, None] & (column < D)[None, :],
                        other=0.0,
                    )
                    acc += weight[:, None] * piece_out
                    denominator += weight
            else:
                # few rows with many pieces: the threads share the pieces of one row
                piece = first + tl.arange(0, BLOCK_PIECES)
                place, exists = place_of(piece, first_place, pieces, num_places, PERSISTENT, BLOCK_M)
                piece_lse = tl.load(partial_lse + place, mask=exists, other=float("-inf"))
                m_new = tl.maximum(m, tl.max(piece_lse, 0))
                shift = tl.where(m_new == float("-inf"), 0.0, m_new)
                alpha = tl.exp2(m - shift)
                weight = tl.exp2(piece_lse - shift)
                piece_out = tl.load(
                    partial_out + (place * BLOCK_D)[:, None] + column[None, :],
                    mask=(piece_lse != float("-inf"))[:, None] & (column < D)[None, :],
                    other=0.0,
                )
                acc = acc * alpha[:, None] + tl.sum(weight[:, None] * piece_out, 0)[None, :]
                denominator = denominator * alpha + tl.sum(weight, 0)
            m = m_new
        # no key at all: the sums are 0
        divisor = tl.where(denominator == 0.0, 1.0, denominator)
        token = (row // num_heads).to(tl.int64)
        head = (row % num_heads).to(tl.int64)
        is_cut = pieces > 1
        tl.store(
            out + (token * out_token_stride + head * out_head_stride)[:, None] + column[None, :],
            (acc / divisor[:, None]).to(out.dtype.element_ty),
            mask=is_cut[:, None] & (column < D)[None, :],
        )
        if tl.program_id(1) == 0:
            tl.store(
                lse + token * lse_token_stride + head * lse_head_stride,
                (m + tl.log2(divisor)) * LN2,
                mask=is_cut,
            )
