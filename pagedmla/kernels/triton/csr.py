"""Block table and lengths in CSR form: two launches, whatever the batch.

index_pages_kernel   lengths -> kv_indptr, kv_last_page_len     one program, a prefix sum over blocks of sequences
compact_kernel       block table -> kv_indices                  grid (sequence, blocks of its columns): live cells only
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_SEQUENCES = 1024
_BLOCK_CELLS = 1024
# programs that share one sequence's cells: enough for 65,536 pages in one go, and few for a wide table of short sequences
_MAX_BLOCKS = 64


@triton.jit(do_not_specialize=("num_seqs", "seq_lens_stride", "page_size", "largest"))
def index_pages_kernel(
    seq_lens,
    kv_indptr,
    kv_last_page_len,
    num_seqs,
    seq_lens_stride: tl.int64,
    page_size,
    largest,
    WRITE_LAST_PAGE_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (1,).  A length is taken as one in 0 .. largest, tokens; largest + page_size - 1 is an int32."""
    tl.store(kv_indptr, 0)
    before = 0
    first = 0
    while first < num_seqs:
        sequence = first + tl.arange(0, BLOCK)
        exists = sequence < num_seqs
        length = tl.load(seq_lens + sequence.to(tl.int64) * seq_lens_stride, mask=exists, other=0)
        num_pages = (tl.minimum(tl.maximum(length, 0), largest) + (page_size - 1)) // page_size
        through = before + tl.cumsum(num_pages, 0)
        tl.store(kv_indptr + 1 + sequence, through, mask=exists)
        before += tl.sum(num_pages, 0)
        if WRITE_LAST_PAGE_LEN:
            # ((length - 1) mod page_size) + 1 for a remainder that has the length's sign
            rest = length % page_size
            tl.store(kv_last_page_len + sequence, tl.where(rest <= 0, rest + page_size, rest), mask=exists)
        first += BLOCK


@triton.jit
def compact_kernel(
    block_table,
    kv_indptr,
    kv_indices,
    block_table_stride: tl.int64,
    BLOCK: tl.constexpr,
):
    """Grid (num_seqs, blocks).  A program takes every ``blocks``-th block of its sequence's live cells."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(kv_indptr + sequence)
    num_pages = tl.load(kv_indptr + sequence + 1) - start
    cells = block_table + sequence * block_table_stride
    target = kv_indices + start
    first = tl.program_id(1) * BLOCK
    while first < num_pages:
        column = first + tl.arange(0, BLOCK)
        live = column < num_pages
        tl.store(target + column, tl.load(cells + column, mask=live, other=0), mask=live)
        first += tl.num_programs(1) * BLOCK


def block_table_to_csr(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    num_seqs: int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
) -> None:
    """Writes the CSR form of a step.  No allocation, no sync; capturable.

    A length past the table's width counts as the width, a negative one as 0.  What ``kv_indices`` holds past kv_indptr[-1]
    stays as it was.

    Args:
        block_table: i32 [max_num_seqs, max_pages], inner stride 1; max_num_seqs * max_pages is an int32.
        seq_lens: i32 [max_num_seqs], tokens; 0 from ``num_seqs`` on.
        page_size: tokens in a page of the table.
        num_seqs: sequences of the step; the cells of later rows are not looked at.
        kv_indptr: i32 [max_num_seqs + 1], contiguous; written whole.
        kv_indices: i32 [max_num_seqs * max_pages], contiguous.
        kv_last_page_len: i32 [max_num_seqs], contiguous, written whole: in 1..page_size; or None to leave it out.
    """
    max_num_seqs, width = block_table.shape
    # a length that the table cannot hold must not lead past the buffers, nor past 32 bits
    largest = min(width * page_size, 2**31 - 1 - page_size)
    with torch.cuda.device_of(block_table):
        index_pages_kernel[(1,)](
            seq_lens,
            kv_indptr,
            kv_indptr if kv_last_page_len is None else kv_last_page_len,
            max_num_seqs,
            seq_lens.stride(0),
            page_size,
            largest,
            WRITE_LAST_PAGE_LEN=kv_last_page_len is not None,
            BLOCK=_BLOCK_SEQUENCES,
        )
        if num_seqs > 0 and width > 0:
            blocks = min(_MAX_BLOCKS, triton.cdiv(width, _BLOCK_CELLS))
            compact_kernel[(num_seqs, blocks)](
                block_table, kv_indptr, kv_indices, block_table.stride(0), BLOCK=_BLOCK_CELLS
            )
