"""The work items of one pass, and which keys each of them may see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ItemGroup:
    """Work items of one pass: ``splits`` key ranges of each of ``num_units`` units, split-major.

    A pass goes through the ranges in blocks of ``kv_block`` tokens, counted from each range's own start.

    Attributes:
        tokens: i64 [num_units, tile], rows of q; -1 where a unit has fewer query tokens than the tile is wide.
        sequences: i64 [items], rows of the block table.
        kv_start, kv_stop: i64 [items], the item's keys, positions within the sequence.
        visible: i64 [items, tile], where the keys that each query token sees in this item's range end; None when all of an
            item's tokens see its whole range.
        splits: key ranges per unit in this group.
        kv_block: tokens of an item in one block.
        num_blocks: blocks of the longest range (on a device: of the longest one that the table could hold).
        ranges: host copies of (start, stop, least visible end) of each item, or None on a device.
        has_empty_places: whether some token is -1.
        consecutive: the rows of q that ``tokens`` are, when they are one run of them and the tile is one token wide.
    """

    tokens: torch.Tensor
    sequences: torch.Tensor
    kv_start: torch.Tensor
    kv_stop: torch.Tensor
    visible: torch.Tensor | None
    splits: int
    kv_block: int
    num_blocks: int
    ranges: tuple[tuple[int, int, int], ...] | None
    has_empty_places: bool
    consecutive: slice | None

    @property
    def rows_differ(self) -> bool:
        """Whether an item's query tokens may see different keys."""
        return self.visible is not None

    def range_of_only_item(self, number: int) -> tuple[int, int, int] | None:
        """(sequence, first position, end) of block ``number`` when the host knows it and there is one item; else None."""
        if self.ranges is None or len(self.ranges) > 1:
            return None
        start, stop, _ = self.ranges[0]
        first = start + number * self.kv_block
        return int(self.sequences[0]), first, min(first + self.kv_block, stop)

    def positions(self, number: int) -> torch.Tensor:
        """i64 [items, n]: positions of block ``number`` in each item's sequence.  Of an only item just those it owns, of
        several as many for each, whether it owns them or not."""
        first, length = number * self.kv_block, self.kv_block
        alone = self.range_of_only_item(number)
        if alone is not None:
            length = alone[2] - alone[1]
        return self.kv_start[:, None] + torch.arange(first, first + length, device=self.kv_start.device)

    def hides_keys(self, number: int) -> bool:
        """Whether a row may not see some key that its item owns, up to block ``number``."""
        end = (number + 1) * self.kv_block
        return self.ranges is None or any(start + end > least for start, _, least in self.ranges)

    def blank_dead_keys(self, number: int, keys: torch.Tensor) -> None:
        """Zeroes the keys of block ``number`` that lie past their item's range: whatever memory held there, it is nobody's.

        Args:
            keys: f32 [items, n, width].
        """
        if self.ranges is None:
            keys.masked_fill_(self._dead(number)[..., None], 0.0)
            return
        for item, live in self._tails(number, keys.shape[1]):
            keys[item, live:].zero_()

    def mask(self, number: int, scores: torch.Tensor) -> None:
        """Sets the scores of block ``number`` to -inf where a row does not see the key.

        Args:
            scores: f32 [items, tile * heads, n].
        """
        if self.ranges is None:
            scores.masked_fill_(self._dead(number)[:, None, :], -torch.inf)
        elif self.visible is None:
            for item, live in self._tails(number, scores.shape[2]):
                scores[item, :, live:].fill_(-torch.inf)
        elif self.hides_keys(number):
            hidden = self.positions(number)[:, None, None, :] >= self.visible[:, :, None, None]
            scores.unflatten(1, (self.visible.shape[1], -1)).masked_fill_(hidden, -torch.inf)

    def _dead(self, number: int) -> torch.Tensor:
        return self.positions(number) >= self.kv_stop[:, None]

    def _tails(self, number: int, length: int) -> Iterator[tuple[int, int]]:
        """(item, live tokens of block ``number``) of each item that owns fewer than ``length`` of them."""
        first = number * self.kv_block
        for item, (start, stop, _) in enumerate(self.ranges or ()):
            live = stop - start - first
            if live < length:
                yield item, max(0, live)


Passes = tuple[ItemGroup, ...]
"""Groups over the same units whose key ranges together are the units' keys: their states are merged."""
