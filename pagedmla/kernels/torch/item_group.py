"""The work items of one pass, and which keys each of them may see: as the host knows it, or as only the device does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

_HOST = torch.device("cpu")  # said, not assumed: torch's default device is the caller's to set


@dataclass(frozen=True)
class Unit:
    """A tile of one sequence's query tokens.

    Attributes:
        sequence: row of the block table.
        first_token: row of q of the tile's first token; the others follow.
        visible: keys that each token sees, counted from the sequence's start.
    """

    sequence: int
    first_token: int
    visible: tuple[int, ...]

    @property
    def keys(self) -> int:
        """Keys that some token sees."""
        return max(self.visible)


class ItemGroup(ABC):
    """Work items of one pass: ``splits`` key ranges of each of ``num_units`` units, split-major.

    A pass goes through the ranges in blocks of ``kv_block`` tokens, counted from each range's own start.

    Attributes:
        num_units: query tiles.
        tile: query tokens of a unit; some may be empty places.
        splits: key ranges of each unit in this group.
        kv_block: tokens of an item in one block.
        num_blocks: blocks of the longest range.
        consecutive: the rows of q that the units are, when they are one run of them and the tile is one token wide.
        has_empty_places: whether some unit has fewer query tokens than the tile is wide.
        rows_differ: whether an item's query tokens may see different keys.
    """

    num_units: int
    tile: int
    splits: int
    kv_block: int
    num_blocks: int
    consecutive: slice | None
    has_empty_places: bool
    rows_differ: bool

    # i64 on the call's device; made when first asked for
    tokens: torch.Tensor  # [num_units, tile], rows of q; -1 for an empty place
    sequences: torch.Tensor  # [items], rows of the block table
    kv_start: torch.Tensor  # [items], first position of the item's range

    @property
    def num_items(self) -> int:
        """Units times splits."""
        return self.num_units * self.splits

    def run(self, number: int) -> tuple[int, int, int] | None:
        """(sequence, first position, end) of block ``number``, when there is one item and the host knows it; else None."""
        return None

    def positions(self, number: int) -> torch.Tensor:
        """i64 [items, n]: positions of block ``number`` in each item's sequence, whether the item owns them or not; of an
        only item that the host knows, just those it owns."""
        run = self.run(number)
        length = self.kv_block if run is None else run[2] - run[1]
        first = number * self.kv_block
        return self.kv_start[:, None] + torch.arange(first, first + length, device=self.kv_start.device)

    @abstractmethod
    def hides_keys(self, number: int) -> bool:
        """Whether a row may not see some key that its item owns, up to block ``number``."""

    @abstractmethod
    def blank_dead_keys(self, number: int, keys: torch.Tensor) -> None:
        """Zeroes the keys of block ``number``, f32 [items, n, width], that lie past their item's range: whatever memory held
        there, it is nobody's."""

    @abstractmethod
    def mask(self, number: int, scores: torch.Tensor) -> None:
        """Sets the scores of block ``number``, f32 [items, tile * heads, n], to -inf where a row does not see the key."""


