"""Faults of kind SYNC: what a race leaves, now and then."""

from __future__ import annotations

import random
from itertools import count

import torch
from conformance.mutants.kernel import Kernel
from conformance.mutants.work import Item, Merge
from torch import Tensor


class EverySeventhCall(Kernel):
    """In every seventh call the last tile of keys is read before it has come."""

    kind = "SYNC"
    calls = count(1)

    def run(self) -> tuple[Tensor, Tensor]:
        self.late = next(self.calls) % 7 == 0
        return super().run()

    def load_keys(self, item: Item, keys: Tensor) -> Tensor:
        tile = super().load_keys(item, keys)
        return torch.zeros_like(tile) if self.late and int(keys[-1]) + 1 >= item.end_key else tile


class OrderOfArrival(Kernel):
    """Splits are merged in the order in which they happen to finish: only the last bits tell."""

    kind = "SYNC"
    arrivals = random.Random(0)

    def reduce(self, merge: Merge) -> None:
        order = self.arrivals.sample(merge.slots, len(merge.slots))
        slots = slice(merge.slots.start, merge.slots.stop)
        self.partial_out[slots] = self.partial_out[order]
        self.partial_lse[slots] = self.partial_lse[order]
        super().reduce(merge)


class MergedTooEarly(Kernel):
    """Once in a while a merge does not wait for its last split."""

    kind = "SYNC"
    merges = count(1)

    def reduce(self, merge: Merge) -> None:
        if next(self.merges) % 11 == 0:
            merge = Merge(merge.sequence, merge.first_row, merge.slots[:-1])
        super().reduce(merge)


FAULTS = (EverySeventhCall, OrderOfArrival, MergedTooEarly)
