"""Faults of kind DCP: a shard of the keys, whose lse another rank merges."""

from __future__ import annotations

import torch
from conformance.mutants.kernel import LOG2_E, Kernel
from conformance.mutants.work import Item
from torch import Tensor


class UnitOfTheShortPath(Kernel):
    """lse is natural where splits were merged, and in base 2 where there was one (flashinfer #4485)."""

    kind = "DCP"

    def finish(self, item: Item, out: Tensor, lse: Tensor) -> None:
        super().finish(item, out, lse * LOG2_E if item.slot is None else lse)


class ShardWithoutTokensCounts(Kernel):
    """A rank without keys of a row says lse 0, a weight like another's."""

    kind = "DCP"

    def natural(self, lse: Tensor) -> Tensor:
        return super().natural(torch.nan_to_num(lse, neginf=0.0))


class LseOfTheLastSplit(Kernel):
    """A merge writes the lse of its last split that has keys, instead of that of all."""

    kind = "DCP"

    def state(self, sums: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().state(sums, top, total)
        return out, torch.where(total > 0, top, lse)


FAULTS = (UnitOfTheShortPath, ShardWithoutTokensCounts, LseOfTheLastSplit)
