"""What is attended to: work items, each a tile of one sequence's query tokens with a range of its keys.

A CPU's lengths are in host memory, so items there are exactly what there is to do: dead rows cost nothing, the longest items
come first, and a pass drops those that are done.  On another device lengths must not be read, so every query token is an
item of its own whose range is as long as the table could hold; the device's lengths mask what is not there.

Example, host: lengths 5, 0, 9, query tokens 2, 1, 1, one split.  Units (sequence, tokens, keys): (2, [3], 9), (0, [0, 1], 5);
sequence 1 sees nothing and is left out.  Tile widths differ (1 and 2 tokens), so they form two groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.kernels.policy import TorchDecodeConfig, split_count
from pagedmla.kernels.torch.bounded import key_counts, query_starts


@dataclass(frozen=True)
class ItemGroup:
    """Work items of one pass: ``splits`` key ranges of each of ``num_units`` units, split-major.

    Attributes:
        tokens: i64 [num_units, tile], rows of q; -1 where a unit has fewer query tokens than the tile is wide.
        sequences: i64 [items], rows of the block table.
        kv_start, kv_stop: i64 [items], the item's keys, positions within the sequence.
        visible: i64 [items, tile], where the keys that each query token sees in this item's range end; 0 for no token.
        splits: key ranges per unit in this group.
        kv_block: tokens of an item that are read in one step.
        longest: tokens of the longest range (on the host: of the longest one there is).
        ranges: host copies of (start, stop, least visible end) of each item, or None on a device.
        rows_differ: whether an item's rows may see different keys.
    """

    tokens: torch.Tensor
    sequences: torch.Tensor
    kv_start: torch.Tensor
    kv_stop: torch.Tensor
    visible: torch.Tensor
    splits: int
    kv_block: int
    longest: int
    ranges: tuple[tuple[int, int, int], ...] | None
    rows_differ: bool

    @property
    def on_host(self) -> bool:
        """Whether the host knows the ranges."""
        return self.ranges is not None

    def active_items(self, first: int) -> int:
        """How many items, counted from the front, still have keys at ``first`` tokens into their range."""
        if self.ranges is None or self.splits > 1:
            return self.sequences.shape[0]
        return sum(1 for start, stop, _ in self.ranges if stop - start > first)

    def all_live(self, active: int, end: int) -> bool:
        """Whether each of the first ``active`` items is known to own every key up to ``end`` tokens into its range."""
        return self.ranges is not None and all(stop - start >= end for start, stop, _ in self.ranges[:active])

    def hides_keys(self, active: int, end: int) -> bool:
        """Whether some row of the first ``active`` items may not see a key before ``end`` tokens into its range."""
        return self.ranges is None or any(start + end > least for start, _, least in self.ranges[:active])


Passes = tuple[ItemGroup, ...]
"""Groups over the same units whose key ranges together are the units' keys: their states are merged."""


