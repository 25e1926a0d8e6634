"""A call in the forms that other projects take it in."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedmla.conformance.builder import Call


def by_sequence(call: Call) -> Tensor:
    """The queries of an even batch, [num_seqs, q_len, H, head_dim_qk], a view."""
    num_seqs = call.seq_lens.shape[0]
    return call.q.unflatten(0, (num_seqs, call.q.shape[0] // num_seqs))


def query_starts(call: Call) -> Tensor:
    """i32 [num_seqs + 1]: the first query row of each sequence, and the end; the call's own tensor where it has one."""
    if call.cu_seqlens_q is not None:
        return call.cu_seqlens_q
    num_seqs = call.seq_lens.shape[0]
    counting = torch.arange(num_seqs + 1, dtype=torch.int32, device=call.seq_lens.device)
    return counting * (call.q.shape[0] // num_seqs)


class PageLists:
    """A call's block table as lists of pages (CSR), at fixed addresses and of fixed size.

    Attributes:
        kv_indptr: i32 [num_seqs + 1], where each sequence's pages start.
        kv_indices: i32, room for every cell of the block table; 0 past the last page, as engines leave stale ids there.
        kv_last_page_len: i32 [num_seqs], tokens, 1 .. page_size.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        num_seqs, device = call.seq_lens.shape[0], call.seq_lens.device
        self.kv_indptr = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
        self.kv_indices = torch.zeros(max(1, call.block_table.numel()), dtype=torch.int32, device=device)
        self.kv_last_page_len = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        self.refresh()

    def refresh(self) -> None:
        """Brings what the call's tensors hold now."""
        starts, pages, last = self._call.csr()
        self.kv_indptr.copy_(starts)
        self.kv_indices[: len(pages)].copy_(pages)
        # without a page, (pages - 1) * page_size + last is 0 where last is a whole page
        self.kv_last_page_len.copy_(torch.where(last == 0, self._call.page_size, last))
