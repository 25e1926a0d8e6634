"""AITER's page lists (CSR) as the block table and lengths of our decode, without reading the device.

Request b has the pages kv_indices[kv_indptr[b] : kv_indptr[b + 1]], and (pages - 1) * page_size + kv_last_page_lens[b] tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from pagedmla.contract.errors import InvalidArgument, Unsupported

_INT32_MAX = 2**31 - 1


class PagedKV(NamedTuple):
    """``block_table`` i32 [num_seqs, max_pages] and ``seq_lens`` i32 [num_seqs] in tokens."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor


def page_ranges(kv_indptr: torch.Tensor, num_indices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First page and number of pages of each request, i32 [num_seqs] each, bounded so that all lie in ``kv_indices``.

    Args:
        kv_indptr: i32 [num_seqs + 1], pages, any values.
        num_indices: length of ``kv_indices``.
    """
    bounded = kv_indptr.clamp(0, num_indices)
    starts = bounded[:-1]
    return starts, (bounded[1:] - starts).clamp_(min=0)


def token_counts(num_pages: torch.Tensor, kv_last_page_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Tokens of each request, i64 [num_seqs]; 0 for one without pages.

    Args:
        num_pages: i32 [num_seqs], >= 0.
        kv_last_page_lens: i32 [num_seqs], tokens; bounded to 1..page_size, so that a wrong one never leads past the last page.
        page_size: tokens in a page.
    """
    last = kv_last_page_lens.clamp(1, page_size)
    # without pages this is last - page_size, which is not above 0
    return ((num_pages.to(torch.int64) - 1) * page_size + last).clamp_(0, _INT32_MAX)


def block_table_of(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    page_size: int,
    max_pages: int | None = None,
) -> PagedKV:
    """The block table that says the same as a CSR list of pages.  Nothing waits for the device.

    Args:
        kv_indptr: i32 [num_seqs + 1], pages.
        kv_indices: i32 [at least kv_indptr[-1]], page ids.
        kv_last_page_lens: i32 [num_seqs], tokens.
        page_size: tokens in a page.
        max_pages: most pages of one request: the table's width, which a device does not tell without being read.  Left out:
            ``len(kv_indices)``, hence num_seqs * len(kv_indices) cells of 8 bytes, half of them for the time of the call.
            On a CPU, whose values are at hand, the exact number.

    Raises:
        Unsupported: ``max_pages`` was left out and the table would have more than 2**31 - 1 cells.
    """
    num_seqs, num_indices = kv_last_page_lens.shape[0], kv_indices.shape[0]
    starts, num_pages = page_ranges(kv_indptr, num_indices)
    width = _width(num_pages, num_indices, max_pages)
    if num_seqs * width > _INT32_MAX:
        wanted = f"the most pages of one request, so that {num_seqs} times that is below 2**31"
        raise Unsupported("max_pages", "max_pages", wanted, f"{max_pages}, with {num_indices} kv_indices")
    num_pages = num_pages.clamp(max=width)
    seq_lens = token_counts(num_pages, kv_last_page_lens, page_size).to(torch.int32)
    # start + column may pass 32 bits only where the list itself has half as many cells
    dtype = torch.int32 if 2 * num_indices <= _INT32_MAX else torch.int64
    columns = torch.arange(width, dtype=dtype, device=kv_indices.device)
    cells = (starts.to(dtype)[:, None] + columns).clamp_(max=num_indices - 1)
    # cells past a request's pages hold the next request's: they lead nowhere, as the contract says of a table
    return PagedKV(kv_indices.index_select(0, cells.flatten()).view(num_seqs, width), seq_lens)


def check_pages(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    page_size: int,
    max_pages: int | None,
) -> None:
    """Reads the page lists and reports the first value out of range; for debugging, it waits for the device.

    Raises:
        InvalidArgument: ``kv_indptr`` falls or leaves ``kv_indices``; a request has more than ``max_pages`` pages, or a last
            page length outside 1..page_size.
    """
    last_lens = kv_last_page_lens.tolist()
    for request, (start, stop) in enumerate(pairwise(kv_indptr.tolist())):
        if not 0 <= start <= stop <= kv_indices.shape[0]:
            wanted = f"page starts that never fall, from 0 to at most len(kv_indices) = {kv_indices.shape[0]}"
            raise InvalidArgument("kv_indptr", "kv_indptr", wanted, f"{start}..{stop} for sequence {request}")
        if max_pages is not None and stop - start > max_pages:
            got = f"{stop - start} for sequence {request}"
            raise InvalidArgument("max_pages", "kv_indptr", f"at most max_pages = {max_pages} pages", got)
        if stop > start and not 1 <= last_lens[request] <= page_size:
            wanted = f"1..page_size = {page_size} tokens in the last page"
            got = f"{last_lens[request]} for sequence {request}"
            raise InvalidArgument("last_page_len", "kv_last_page_lens", wanted, got)


def _width(num_pages: torch.Tensor, num_indices: int, max_pages: int | None) -> int:
    if max_pages is not None:
        return min(max_pages, num_indices)
    if num_pages.device.type == "cpu":
        return max(num_pages.tolist(), default=0)
    return num_indices