class HostItemGroup(ItemGroup):
    """Items whose lengths are in host memory, so that nothing is done for keys that nobody has.

    Args:
        units: the query tiles, none wider than ``tile``.
        tile: query tokens that a unit has room for.
        ranges: (start, stop) of each item, split-major.
        kv_block, num_blocks: from the config.
        causal: whether a unit's tokens see different keys.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        tile: int,
        ranges: Sequence[tuple[int, int]],
        kv_block: int,
        num_blocks: int,
        causal: bool,
    ) -> None:
        self._units, self._ranges = list(units), list(ranges)
        self.num_units, self.tile, self.splits = len(units), tile, len(ranges) // len(units)
        self.kv_block, self.num_blocks = kv_block, num_blocks
        self.has_empty_places = any(len(unit.visible) < tile for unit in units)
        self.rows_differ = tile > 1 and causal
        self.consecutive = None
        first = units[0].first_token
        if tile == 1 and all(unit.first_token == first + at for at, unit in enumerate(units)):
            self.consecutive = slice(first, first + len(units))

    @cached_property
    def tokens(self) -> torch.Tensor:  # type: ignore[override]
        """Rows of q; -1 for an empty place."""
        rows = [range(unit.first_token, unit.first_token + len(unit.visible)) for unit in self._units]
        return torch.tensor([_padded(row, self.tile, -1) for row in rows], device=_HOST)

    @cached_property
    def sequences(self) -> torch.Tensor:  # type: ignore[override]
        """Rows of the block table."""
        return torch.tensor([unit.sequence for unit in self._units] * self.splits, device=_HOST)

    @cached_property
    def kv_start(self) -> torch.Tensor:  # type: ignore[override]
        """First positions."""
        return torch.tensor([start for start, _ in self._ranges], device=_HOST)

    @cached_property
    def _visible(self) -> torch.Tensor:
        # i64 [items, tile]: where what each token sees of the item's range ends
        return torch.tensor(
            [
                _padded([min(keys, stop) for keys in unit.visible], self.tile, 0)
                for unit, (_, stop) in self._items()
            ]
        )

    def run(self, number: int) -> tuple[int, int, int] | None:
        """See ``ItemGroup.run``."""
        if len(self._ranges) > 1:
            return None
        start, stop = self._ranges[0]
        first = start + number * self.kv_block
        if first >= stop:
            # an empty split: its block is read as dead keys, like that of one item among many
            return None
        return self._units[0].sequence, first, min(first + self.kv_block, stop)

    def hides_keys(self, number: int) -> bool:
        """See ``ItemGroup.hides_keys``."""
        end = (number + 1) * self.kv_block
        return any(start + end > min(*unit.visible, stop) for unit, (start, stop) in self._items())

    def _items(self) -> Iterator[tuple[Unit, tuple[int, int]]]:
        return zip(self._units * self.splits, self._ranges, strict=True)

    def blank_dead_keys(self, number: int, keys: torch.Tensor) -> None:
        """See ``ItemGroup.blank_dead_keys``."""
        for item, live in self._tails(number, keys.shape[1]):
            keys[item, live:].zero_()

    def mask(self, number: int, scores: torch.Tensor) -> None:
        """See ``ItemGroup.mask``."""
        if not self.rows_differ:
            for item, live in self._tails(number, scores.shape[2]):
                scores[item, :, live:].fill_(-torch.inf)
        elif self.hides_keys(number):
            hidden = self.positions(number)[:, None, None, :] >= self._visible[:, :, None, None]
            scores.unflatten(1, (self.tile, -1)).masked_fill_(hidden, -torch.inf)

    def _tails(self, number: int, length: int) -> Iterator[tuple[int, int]]:
        """(item, live tokens of block ``number``) of each item that owns fewer than ``length`` of them."""
        first = number * self.kv_block
        for item, (start, stop) in enumerate(self._ranges):
            live = stop - start - first
            if live < length:
                yield item, max(0, live)


class DeviceItemGroup(ItemGroup):
    """Items of one query token each whose lengths must not be read: every block is looked at, and masked there.

    Args:
        tokens: rows of q.
        sequences, kv_start, kv_stop: i64 [items], split-major.
        splits, kv_block, num_blocks: as for every group.
    """

    tile = 1
    has_empty_places = False
    rows_differ = False

    def __init__(
        self,
        tokens: range,
        sequences: torch.Tensor,
        kv_start: torch.Tensor,
        kv_stop: torch.Tensor,
        splits: int,
        kv_block: int,
        num_blocks: int,
    ) -> None:
        self.num_units, self.splits = len(tokens), splits
        self.kv_block, self.num_blocks = kv_block, num_blocks
        self.consecutive = slice(tokens.start, tokens.stop)
        self.sequences, self.kv_start, self._kv_stop = sequences, kv_start, kv_stop

    @cached_property
    def tokens(self) -> torch.Tensor:  # type: ignore[override]
        """Rows of q."""
        rows = self.consecutive or slice(0, 0)
        return torch.arange(rows.start, rows.stop, device=self.kv_start.device)[:, None]

    def hides_keys(self, number: int) -> bool:
        """True: the host does not know."""
        return True

    def blank_dead_keys(self, number: int, keys: torch.Tensor) -> None:
        """See ``ItemGroup.blank_dead_keys``."""
        keys.masked_fill_(self._dead(number)[..., None], 0.0)

    def mask(self, number: int, scores: torch.Tensor) -> None:
        """See ``ItemGroup.mask``."""
        scores.masked_fill_(self._dead(number)[:, None, :], -torch.inf)

    def _dead(self, number: int) -> torch.Tensor:
        return self.positions(number) >= self._kv_stop[:, None]


def _padded(values: Sequence[int], length: int, filler: int) -> list[int]:
    return [*values, *[filler] * (length - len(values))]


Passes = tuple[ItemGroup, ...]
"""Groups over the same units whose key ranges together are the units' keys: their states are merged."""
