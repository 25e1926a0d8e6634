"""Two ways to say where a sequence's pages are, and the way between them.

Block table: i32 [num_seqs, max_pages] with ``seq_lens``; row b's first ceil(seq_lens[b] / page_size) cells are its pages.
CSR: ``kv_indptr`` i32 [num_seqs + 1], ``kv_indices`` i32 [num_pages_in_use], ``kv_last_page_len`` i32 [num_seqs]; sequence b's
pages are kv_indices[kv_indptr[b] : kv_indptr[b + 1]].  All indices count PAGES of ``page_size`` tokens, all lengths TOKENS.

These functions allocate what they return and read lengths on the host; an engine's step uses
``pagedmla.paging.metadata.DecodeMetadata``, which does neither.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from pagedmla.contract.errors import InvalidArgument


class CSR(NamedTuple):
    """``kv_indptr`` i32 [num_seqs + 1], ``kv_indices`` i32 [pages], ``kv_last_page_len`` i32 [num_seqs]."""

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor


def last_page_len(seq_lens: torch.Tensor, page_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens in each sequence's last page: ``((seq_len - 1) mod page_size) + 1``, always in 1..page_size.

    A sequence of 127 tokens on one-token pages has 1 token in its last page, not 127.  An empty sequence has no last page;
    the formula's value, ``page_size``, stands there.

    Args:
        seq_lens: i32 [num_seqs], tokens.
        page_size: tokens in a page.
        out: i32 [num_seqs] to write into; no memory is allocated then.
    """
    _check_page_size("page_size", page_size)
    return torch.sub(seq_lens, 1, out=out).remainder_(page_size).add_(1)


