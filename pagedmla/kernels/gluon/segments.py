"""What a segment of the plan says to all partitions; the plan is made by split_kv/schedule.py, in tiles of ROWS and PAIR."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pagedmla.kernels.gluon.layouts import PAIR, ROWS

# i32 numbers of a segment, and where each stands
FIELDS = gl.constexpr(8)
SEQUENCE, ROW_TILE, FIRST_PAIR, END_PAIR = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
SLOT, PIECES, Q_BEGIN, Q_LEN = gl.constexpr(4), gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)


@gluon.jit
def kv_length(sequence, batch):
    """Keys of a sequence in tokens, within 0 .. capacity; 0 for the padding, which is one past the last."""
    last = gl.minimum(sequence, batch.num_seqs - 1).to(gl.int64)
    length = gl.load(batch.seq_lens + last * batch.seq_lens_stride)
    length = gl.minimum(gl.maximum(length, 0), batch.capacity)
    return gl.where(sequence < batch.num_seqs, length, 0)


@gluon.jit
def pair_range(segment, kv_len, q_len, CAUSAL: gl.constexpr, NUM_HEADS: gl.constexpr):
    """(first pair, the first one with a key that some row must not see, the one past the last)."""
    row_tile = gl.load(segment + ROW_TILE)
    begin = gl.load(segment + FIRST_PAIR)
    end = gl.minimum(gl.load(segment + END_PAIR), (kv_len + PAIR - 1) // PAIR)
    seen_by_all = kv_len
    if CAUSAL:
        # the earliest query of the tile sees the least
        seen_by_all = gl.maximum(kv_len - q_len + row_tile * ROWS // NUM_HEADS + 1, 0)
    full_end = gl.maximum(gl.minimum(end, seen_by_all // PAIR), begin)
    return begin, full_end, gl.maximum(end, begin)
