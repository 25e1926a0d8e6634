"""The decode kernel: each program works through its share of the plan, a segment at a time.

A segment is one row tile against a range of its sequence's KV tiles (split_kv/schedule.py).  A row tile that is one piece is
written at once; the pieces of a cut one are partial states (split_kv/workspace.py), which ``merge_partials_kernel`` unites.

Nothing here waits for another program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagedmla.kernels.split_kv.merge import LN2
from pagedmla.kernels.split_kv.schedule import SEGMENT_FIELDS, kv_length
from pagedmla.kernels.triton.attend import attend, attend_causal_end

# arguments that vary from step to step: a compilation for each kind of value would be one too many
STEP_ARGUMENTS = (
    "num_seqs", "num_tokens", "num_pages", "capacity",
    "block_table_stride", "seq_lens_stride", "cu_seqlens_q_stride",
    "out_token_stride", "out_head_stride", "lse_token_stride", "lse_head_stride",
)  # fmt: skip


@triton.jit
def run_segment(
    sequence,
    row_tile,
    tile_begin,
    tile_end,
    slot,
    is_final,
    q_begin,
    q_len,
    batch,
    queries,
    cache,
    outputs,
    partials,
    scale_log2,
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    END_BLOCK_N: tl.constexpr,
    ORDERED: tl.constexpr,
    KEYS_ON_M: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One row tile against KV tiles tile_begin .. tile_end - 1: final rows, or the partial state of ``slot``.

    CAUSAL: rows of a tile may differ in what they see.  It is left out where every sequence has one query token, which sees
    everything: that path has no second loop.
    """
    q_nope, q_token_stride, q_head_stride, q_pe, q_pe_token_stride, q_pe_head_stride = queries
    kv_cache, kv_page_stride, kv_token_stride, num_pages, block_table, table_stride, table_column_stride = (
        cache
    )
    out, out_token_stride, out_head_stride, lse, lse_token_stride, lse_head_stride = outputs
    partial_out, partial_lse = partials
    kv_len = kv_length(sequence, batch)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < q_len * NUM_HEADS
    query = row // NUM_HEADS
    token = (q_begin + query).to(tl.int64)
    head = (row % NUM_HEADS).to(tl.int64)

    column = tl.arange(0, BLOCK_D)
    q_mask = is_row[:, None] & (column < D)[None, :]
    q_latent = tl.load(
        q_nope + (token * q_token_stride + head * q_head_stride)[:, None] + column[None, :],
        mask=q_mask,
        other=0.0,
    )
    if R > 0:
        rope_column = tl.arange(0, BLOCK_R)
        q_rope = tl.load(
            q_pe + (token * q_pe_token_stride + head * q_pe_head_stride)[:, None] + rope_column[None, :],
            mask=is_row[:, None] & (rope_column < R)[None, :],
            other=0.0,
        )
    else:
        q_rope = q_latent

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    c = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_M] if KEYS_ON_M else [BLOCK_M, BLOCK_D], tl.float32)
    # the padding is one row past the table: its length is 0, so the row is never read
    table_row = block_table + sequence.to(tl.int64) * table_stride
    real_end = tl.minimum(tile_end, tl.cdiv(kv_len, BLOCK_N))
    full_end = real_end
    if CAUSAL:
        # the earliest query of the tile sees the least; below that, nothing is hidden from anybody
        seen_by_all = kv_len - q_len + (row_tile * BLOCK_M) // NUM_HEADS + 1
        full_end = tl.minimum(real_end, tl.maximum(seen_by_all, 0) // BLOCK_N)
    acc, m, l, c = attend(
        q_latent, q_rope, (kv_cache, kv_page_stride, kv_token_stride, num_pages, table_row, table_column_stride),
        kv_len, tile_begin, full_end, scale_log2, acc, m, l, c,
        PAGE_SIZE, PACKED, BLOCK_N, D, BLOCK_D, R, BLOCK_R, ORDERED, KEYS_ON_M, WIDEN,
    )  # fmt: skip
    if CAUSAL:
        # bottom-right aligned: query j of n sees keys 0 .. kv_len - n + j
        visible_len = kv_len - q_len + query + 1
        acc, m, l, c = attend_causal_end(
            q_latent, q_rope, (kv_cache, kv_page_stride, kv_token_stride, num_pages, table_row, table_column_stride),
            kv_len, visible_len, tl.maximum(tile_begin, full_end) * BLOCK_N, tl.minimum(real_end * BLOCK_N, kv_len),
            scale_log2, acc, m, l, c,
            PAGE_SIZE, PACKED, END_BLOCK_N, D, BLOCK_D, R, BLOCK_R, ORDERED, KEYS_ON_M, WIDEN,
        )  # fmt: skip

    if RAGGED:
        # query tokens before the first start are nobody's, though the first sequence's row tiles hold them
        nobody = token < tl.load(batch[2])
        l = tl.where(nobody, 0.0, l)
        m = tl.where(nobody, float("-inf"), m)
        acc = tl.where(nobody[None, :] if KEYS_ON_M else nobody[:, None], 0.0, acc)
    # l is 0 only where no key was seen: out is 0 there, and m is -inf
    denominator = tl.where(l == 0.0, 1.0, l)
    lse2 = m + tl.log2(denominator)
    inverse = 1.0 / denominator
    if KEYS_ON_M:
        result = acc * inverse[None, :]
        store_mask = is_row[None, :] & (column < D)[:, None]
    else:
        result = acc * inverse[:, None]
        store_mask = is_row[:, None] & (column < D)[None, :]
    if is_final:
        rows = out + token * out_token_stride + head * out_head_stride
        pointers = rows[None, :] + column[:, None] if KEYS_ON_M else rows[:, None] + column[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty), mask=store_mask)
        tl.store(lse + token * lse_token_stride + head * lse_head_stride, lse2 * LN2, mask=is_row)
    else:
        first_place = slot.to(tl.int64) * BLOCK_M
        in_tile = tl.arange(0, BLOCK_M)
        offsets = in_tile * BLOCK_D
        offsets = offsets[None, :] + column[:, None] if KEYS_ON_M else offsets[:, None] + column[None, :]
        # an empty piece says so by its lse; its rows are never read
        store_mask = store_mask & (tile_begin < real_end)
        tl.store(partial_out + first_place * BLOCK_D + offsets, result, mask=store_mask)
        tl.store(partial_lse + first_place + in_tile, lse2, mask=is_row)


