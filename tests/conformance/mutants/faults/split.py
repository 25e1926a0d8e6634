"""Faults of kind SPLIT: how keys are split, and how the splits are merged."""

from __future__ import annotations

import torch
from conformance.mutants.kernel import Kernel, finite
from conformance.mutants.work import Item
from torch import Tensor


class LseOfOneSplitUnwritten(Kernel):
    """The stage that writes lse does not run when there is nothing to merge (aiter #1420)."""

    kind = "SPLIT"

    def finish(self, item: Item, out: Tensor, lse: Tensor) -> None:
        kept = self.lse.clone()
        super().finish(item, out, lse)
        if item.slot is None:
            self.lse.copy_(kept)


class EmptySplitContributes(Kernel):
    """A split without keys says that its lse is 0 (aiter #3641)."""

    kind = "SPLIT"

    def finish(self, item: Item, out: Tensor, lse: Tensor) -> None:
        if item.slot is not None and item.first_key == item.end_key:
            lse = torch.zeros_like(lse)
        super().finish(item, out, lse)


class MergeOfTwoInfinities(Kernel):
    """-inf minus -inf: a row that no split has a key for (flashinfer #4018)."""

    kind = "SPLIT"

    def merge_weights(self, lses: Tensor, top: Tensor) -> Tensor:
        return torch.exp2(lses - top)


class MergeWithoutAMaximum(Kernel):
    """Weights of the merge overflow, or vanish, when scores are large."""

    kind = "SPLIT"

    def merge_weights(self, lses: Tensor, top: Tensor) -> Tensor:
        return torch.exp2(lses) / torch.exp2(finite(top))


class MergeByMean(Kernel):
    """Splits that have keys count alike."""

    kind = "SPLIT"

    def merge_weights(self, lses: Tensor, top: Tensor) -> Tensor:
        return torch.isfinite(lses).float()


class RemainderDropped(Kernel):
    """Keys are divided by splits, rounded down."""

    kind = "SPLIT"

    def cuts(self, length: int, row_tiles: int) -> list[tuple[int, int]]:
        splits = len(super().cuts(length, row_tiles))
        size = length // splits
        return [(i * size, (i + 1) * size) for i in range(splits)]


class EdgeCountedTwice(Kernel):
    """The first key of a split is also the last one of the split before it."""

    kind = "SPLIT"

    def cuts(self, length: int, row_tiles: int) -> list[tuple[int, int]]:
        return [(first, min(end + 1, length)) for first, end in super().cuts(length, row_tiles)]


FAULTS = (
    LseOfOneSplitUnwritten,
    EmptySplitContributes,
    MergeOfTwoInfinities,
    MergeWithoutAMaximum,
    MergeByMean,
    RemainderDropped,
    EdgeCountedTwice,
)
