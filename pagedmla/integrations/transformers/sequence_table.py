"""Which pages each row of a batch holds, on the host: one table for all layers, since they all see the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagedmla.contract.errors import InvalidArgument
from pagedmla.paging.page_allocator import PageAllocator


@dataclass(frozen=True)
class Appended:
    """Where a step's new tokens go.

    Attributes:
        page_copies: (from, to) pages that every layer must copy before it writes: shared pages that stopped
            being shared.
        slot_mapping: i64 [num_rows * num_new] on the host, page * page_size + offset; -1 for padding, which
            is not stored.
        visible: i32 [num_rows, num_new] on the host, how many stored tokens of its row each new token sees,
            itself included.
    """

    page_copies: list[tuple[int, int]]
    slot_mapping: torch.Tensor
    visible: torch.Tensor


class SequenceTable:
    """Pages and lengths of every row of a batch.

    Pages are reference-counted, so rows that came from one another (beams, repeated prompts) share them.  A
    shared page is copied only when a row is about to write into it, which can only happen to its last, partly
    filled one.

    Two lengths are kept apart: what Transformers has shown (padding included, the same for all rows), and
    what is stored (padding left out, each row its own).

    Args:
        page_size: tokens in a page.
        num_pages: pages to begin with; more are added when they run out.
    """

    def __init__(self, page_size: int, num_pages: int = 0) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.pages: list[list[int]] = []
        self.lengths: list[int] = []
        self.shown_length = 0
        # bool [num_rows, shown_length]: which shown tokens were real; None as long as all were
        self._real: torch.Tensor | None = None
        self._block_table: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return len(self.pages)

    @property
    def max_length(self) -> int:
        """Stored tokens of the longest row."""
        return max(self.lengths, default=0)

    @property
    def num_stored_tokens(self) -> int:
        """Tokens that lie in the pool; those of a page that several rows share count once."""
        filled: dict[int, int] = {}
        for pages, length in zip(self.pages, self.lengths, strict=True):
            for index, page in enumerate(pages):
                here = min(self.page_size, length - index * self.page_size)
                filled[page] = max(here, filled.get(page, 0))
        return sum(filled.values())

    def block_table(self) -> torch.Tensor:
        """i32 [num_rows, max_pages] on the host; cells past a row's end are -1."""
        if self._block_table is None:
            width = max([1, *(len(pages) for pages in self.pages)])
            padded = [pages + [-1] * (width - len(pages)) for pages in self.pages]
            self._block_table = torch.tensor(padded, dtype=torch.int32)
        return self._block_table

    @property
    def real(self) -> torch.Tensor | None:
        """bool [num_rows, shown_length] on the host, False where the token shown was padding; None: none was."""
        return self._real

    def append(self, num_rows: int, num_new: int, real: torch.Tensor | None) -> Appended:
        """Gives ``num_new`` shown tokens of each row their slots.

        Args:
            num_rows: rows of the batch.
            num_new: tokens shown to each row.
            real: bool [num_rows, num_new] on the host, False for padding; None: all real.

        Raises:
            InvalidArgument: another number of rows than the table holds.
        """
        if not self.pages:
            self.pages = [[] for _ in range(num_rows)]
            self.lengths = [0] * num_rows
        if num_rows != self.num_rows:
            wanted = f"{self.num_rows} rows, as the cache holds (or batch_repeat_interleave / reset first)"
            raise InvalidArgument("batch_size", "input_ids", wanted, f"{num_rows} rows")
        starts = torch.tensor(self.lengths).unsqueeze(1)
        if real is None:
            counts, offsets = [num_new] * num_rows, torch.arange(num_new).expand(num_rows, -1)
        else:
            counts, offsets = real.sum(1).tolist(), real.cumsum(1) - 1
        page_copies = self._make_room(counts)
        self._record(real, num_new)
        positions = starts + offsets
        table = self.block_table().to(torch.int64)
        # a pad before the row's first token has position -1; its page is looked up all the same, then dropped
        page_of = table.gather(1, (positions // self.page_size).clamp_(min=0))
        slots = page_of * self.page_size + positions % self.page_size
        if real is not None:
            slots = slots.masked_fill(~real, -1)
        return Appended(page_copies, slots.reshape(-1), (positions + 1).to(torch.int32))

    def crop(self, count: int) -> None:
        """Forgets the last ``count`` shown tokens of every row (all of them when fewer were shown)."""
        count = min(count, self.shown_length)
        if count == 0:
            return
        keep = self.shown_length - count
        removed = [count] * self.num_rows if self._real is None else self._real[:, keep:].sum(1).tolist()
        for row, pages in enumerate(self.pages):
            self.lengths[row] -= removed[row]
            needed = self._pages_for(self.lengths[row])
            self.allocator.release(pages[needed:])
            del pages[needed:]
        self.shown_length = keep
        self._real = None if self._real is None else self._real[:, :keep]
        self._block_table = None

    def select(self, rows: Sequence[int]) -> None:
        """Makes the batch the rows named, in this order; a row may be named several times and shares its
        pages then.

        Raises:
            InvalidArgument: a row that is not there.
        """
        if any(not 0 <= row < self.num_rows for row in rows):
            raise InvalidArgument("rows", "indices", f"rows in 0..{self.num_rows - 1}", str(list(rows)))
        chosen = [list(self.pages[row]) for row in rows]
        for pages in chosen:
            self.allocator.retain(pages)
        for pages in self.pages:
            self.allocator.release(pages)
        self.pages = chosen
        self.lengths = [self.lengths[row] for row in rows]
        self._real = None if self._real is None else self._real[list(rows)]
        self._block_table = None

    def reset(self) -> None:
        """Forgets every token and the number of rows; all pages are free again."""
        for pages in self.pages:
            self.allocator.release(pages)
        self.pages, self.lengths = [], []
        self.shown_length, self._real, self._block_table = 0, None, None

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _record(self, real: torch.Tensor | None, num_new: int) -> None:
        if real is not None or self._real is not None:
            new = real if real is not None else torch.ones(self.num_rows, num_new, dtype=torch.bool)
            old = (
                torch.ones(self.num_rows, self.shown_length, dtype=torch.bool)
                if self._real is None
                else self._real
            )
            self._real = torch.cat([old, new], dim=1)
        self.shown_length += num_new

    def _make_room(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Pages for ``counts`` more tokens of each row; returns the copies that unsharing the last pages asks for."""
        missing = [self._pages_for(length + n) for length, n in zip(self.lengths, counts, strict=True)]
        missing = [needed - len(pages) for needed, pages in zip(missing, self.pages, strict=True)]
        self._reserve(sum(missing) + sum(self._writes_into_shared(row, n) for row, n in enumerate(counts)))
        copies = []
        for row, (pages, count) in enumerate(zip(self.pages, counts, strict=True)):
            # asked again: the last of the rows that shared a page keeps it
            if self._writes_into_shared(row, count):
                [own] = self.allocator.allocate(1)
                copies.append((pages[-1], own))
                self.allocator.release(pages[-1:])
                pages[-1] = own
            pages += self.allocator.allocate(missing[row])
            self.lengths[row] += count
        if copies or any(missing):
            self._block_table = None
        return copies

    def _writes_into_shared(self, row: int, count: int) -> bool:
        fits_last_page = count > 0 and self.lengths[row] % self.page_size != 0
        return fits_last_page and self.allocator.reference_count(self.pages[row][-1]) > 1

    def _reserve(self, count: int) -> None:
        short = count - self.allocator.num_free
        if short > 0:
            # by half each time, so that a long text copies the pool a bounded number of times
            old = self.allocator.num_pages
            self.allocator.grow(max(old + short, old + old // 2))
