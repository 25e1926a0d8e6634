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

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self._width

    def buffers(self, scratch: Scratch, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for blocks of up to ``num_tokens`` tokens: as stored, and as float32 (the same one for float32 caches)."""
        as_stored = scratch.take((num_tokens, self._width), self._cache.dtype)
        if self._dtype == torch.float32:
            return as_stored, as_stored
        return as_stored, scratch.take((num_tokens, self._width))

    def read(
        self,
        sequences: torch.Tensor,
        positions: torch.Tensor,
        live: torch.Tensor | None,
        buffers: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Copies tokens out of their pages.

        Args:
            sequences: i64 [items], rows of the block table.
            positions: i64 [items, n], token positions within the sequence, >= 0.
            live: bool [items, n], which positions the item owns; None: all.
            buffers: of ``buffers()``, for at least items * n tokens.

        Returns:
            f32 [items, n, width], zeros where not live: neither a NaN in memory that nobody owns nor a page id past a
            sequence's end reaches the products.
        """
        num_items, length = positions.shape
        columns = (positions // self._page_size).clamp_(max=self._block_table.shape[1] - 1)
        pages = self._block_table[sequences[:, None], columns].to(torch.int64)
        if live is not None:
            pages = torch.where(live, pages, 0)
        pages.clamp_(0, self._num_pages - 1)
        count = num_items * length
        stored, wide = buffers[0][:count], buffers[1][:count]
        if self._rows is not None:
            slots = pages.mul_(self._page_size).add_(positions % self._page_size)
            torch.index_select(self._rows, 0, slots.view(-1), out=stored)
        else:
            stored.copy_(self._cache[pages, positions % self._page_size].view(count, self._width))
        if self._dtype != torch.float32:
            wide.copy_(stored.view(self._dtype))
        block = wide.view(num_items, length, self._width)
        return block if live is None else block.masked_fill_(~live[..., None], 0.0)


def gathered_bytes_per_token(width: int, dtype: torch.dtype) -> int:
    """Bytes that ``PageReader.buffers`` takes for a token."""
    return width * 4 if dtype == torch.float32 else width * (4 + dtype.itemsize)