def host_passes(args: DecodeArguments, config: TorchDecodeConfig) -> Iterator[Passes]:
    """The groups of a call whose lengths are in host memory.

    Args:
        args: the call; its lengths are read.
        config: tile sizes.
    """
    units = _host_units(args, config.query_tokens_per_item(args.num_heads))
    longest = max((unit.keys for unit in units), default=0)
    splits = args.num_kv_splits or split_count(len(units), longest, torch.get_num_threads())
    # splits beyond the last key would be empty, and an empty split adds nothing
    splits = max(1, min(splits, longest))
    by_tile: dict[int, list[_Unit]] = {}
    for unit in units:
        # powers of two: few groups, and at most half of a tile is empty
        by_tile.setdefault(1 << (len(unit.visible) - 1).bit_length(), []).append(unit)
    for tile, members in by_tile.items():
        members.sort(key=lambda unit: -unit.keys)
        per_pass = config.items_per_pass(tile * args.num_heads)
        units_per_pass = max(1, per_pass // splits)
        for at in range(0, len(members), units_per_pass):
            some = members[at : at + units_per_pass]
            yield tuple(
                _host_group(some, tile, splits, range(first, min(first + per_pass, splits)), args, config)
                for first in range(0, splits, per_pass)
            )


@dataclass(frozen=True)
class _Unit:
    sequence: int
    first_token: int
    visible: tuple[int, ...]

    @property
    def keys(self) -> int:
        return max(self.visible)


def _host_units(args: DecodeArguments, tile_limit: int) -> list[_Unit]:
    counts, starts = key_counts(args).tolist(), query_starts(args).tolist()
    units = []
    for sequence, keys in enumerate(counts):
        start, stop = starts[sequence], starts[sequence + 1]
        for first in range(start, stop, tile_limit):
            tokens = range(first, min(first + tile_limit, stop))
            visible = tuple(max(0, keys - (stop - 1 - token)) if args.causal else keys for token in tokens)
            if max(visible) > 0:
                units.append(_Unit(sequence, first, visible))
    return units


def _host_group(
    units: list[_Unit], tile: int, splits: int, these: range, args: DecodeArguments, config: TorchDecodeConfig
) -> ItemGroup:
    ranges = []
    for split in these:
        for unit in units:
            size = -(-unit.keys // splits)
            start = min(split * size, unit.keys)
            # a tile's empty places see no key
            least = min(unit.visible) if len(unit.visible) == tile else 0
            stop = min(start + size, unit.keys)
            ranges.append((start, stop, min(least, stop)))
    longest = max(stop - start for start, stop, _ in ranges)
    tokens = [
        [unit.first_token + at if at < len(unit.visible) else -1 for at in range(tile)] for unit in units
    ]
    seen = [unit.visible + (0,) * (tile - len(unit.visible)) for unit in units] * len(these)
    visible = [[min(keys, stop) for keys in row] for row, (_, stop, _) in zip(seen, ranges, strict=True)]
    device = args.q.device

    def tensor(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return ItemGroup(
        tokens=tensor(tokens),
        sequences=tensor([unit.sequence for unit in units] * len(these)),
        kv_start=tensor([start for start, _, _ in ranges]),
        kv_stop=tensor([stop for _, stop, _ in ranges]),
        visible=tensor(visible),
        splits=len(these),
        kv_block=config.kv_block(len(ranges), tile * args.num_heads, longest),
        longest=longest,
        ranges=tuple(ranges),
        rows_differ=tile > 1 and args.causal,
    )


@dataclass(frozen=True)
class TokenOwners:
    """Which sequence each query token belongs to, on the device.

    Attributes:
        sequences: i64 [num_tokens].
        visible: i64 [num_tokens], keys that the token sees; 0 for a token that nobody owns.
    """

    sequences: torch.Tensor
    visible: torch.Tensor


def token_owners(args: DecodeArguments) -> TokenOwners:
    """Finds the owner of every query token without reading the device."""
    counts, starts = key_counts(args), query_starts(args)
    tokens = torch.arange(args.num_tokens, device=args.q.device)
    sequences = torch.searchsorted(starts[1:].contiguous(), tokens, right=True).clamp_(max=args.num_seqs - 1)
    owned = (tokens >= starts[0]) & (tokens < starts[-1])
    keys = counts[sequences]
    if args.causal:
        keys = (keys - (starts[1:][sequences] - 1 - tokens)).clamp_(min=0)
    return TokenOwners(sequences, torch.where(owned, keys, 0))


def device_passes(args: DecodeArguments, config: TorchDecodeConfig, compute_units: int) -> Iterator[Passes]:
    """The groups of a call whose lengths are on a device: one item per query token and split, its range masked there."""
    owners = token_owners(args)
    capacity = args.block_table.shape[1] * args.kv_cache.shape[1]
    splits = args.num_kv_splits or split_count(args.num_tokens, capacity, compute_units)
    splits = max(1, min(splits, capacity))
    per_pass = config.items_per_pass(args.num_heads)
    tokens_per_pass = max(1, per_pass // splits)
    for at in range(0, args.num_tokens, tokens_per_pass):
        tokens = torch.arange(at, min(at + tokens_per_pass, args.num_tokens), device=args.q.device)
        yield tuple(
            _device_group(
                tokens, owners, splits, range(first, min(first + per_pass, splits)), capacity, args, config
            )
            for first in range(0, splits, per_pass)
        )


def _device_group(
    tokens: torch.Tensor,
    owners: TokenOwners,
    splits: int,
    these: range,
    capacity: int,
    args: DecodeArguments,
    config: TorchDecodeConfig,
) -> ItemGroup:
    keys = owners.visible[tokens]
    size = -(-keys // splits)
    numbers = torch.arange(these.start, these.stop, device=keys.device)[:, None]
    start = torch.minimum(numbers * size, keys)
    stop = torch.minimum(start + size, keys).flatten()
    longest = -(-capacity // splits)
    return ItemGroup(
        tokens=tokens[:, None],
        sequences=owners.sequences[tokens].repeat(len(these)),
        kv_start=start.flatten(),
        kv_stop=stop,
        visible=stop[:, None],
        splits=len(these),
        kv_block=config.kv_block(tokens.shape[0] * len(these), args.num_heads, max(1, longest)),
        longest=longest,
        ranges=None,
        rows_differ=False,
    )