def expand_block_table(
    block_table: torch.Tensor,
    page_size: int,
    kernel_page_size: int,
    out: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same pages in smaller units: page p becomes ``ratio`` kernel pages, p * ratio .. p * ratio + ratio - 1.

    A cell that is no page (-1) becomes negative cells.

    Args:
        block_table: i32 [num_seqs, max_pages], in pages of ``page_size`` tokens.
        page_size: tokens in a page of the manager that made the table.
        kernel_page_size: tokens in a page of the kernel that reads it; divides ``page_size``.
        out: i32 [num_seqs, max_pages * ratio] to write into.
        parts: i32 [ratio], the numbers 0 .. ratio - 1.  With it and ``out`` no memory is allocated.

    Raises:
        InvalidArgument: ``kernel_page_size`` does not divide ``page_size``.
    """
    ratio = pages_ratio(page_size, kernel_page_size)
    num_seqs, width = block_table.shape
    if out is None:
        out = torch.empty(num_seqs, width * ratio, dtype=torch.int32, device=block_table.device)
    if width == 0:
        return out
    if ratio == 1:
        return out.copy_(block_table)
    if parts is None:
        parts = torch.arange(ratio, dtype=torch.int32, device=block_table.device)
    cells = out.unflatten(1, (width, ratio))
    cells.copy_(block_table.unsqueeze(-1))
    cells.mul_(ratio).add_(parts)
    return out


def block_table_to_csr(block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> CSR:
    """Block table and lengths in CSR form.

    Args:
        block_table: i32 [num_seqs, max_pages]; cells past a sequence's end are not looked at.
        seq_lens: i32 [num_seqs], tokens.
        page_size: tokens in a page, of table and CSR alike.

    Raises:
        InvalidArgument: a length below zero or past the table's width, or mismatched shapes.
    """
    _check_page_size("page_size", page_size)
    if seq_lens.dtype != torch.int32 or block_table.dtype != torch.int32:
        got = f"{block_table.dtype} and {seq_lens.dtype}"
        raise InvalidArgument("dtype", "block_table and seq_lens", "int32 tensors", got)
    if block_table.dim() != 2 or seq_lens.dim() != 1 or block_table.shape[0] != seq_lens.shape[0]:
        got = f"{tuple(block_table.shape)} and {tuple(seq_lens.shape)}"
        raise InvalidArgument(
            "num_seqs", "block_table", "[num_seqs, max_pages] beside seq_lens [num_seqs]", got
        )
    capacity = block_table.shape[1] * page_size
    for sequence, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= capacity:
            raise InvalidArgument(
                "seq_len", "seq_lens", f"0..{capacity} tokens", f"{length} for sequence {sequence}"
            )
    num_pages = (seq_lens.to(torch.int64) + (page_size - 1)) // page_size
    indptr = torch.zeros(seq_lens.shape[0] + 1, dtype=torch.int32, device=seq_lens.device)
    torch.cumsum(num_pages, 0, dtype=torch.int32, out=indptr[1:])
    live = torch.arange(block_table.shape[1], device=seq_lens.device) < num_pages[:, None]
    return CSR(indptr, block_table[live].to(torch.int32), last_page_len(seq_lens, page_size))


def csr_to_block_table(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    page_size: int,
    max_pages: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CSR form as a block table and lengths.

    Args:
        kv_indptr: i32 [num_seqs + 1], starts at 0 and never falls.
        kv_indices: i32 [at least kv_indptr[-1]], page ids.
        kv_last_page_len: i32 [num_seqs], tokens, in 1..page_size for a sequence that has pages.
        page_size: tokens in a page.
        max_pages: width of the table; left out: the most pages of one sequence.

    Returns:
        block_table i32 [num_seqs, max_pages], unused cells -1; seq_lens i32 [num_seqs].

    Raises:
        InvalidArgument: an indptr that falls, does not start at 0 or runs past ``kv_indices``; a last page length outside
            1..page_size; a sequence with more than ``max_pages`` pages.
    """
    _check_page_size("page_size", page_size)
    starts = kv_indptr.tolist()
    num_seqs = len(starts) - 1
    if num_seqs < 0 or kv_last_page_len.shape != (num_seqs,):
        got = f"kv_indptr {tuple(kv_indptr.shape)}, kv_last_page_len {tuple(kv_last_page_len.shape)}"
        raise InvalidArgument(
            "num_seqs", "kv_indptr", "[num_seqs + 1] beside kv_last_page_len [num_seqs]", got
        )
    counts = [stop - start for start, stop in pairwise(starts)]
    if starts[0] != 0 or min(counts, default=0) < 0 or starts[-1] > kv_indices.shape[0]:
        wanted = f"a rising sequence from 0 to at most len(kv_indices) = {kv_indices.shape[0]}"
        raise InvalidArgument("kv_indptr", "kv_indptr", wanted, _shorten(starts))
    width = max(counts, default=0) if max_pages is None else max_pages
    lengths = []
    for sequence, (count, last) in enumerate(zip(counts, kv_last_page_len.tolist(), strict=True)):
        if count > width:
            raise InvalidArgument(
                "max_pages", "kv_indptr", f"at most {width} pages", f"{count} for sequence {sequence}"
            )
        if count and not 1 <= last <= page_size:
            raise InvalidArgument(
                "last_page_len",
                "kv_last_page_len",
                f"1..{page_size} tokens",
                f"{last} for sequence {sequence}",
            )
        lengths.append((count - 1) * page_size + last if count else 0)
    device = kv_indptr.device
    columns = torch.arange(width, device=device)
    live = columns < torch.tensor(counts, device=device).reshape(num_seqs, 1)
    table = torch.full((num_seqs, width), -1, dtype=torch.int32, device=device)
    table[live] = kv_indices[: starts[-1]].to(torch.int32)
    return table, torch.tensor(lengths, dtype=torch.int32, device=device)


def pages_ratio(page_size: int, kernel_page_size: int) -> int:
    """Kernel pages in a manager's page.

    Raises:
        InvalidArgument: it is not a whole number.
    """
    _check_page_size("page_size", page_size)
    _check_page_size("kernel_page_size", kernel_page_size)
    if page_size % kernel_page_size:
        wanted = f"a divisor of the manager's page_size {page_size}"
        raise InvalidArgument("kernel_page_size", "kernel_page_size", wanted, str(kernel_page_size))
    return page_size // kernel_page_size


def _check_page_size(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument("page_size", name, "a whole number >= 1", repr(value))


def _shorten(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"{numbers[:4]} .. {numbers[-2:]} ({len(numbers)} numbers)"
