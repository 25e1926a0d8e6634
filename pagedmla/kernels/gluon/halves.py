"""The two warpgroups that compute: each goes through the program's segments, pair by pair, for its half of the values.

Left also keeps the maximum, and writes the logarithms.  Both end a segment with the sum of both sums of weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from pagedmla.kernels.gluon.layouts import (
    ACCUMULATOR,
    HALF,
    OUT_COLUMN,
    OUT_ROW,
    Q_EMPTY,
    Q_FULL,
    ROW,
    ROWS,
    SUM_LEFT,
    SUM_RIGHT,
    SUMMED_LEFT,
    SUMMED_RIGHT,
)
from pagedmla.kernels.gluon.segments import (
    FIELDS,
    PIECES,
    Q_BEGIN,
    Q_LEN,
    ROW_TILE,
    SEQUENCE,
    SLOT,
    kv_length,
    pair_range,
)
from pagedmla.kernels.gluon.softmax import arrive, left_pair, right_pair
from pagedmla.kernels.split_kv.merge import LN2


@gluon.jit
def exchange_sums(
    shared,
    l,
    turn,
    MINE: gl.constexpr,
    OTHERS: gl.constexpr,
    SUMMED: gl.constexpr,
    OTHER_SUMMED: gl.constexpr,
):
    """The sum of both warpgroups' sums of weights f32 [ROWS]; afterwards the loader may bring the next segment's query.

    It may not before: without pairs, nothing else would keep a fast warpgroup from putting its next sum over one that the other
    has not read.
    """
    shared.vectors.index(MINE).store(l)
    arrive(shared.signals.index(SUMMED))
    mbarrier.wait(shared.signals.index(OTHER_SUMMED), turn)
    total = l + shared.vectors.index(OTHERS).load(ROW)
    arrive(shared.signals.index(Q_EMPTY))
    return total


@gluon.jit
def hide_padding(l, token, batch):
    """A sum of 0 for query tokens before the first start: nobody's, though the first sequence's row tiles hold them."""
    return gl.where(token < gl.load(batch.cu_seqlens_q), 0.0, l)


@gluon.jit
def store_rows(
    o,
    l,
    segment,
    q_begin,
    q_len,
    has_keys,
    outputs,
    partials,
    FIRST_COLUMN: gl.constexpr,
    NUM_HEADS: gl.constexpr,
):
    """Divides [ROWS, HALF] values by their sums of weights and writes them from a column on: final rows, or a slot's.

    Strides of ``out`` that are multiples of 16 are known as such when this is compiled; if they were not, every number would be
    a store of its own, 10 us a segment.
    """
    # a sum is 0 only where no key was seen, and whatever the accumulator holds there, the row is zeros
    inverse = gl.where(l == 0.0, 0.0, 1.0 / gl.where(l == 0.0, 1.0, l))
    inverse = gl.convert_layout(inverse, OUT_ROW)
    o = gl.where(inverse[:, None] == 0.0, 0.0, o * inverse[:, None])
    in_tile = gl.arange(0, ROWS, OUT_ROW)
    row = gl.load(segment + ROW_TILE) * ROWS + in_tile
    column = FIRST_COLUMN + gl.arange(0, HALF, OUT_COLUMN)
    mask = (row < q_len * NUM_HEADS)[:, None]
    if gl.load(segment + PIECES) == 1:
        token = (q_begin + row // NUM_HEADS).to(gl.int64)
        head = (row % NUM_HEADS).to(gl.int64)
        final = outputs.out + token * outputs.out_token_stride + head * outputs.out_head_stride
        gl.store(final[:, None] + column[None, :], o.to(outputs.out.dtype.element_ty), mask=mask)
    else:
        # an empty piece says so by its lse; its rows are never read
        place = gl.load(segment + SLOT).to(gl.int64) * ROWS + in_tile
        gl.store(partials.out + (place * (2 * HALF))[:, None] + column[None, :], o, mask=mask & has_keys)


@gluon.jit
def store_logarithms(l, m, segment, token, head, is_row, outputs, partials):
    """Writes the log-sum-exp of rows: natural where they are final, else base 2 into a slot; -inf without keys."""
    lse2 = m + gl.log2(gl.where(l == 0.0, 1.0, l))
    if gl.load(segment + PIECES) == 1:
        final = outputs.lse + token * outputs.lse_token_stride + head * outputs.lse_head_stride
        gl.store(final, lse2 * LN2, mask=is_row)
    else:
        place = gl.load(segment + SLOT).to(gl.int64) * ROWS + gl.arange(0, ROWS, ROW)
        gl.store(partials.lse + place, lse2, mask=is_row)


@gluon.jit
def left(
    shared, share, segments, batch, outputs, partials, scale_log2,
    RAGGED: gl.constexpr, CAUSAL: gl.constexpr, NUM_HEADS: gl.constexpr,
):  # fmt: skip
    """The left warpgroup: segments share[0] .. share[1] - 1, latent columns 0 .. 255, and the logarithms."""
    k = 0
    for index in range(share[0], share[1]):
        segment = segments + index * FIELDS
        q_begin = gl.load(segment + Q_BEGIN)
        q_len = gl.load(segment + Q_LEN)
        kv_len = kv_length(gl.load(segment + SEQUENCE), batch)
        begin, full_end, end = pair_range(segment, kv_len, q_len, CAUSAL, NUM_HEADS)
        turn = (index - share[0]) & 1
        mbarrier.wait(shared.signals.index(Q_FULL), turn)
        row = gl.load(segment + ROW_TILE) * ROWS + gl.arange(0, ROWS, ROW)
        # bottom-right aligned: query j of n sees keys 0 .. kv_len - n + j
        visible_len = kv_len - q_len + row // NUM_HEADS + 1
        o = gl.zeros([ROWS, HALF], gl.float32, ACCUMULATOR)
        m = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        l = gl.zeros([ROWS], gl.float32, ROW)
        c = gl.zeros([ROWS], gl.float32, ROW)
        for pair in range(begin, full_end):
            o, m, l, c = left_pair(
                shared, o, m, l, c, k, pair, kv_len, visible_len, scale_log2, False, CAUSAL
            )
            k += 1
        for pair in range(full_end, end):
            o, m, l, c = left_pair(shared, o, m, l, c, k, pair, kv_len, visible_len, scale_log2, True, CAUSAL)
            k += 1
        l = exchange_sums(shared, l, turn, SUM_LEFT, SUM_RIGHT, SUMMED_LEFT, SUMMED_RIGHT)
        token = (q_begin + row // NUM_HEADS).to(gl.int64)
        if RAGGED:
            m = gl.where(token < gl.load(batch.cu_seqlens_q), float("-inf"), m)
            l = hide_padding(l, token, batch)
        head = (row % NUM_HEADS).to(gl.int64)
        store_logarithms(l, m, segment, token, head, row < q_len * NUM_HEADS, outputs, partials)
        store_rows(o, l, segment, q_begin, q_len, end > begin, outputs, partials, 0, NUM_HEADS)


@gluon.jit
def right(
    shared, share, segments, batch, outputs, partials, scale_log2,
    RAGGED: gl.constexpr, CAUSAL: gl.constexpr, NUM_HEADS: gl.constexpr,
):  # fmt: skip
    """The right warpgroup: segments share[0] .. share[1] - 1, latent columns 256 .. 511."""
    k = 0
    for index in range(share[0], share[1]):
        segment = segments + index * FIELDS
        q_begin = gl.load(segment + Q_BEGIN)
        q_len = gl.load(segment + Q_LEN)
        kv_len = kv_length(gl.load(segment + SEQUENCE), batch)
        begin, full_end, end = pair_range(segment, kv_len, q_len, CAUSAL, NUM_HEADS)
        turn = (index - share[0]) & 1
        mbarrier.wait(shared.signals.index(Q_FULL), turn)
        row = gl.load(segment + ROW_TILE) * ROWS + gl.arange(0, ROWS, ROW)
        visible_len = kv_len - q_len + row // NUM_HEADS + 1
        o = gl.zeros([ROWS, HALF], gl.float32, ACCUMULATOR)
        l = gl.zeros([ROWS], gl.float32, ROW)
        c = gl.zeros([ROWS], gl.float32, ROW)
        for pair in range(begin, full_end):
            o, l, c = right_pair(shared, o, l, c, k, pair, kv_len, visible_len, scale_log2, False, CAUSAL)
            k += 1
        for pair in range(full_end, end):
            o, l, c = right_pair(shared, o, l, c, k, pair, kv_len, visible_len, scale_log2, True, CAUSAL)
            k += 1
        l = exchange_sums(shared, l, turn, SUM_RIGHT, SUM_LEFT, SUMMED_RIGHT, SUMMED_LEFT)
        if RAGGED:
            l = hide_padding(l, q_begin + row // NUM_HEADS, batch)
        store_rows(o, l, segment, q_begin, q_len, end > begin, outputs, partials, HALF, NUM_HEADS)