@triton.jit(do_not_specialize=STEP_ARGUMENTS)
def decode_kernel(
    shares,
    segments,
    q_nope,
    q_token_stride: tl.int64,
    q_head_stride: tl.int64,
    q_pe,
    q_pe_token_stride: tl.int64,
    q_pe_head_stride: tl.int64,
    kv_cache,
    kv_page_stride: tl.int64,
    kv_token_stride: tl.int64,
    num_pages,
    block_table,
    block_table_stride: tl.int64,
    block_table_column_stride: tl.int64,
    seq_lens,
    seq_lens_stride: tl.int64,
    cu_seqlens_q,
    cu_seqlens_q_stride: tl.int64,
    num_seqs,
    num_tokens,
    capacity,
    out,
    out_token_stride: tl.int64,
    out_head_stride: tl.int64,
    lse,
    lse_token_stride: tl.int64,
    lse_head_stride: tl.int64,
    partial_out,
    partial_lse,
    scale_log2,
    RAGGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    END_BLOCK_N: tl.constexpr,
    ORDERED: tl.constexpr,
    KEYS_ON_M: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Grid (programs of the plan).

    The plan comes from memory, at addresses that depend on the program alone: what is read there is known to be the same
    for all threads, and stays out of their registers.  Worked out in here, it cost a third of the speed.  OVERLAPPED: the
    launch did not wait for the planning kernel, nor does the next one for this.
    """
    batch = (
        seq_lens,
        seq_lens_stride,
        cu_seqlens_q,
        cu_seqlens_q_stride,
        num_seqs,
        num_tokens,
        0,
        NUM_HEADS,
        capacity,
    )
    queries = (q_nope, q_token_stride, q_head_stride, q_pe, q_pe_token_stride, q_pe_head_stride)
    cache = (
        kv_cache, kv_page_stride, kv_token_stride, num_pages,
        block_table, block_table_stride, block_table_column_stride,
    )  # fmt: skip
    outputs = (out, out_token_stride, out_head_stride, lse, lse_token_stride, lse_head_stride)
    partials = (partial_out, partial_lse)
    if OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    share = shares + 2 * tl.program_id(0)
    for index in range(tl.load(share), tl.load(share + 1)):
        segment = segments + index * SEGMENT_FIELDS
        run_segment(
            tl.load(segment), tl.load(segment + 1), tl.load(segment + 2), tl.load(segment + 3), tl.load(segment + 4),
            tl.load(segment + 5) == 1, tl.load(segment + 6), tl.load(segment + 7),
            batch, queries, cache, outputs, partials, scale_log2,
            RAGGED, CAUSAL, NUM_HEADS, PAGE_SIZE, PACKED, D, BLOCK_D, R, BLOCK_R,
            BLOCK_M, BLOCK_N, END_BLOCK_N, ORDERED, KEYS_ON_M, WIDEN,
        )  # fmt: skip
