"""Faults of kind PAGE: the block table, its units, and what lies in the last page."""

from __future__ import annotations

import torch
from conformance.mutants.kernel import Kernel
from conformance.mutants.work import Item
from torch import Tensor


class LastPageLenIsSeqLen(Kernel):
    """The last page is said to hold the whole sequence (vllm #31282)."""

    kind = "PAGE"

    def last_page_len(self, seq_len: int) -> int:
        return seq_len


class LastPageTakenAsFull(Kernel):
    """Lengths are rounded up to pages."""

    kind = "PAGE"

    def last_page_len(self, seq_len: int) -> int:
        return self.page_size


class LastPageLenIsTheRemainder(Kernel):
    """A last page that is full is said to hold nothing: seq_len % page_size without the two ones."""

    kind = "PAGE"

    def last_page_len(self, seq_len: int) -> int:
        return seq_len % self.page_size


class CurrentTokenLeftOut(Kernel):
    """seq_lens is thought to leave out this step's token."""

    kind = "PAGE"

    def length_of(self, seq_len: int) -> int:
        return super().length_of(seq_len - 1)


class TableWidthIsPoolSize(Kernel):
    """A row of the table is thought to have a cell for every page of the pool (cutlass #2221)."""

    kind = "PAGE"

    def pages_of(self, item: Item, keys: Tensor) -> tuple[Tensor, Tensor]:
        cells = item.sequence * self.args.cache.shape[0] + keys // self.page_size
        # the table's last cell instead of a fault: what lies behind it in a real pool of memory is anybody's
        return self.args.table.reshape(-1)[
            cells.clamp(max=self.args.table.numel() - 1)
        ].long(), keys % self.page_size


class PageIdsInOrder(Kernel):
    """The first page of a sequence is looked up, the others are thought to follow it (flashinfer #3219)."""

    kind = "PAGE"

    def pages_of(self, item: Item, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.args.table[item.sequence, 0] + keys // self.page_size, keys % self.page_size


class PageIdsTakenAsTokens(Kernel):
    """A page id meets the stride of a token (sglang #25556): right for pages of one token."""

    kind = "PAGE"

    def offsets(self, pages: Tensor, slots: Tensor) -> Tensor:
        return (pages + slots) * self.args.cache.stride(1)


class PagesCutAt128(Kernel):
    """A page that is larger than the kernel's tile is read again from its start (flashinfer #4347)."""

    kind = "PAGE"

    def offsets(self, pages: Tensor, slots: Tensor) -> Tensor:
        return super().offsets(pages, slots % 128)


class TableOfRequestZero(Kernel):
    """Every sequence is looked up in the first row of the table."""

    kind = "PAGE"

    def pages_of(self, item: Item, keys: Tensor) -> tuple[Tensor, Tensor]:
        return self.args.table[0][keys // self.page_size].long(), keys % self.page_size


class NeighbourColumnAtPageEdges(Kernel):
    """The column is rounded to the nearest: keys of a page's second half come from the next page."""

    kind = "PAGE"

    def pages_of(self, item: Item, keys: Tensor) -> tuple[Tensor, Tensor]:
        last = (self.plan.lengths[item.sequence] - 1) // self.page_size
        columns = torch.clamp((keys + self.page_size // 2) // self.page_size, max=last)
        return self.args.table[item.sequence][columns].long(), keys % self.page_size


FAULTS = (
    LastPageLenIsSeqLen,
    LastPageTakenAsFull,
    LastPageLenIsTheRemainder,
    CurrentTokenLeftOut,
    TableWidthIsPoolSize,
    PageIdsInOrder,
    PageIdsTakenAsTokens,
    PagesCutAt128,
    TableOfRequestZero,
    NeighbourColumnAtPageEdges,
)
