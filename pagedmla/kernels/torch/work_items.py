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
from pagedmla.kernels.torch.bounded import (
    host_key_counts,
    host_query_starts,
    key_counts,
    query_starts,
)
from pagedmla.kernels.torch.item_group import DeviceItemGroup, HostItemGroup, Passes, Unit

# a matrix product keeps a few threads busy by itself: splits are for machines that have more
_THREADS_OF_A_PRODUCT = 4


def host_passes(args: DecodeArguments, config: TorchDecodeConfig) -> Iterator[Passes]:
    """The groups of a call whose lengths are in host memory.

    Args:
        args: the call; its lengths are read.
        config: tile sizes.
    """
    units = _host_units(args, config.query_tokens_per_item(args.num_heads))
    longest = max((unit.keys for unit in units), default=0)
    splits = args.num_kv_splits or split_count(
        len(units), longest, torch.get_num_threads() // _THREADS_OF_A_PRODUCT
    )
    # splits beyond the last key would be empty, and an empty split adds nothing
    splits = max(1, min(splits, longest))
    by_tile: dict[int, list[Unit]] = {}
    for unit in units:
        # powers of two: few groups, and at most half of a tile is empty
        by_tile.setdefault(1 << (len(unit.visible) - 1).bit_length(), []).append(unit)
    for tile, members in by_tile.items():
        members.sort(key=lambda unit: -unit.keys)
        while members:
            # long sequences are taken one by one: nothing is gained by batching them, and their pages may lie in a row
            at_once = config.items_per_pass(tile * args.num_heads, -(-members[0].keys // splits))
            some, members = members[: max(1, at_once // splits)], members[max(1, at_once // splits) :]
            yield tuple(
                _host_group(some, tile, splits, range(first, min(first + at_once, splits)), args, config)
                for first in range(0, splits, at_once)
            )


def _host_units(args: DecodeArguments, tile_limit: int) -> list[Unit]:
    counts, starts = host_key_counts(args), host_query_starts(args)
    units = []
    for sequence, keys in enumerate(counts):
        start, stop = starts[sequence], starts[sequence + 1]
        for first in range(start, stop, tile_limit):
            tokens = range(first, min(first + tile_limit, stop))
            visible = tuple(max(0, keys - (stop - 1 - token)) if args.causal else keys for token in tokens)
            if max(visible) > 0:
                units.append(Unit(sequence, first, visible))
    return units


def _host_group(
    units: list[Unit], tile: int, splits: int, these: range, args: DecodeArguments, config: TorchDecodeConfig
) -> HostItemGroup:
    ranges = []
    for split in these:
        for unit in units:
            size = -(-unit.keys // splits)
            start = min(split * size, unit.keys)
            ranges.append((start, min(start + size, unit.keys)))
    longest = max(stop - start for start, stop in ranges)
    blocks = config.kv_blocks(len(ranges), tile * args.num_heads, longest)
    return HostItemGroup(units, tile, ranges, *blocks, causal=args.causal)


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
    per_pass = config.items_per_pass(args.num_heads, config.min_kv_block)
    tokens_per_pass = max(1, per_pass // splits)
    for at in range(0, args.num_tokens, tokens_per_pass):
        tokens = range(at, min(at + tokens_per_pass, args.num_tokens))
        yield tuple(
            _device_group(
                tokens, owners, splits, range(first, min(first + per_pass, splits)), capacity, args, config
            )
            for first in range(0, splits, per_pass)
        )


def _device_group(
    tokens: range,
    owners: TokenOwners,
    splits: int,
    these: range,
    capacity: int,
    args: DecodeArguments,
    config: TorchDecodeConfig,
) -> DeviceItemGroup:
    rows = slice(tokens.start, tokens.stop)
    keys = owners.visible[rows]
    size = -(-keys // splits)
    numbers = torch.arange(these.start, these.stop, device=keys.device)[:, None]
    start = torch.minimum(numbers * size, keys)
    return DeviceItemGroup(
        tokens,
        owners.sequences[rows].repeat(len(these)),
        start.flatten(),
        torch.minimum(start + size, keys).flatten(),
        len(these),
        *config.kv_blocks(len(tokens) * len(these), args.num_heads, max(1, -(-capacity // splits))),
    )
