"""A step's metadata in buffers that never move: what an engine hands to a kernel under a captured graph.

The buffers are made once, as large as the capacities say.  A step copies its lengths and tables into them, in stream order,
without allocating and without reading the device.  Rows past the step's sequences are inert: length 0, no query tokens, no
pages.  Cells of a table past a sequence's pages keep what they held, which the contract allows.

    manager's table [num_seqs, max_pages] --expand--> kernel's table --compact--> kv_indptr, kv_indices, kv_last_page_len
"""

from __future__ import annotations

from itertools import pairwise

import torch

from pagedmla.contract.errors import InvalidArgument, PlanMismatch
from pagedmla.contract.problem import BatchBounds
from pagedmla.paging import device_kernels
from pagedmla.paging.csr import expand_block_table, last_page_len, pages_ratio

_INT32_MAX = 2**31 - 1


class DecodeMetadata:
    """Persistent block table, lengths, query starts and, if asked for, the CSR form of the same.

    Attributes:
        block_table: i32 [max_num_seqs, max_pages * ratio], in kernel pages.
        seq_lens: i32 [max_num_seqs], tokens; 0 past the step's sequences.
        cu_seqlens_q: i32 [max_num_seqs + 1], query tokens; the last value repeats past the step's sequences.
        kv_indptr: i32 [max_num_seqs + 1], kernel pages; the last value repeats (``csr=True`` only).
        kv_indices: i32 [max_num_seqs * max_pages * ratio]; what stands past kv_indptr[-1] may be anything, and is never read.
        kv_last_page_len: i32 [max_num_seqs], tokens.  With one-token kernel pages a buffer of ones, filled here and never
            again: each page holds one token, whatever the sequence's length.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor

    def __init__(
        self,
        bounds: BatchBounds,
        page_size: int,
        *,
        kernel_page_size: int | None = None,
        csr: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        """Makes the buffers.

        Args:
            bounds: capacities; ``max_pages_per_seq`` counts the manager's pages.
            page_size: tokens in a page of the manager that makes the block tables.
            kernel_page_size: tokens in a page of the kernel, a divisor of ``page_size``; left out: the same.
            csr: whether the CSR form is kept too.
            device: where the buffers live.

        Raises:
            InvalidArgument: a page size that does not divide, or more page slots than an i32 index can count.
        """
        self.bounds = bounds
        self.page_size = page_size
        self.kernel_page_size = page_size if kernel_page_size is None else kernel_page_size
        self.device = torch.device(device)
        ratio = pages_ratio(page_size, self.kernel_page_size)
        width = bounds.max_pages_per_seq * ratio
        if bounds.max_num_seqs * width > _INT32_MAX:
            got = f"{bounds.max_num_seqs} x {width}"
            raise InvalidArgument("capacity", "bounds", f"max_num_seqs * kernel pages <= {_INT32_MAX}", got)
        self.block_table = torch.full((bounds.max_num_seqs, width), -1, dtype=torch.int32, device=self.device)
        self.seq_lens = self._zeros(bounds.max_num_seqs)
        self.cu_seqlens_q = self._zeros(bounds.max_num_seqs + 1)
        self._sequence_numbers = torch.arange(bounds.max_num_seqs + 1, dtype=torch.int32, device=self.device)
        self._parts = torch.arange(ratio, dtype=torch.int32, device=self.device)
        self._has_csr = csr
        self._kernels = device_kernels.kernels_for(self.device)
        if csr:
            self._make_csr_buffers(width)

    @property
    def max_num_seqs(self) -> int:
        """Capacity in sequences."""
        return self.bounds.max_num_seqs

    def update(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        *,
        q_len: int = 1,
    ) -> None:
        """Copies a step into the buffers.  Stream-ordered; no allocation; no device value is read on the host.

        Args:
            block_table: i32 [num_seqs, width] in the manager's pages; width <= max_pages_per_seq.
            seq_lens: i32 [num_seqs], tokens, this step's included.
            cu_seqlens_q: i32 [num_seqs + 1]; left out: ``q_len`` query tokens for every sequence.
            q_len: query tokens of every sequence when ``cu_seqlens_q`` is left out.

        Raises:
            InvalidArgument: a wrong rank, dtype, device or length.
            PlanMismatch: more sequences or a wider table than the capacities; nothing was copied.
        """
        num_seqs = self._check_step(block_table, seq_lens, cu_seqlens_q)
        if isinstance(q_len, bool) or not isinstance(q_len, int) or not 0 <= q_len * num_seqs <= _INT32_MAX:
            raise InvalidArgument("q_len", "q_len", "a whole number >= 0 whose sum is an int32", repr(q_len))
        cells = self.block_table[:num_seqs, : block_table.shape[1] * self._parts.shape[0]]
        expand_block_table(block_table, self.page_size, self.kernel_page_size, out=cells, parts=self._parts)
        self.seq_lens[:num_seqs].copy_(seq_lens)
        self.seq_lens[num_seqs:].zero_()
        if cu_seqlens_q is None:
            torch.clamp(self._sequence_numbers, max=num_seqs, out=self.cu_seqlens_q).mul_(q_len)
        else:
            self.cu_seqlens_q[: num_seqs + 1].copy_(cu_seqlens_q)
            self.cu_seqlens_q[num_seqs + 1 :].copy_(cu_seqlens_q[-1:].expand(self.max_num_seqs - num_seqs))
        if self._has_csr:
            self._update_csr(num_seqs)

    def _check_step(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None
    ) -> int:
        given = [("block_table", block_table, 2), ("seq_lens", seq_lens, 1)]
        if cu_seqlens_q is not None:
            given.append(("cu_seqlens_q", cu_seqlens_q, 1))
        for name, tensor, rank in given:
            if not isinstance(tensor, torch.Tensor):
                raise InvalidArgument("type", name, "a tensor", type(tensor).__name__)
            if tensor.dim() != rank or tensor.dtype != torch.int32:
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise InvalidArgument("rank_or_dtype", name, f"an int32 tensor of {rank} dimensions", got)
            if tensor.device.type != self.device.type or (
                tensor.is_cuda and tensor.device != self.block_table.device
            ):
                raise InvalidArgument(
                    "device", name, f"a tensor on {self.block_table.device}", str(tensor.device)
                )
        num_seqs = seq_lens.shape[0]
        if block_table.shape[0] != num_seqs:
            raise InvalidArgument(
                "num_seqs", "block_table", f"[{num_seqs}, pages], as seq_lens", str(tuple(block_table.shape))
            )
        if cu_seqlens_q is not None and cu_seqlens_q.shape[0] != num_seqs + 1:
            raise InvalidArgument(
                "num_seqs", "cu_seqlens_q", f"[{num_seqs + 1}]", str(tuple(cu_seqlens_q.shape))
            )
        if num_seqs > self.max_num_seqs:
            raise PlanMismatch(
                "max_num_seqs", "seq_lens", f"at most {self.max_num_seqs} sequences", str(num_seqs)
            )
        if block_table.shape[1] > self.bounds.max_pages_per_seq:
            wanted = f"at most {self.bounds.max_pages_per_seq} pages a sequence"
            raise PlanMismatch("max_pages_per_seq", "block_table", wanted, str(block_table.shape[1]))
        return num_seqs

    @property
    def _lengths_on_host(self) -> bool:
        """Whether reading a length waits for nobody."""
        return self.device.type == "cpu"

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _make_csr_buffers(self, width: int) -> None:
        capacity = self.max_num_seqs * width
        self.kv_indptr = self._zeros(self.max_num_seqs + 1)
        self.kv_indices = self._zeros(capacity)
        self.kv_last_page_len = torch.ones(self.max_num_seqs, dtype=torch.int32, device=self.device)
        if self._kernels is not None:
            # what is compiled and loaded here need not be while a graph is captured
            self._run_kernels(self._kernels, self.max_num_seqs)
            return
        self._num_pages = self._zeros(self.max_num_seqs)
        if not self._lengths_on_host:
            # one spare cell takes the writes of table cells that are no pages
            self._indices_and_spare = self._zeros(capacity + 1)
            self.kv_indices = self._indices_and_spare[:capacity]
            self._columns = torch.arange(width, device=self.device)
            self._cell_target = torch.empty(self.max_num_seqs, width, dtype=torch.int64, device=self.device)
            self._cell_unused = torch.empty(self.max_num_seqs, width, dtype=torch.bool, device=self.device)
            # an inclusive scan along the rows of a matrix needs no temporary storage, one along a vector does
            self._scan = torch.zeros(2, self.max_num_seqs, dtype=torch.int32, device=self.device)
            self._scanned = torch.zeros_like(self._scan)

    def _run_kernels(self, kernels: device_kernels.PagingKernels, num_seqs: int) -> None:
        # with one-token pages the buffer of ones is right already
        last = self.kv_last_page_len if self.kernel_page_size > 1 else None
        kernels.block_table_to_csr(
            self.block_table,
            self.seq_lens,
            self.kernel_page_size,
            num_seqs,
            self.kv_indptr,
            self.kv_indices,
            last,
        )

    def _update_csr(self, num_seqs: int) -> None:
        if self._kernels is not None:
            self._run_kernels(self._kernels, num_seqs)
            return
        if self.kernel_page_size > 1:
            last_page_len(self.seq_lens, self.kernel_page_size, out=self.kv_last_page_len)
        # a length that the table cannot hold, or a negative one, must not lead past the buffers, nor past 32 bits
        capacity = self.block_table.shape[1] * self.kernel_page_size
        largest = min(capacity, _INT32_MAX - self.kernel_page_size)
        torch.clamp(self.seq_lens, 0, largest, out=self._num_pages).add_(self.kernel_page_size - 1)
        self._num_pages.div_(self.kernel_page_size, rounding_mode="floor")
        if self._lengths_on_host:
            torch.cumsum(self._num_pages, 0, dtype=torch.int32, out=self.kv_indptr[1:])
            self._compact_on_host(num_seqs)
        else:
            self._scan[0].copy_(self._num_pages)
            torch.cumsum(self._scan, 1, dtype=torch.int32, out=self._scanned)
            self.kv_indptr[1:].copy_(self._scanned[0])
            self._compact_on_device(num_seqs)

    def _compact_on_host(self, num_seqs: int) -> None:
        starts = self.kv_indptr[: num_seqs + 1].tolist()
        for sequence, (start, stop) in enumerate(pairwise(starts)):
            self.kv_indices[start:stop].copy_(self.block_table[sequence, : stop - start])

    def _compact_on_device(self, num_seqs: int) -> None:
        target, unused = self._cell_target[:num_seqs], self._cell_unused[:num_seqs]
        torch.add(self.kv_indptr[:num_seqs, None], self._columns, out=target)
        torch.ge(self._columns, self._num_pages[:num_seqs, None], out=unused)
        target.masked_fill_(unused, self._indices_and_spare.shape[0] - 1)
        self._indices_and_spare.scatter_(0, target.view(-1), self.block_table[:num_seqs].view(-1))
