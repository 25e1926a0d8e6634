"""The only code that reads the cache: tokens by (sequence, position), copied out of their pages block by block."""

from __future__ import annotations

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.kernels.torch.scratch import Scratch


class PageReader:
    """Reads a paged cache of any strides, page size and dtype into float32 blocks.

    A kernel's block is not a page: blocks start anywhere and are as long as the pass wants them.
    """

    def __init__(self, args: DecodeArguments) -> None:
        self._block_table = args.block_table
        self._num_pages, self._page_size, self._width = args.kv_cache.shape
        self._dtype = args.kv_cache.dtype
        # indexing knows no fp8: its bytes are copied, then read as what they are
        cache = args.kv_cache.view(torch.uint8) if self._dtype.itemsize == 1 else args.kv_cache
        self._cache = cache
        self._rows: torch.Tensor | None = None
        if self._page_size == 1:
            self._rows = cache[:, 0]
        elif cache.stride(0) == self._page_size * cache.stride(1):
            # pages follow one another: the pool is one long list of tokens
            self._rows = cache.as_strided(
                (self._num_pages * self._page_size, self._width), (cache.stride(1), cache.stride(2))
            )

    def buffers(self, scratch: Scratch, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for blocks of up to ``num_tokens`` tokens: as stored, and as float32 (the same one for float32 caches)."""
        as_stored = scratch.take((num_tokens, self._width), self._cache.dtype)
        if self._dtype == torch.float32:
            return as_stored, as_stored
        return as_stored, scratch.take((num_tokens, self._width))

    def view(self, sequence: int, first: int, end: int) -> torch.Tensor | None:
        """The tokens ``first`` .. ``end`` - 1 of a sequence where they lie, if they lie one after another as float32.

        Reads the block table on the host.

        Returns:
            f32 [1, end - first, width], not to be written to; None if the tokens must be copied.
        """
        if self._rows is None or self._dtype != torch.float32:
            return None
        first_column = first // self._page_size
        pages = self._block_table[sequence, first_column : -(-end // self._page_size)].tolist()
        if (
            pages != list(range(pages[0], pages[0] + len(pages)))
            or pages[0] < 0
            or pages[-1] >= self._num_pages
        ):
            return None
        slot = (pages[0] - first_column) * self._page_size + first
        return self._rows[slot : slot + end - first].unsqueeze(0)

    def locate(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of tokens, ``page * page_size + offset``, always inside the pool.

        Args:
            sequences: i64, rows of the block table, broadcast against ``positions``.
            positions: i64, token positions within the sequence, >= 0.

        Returns:
            i64 of positions' shape.  A position past what the table says of the sequence, or a page id that is none, gets
            some slot of the pool: what is read there must be thrown away.
        """
        columns = (positions // self._page_size).clamp_(max=self._block_table.shape[1] - 1)
        pages = self._block_table[sequences, columns].to(torch.int64).clamp_(0, self._num_pages - 1)
        return (
            pages if self._page_size == 1 else pages.mul_(self._page_size).add_(positions % self._page_size)
        )

    def read(self, slots: torch.Tensor, buffers: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Copies tokens out of their pages.

        Args:
            slots: i64 [items, n], contiguous, of ``locate``.
            buffers: of ``buffers()``, for at least items * n tokens.

        Returns:
            f32 [items, n, width].
        """
        count = slots.numel()
        stored, wide = buffers[0][:count], buffers[1][:count]
        flat = slots.view(-1)
        if self._rows is not None:
            torch.index_select(self._rows, 0, flat, out=stored)
        else:
            stored.copy_(self._cache[flat // self._page_size, flat % self._page_size])
        if self._dtype != torch.float32:
            wide.copy_(stored.view(self._dtype))
        return wide.view(*slots.shape, self._width)


def gathered_bytes_per_token(width: int, dtype: torch.dtype) -> int:
    """Bytes that ``PageReader.buffers`` takes for a token."""
    return width * 4 if dtype == torch.float32 else width * (4 + dtype.itemsize)
