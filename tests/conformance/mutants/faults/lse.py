"""Faults of kind LSE: its base, its shape, its rows."""

from __future__ import annotations

import torch
from conformance.mutants.kernel import Kernel
from conformance.mutants.work import Merge
from torch import Tensor


class BaseTwo(Kernel):
    """The kernel's own base comes back (sglang #40903)."""

    kind = "LSE"

    def natural(self, lse: Tensor) -> Tensor:
        return lse


class FoldedShape(Kernel):
    """Many heads are folded to 16, and lse keeps the folded shape (aiter #1420)."""

    kind = "LSE"

    def results(self) -> tuple[Tensor, Tensor]:
        fold = self.heads > self.ROWS and self.heads % self.ROWS == 0
        return self.out, self.lse.reshape(-1, self.ROWS) if fold else self.lse


class LayoutGuessedFromSizes(Kernel):
    """With as many tokens as heads, [T, H] is mistaken for [H, T] (vllm-omni #5543)."""

    kind = "LSE"

    def results(self) -> tuple[Tensor, Tensor]:
        if self.lse.shape[0] == self.heads:
            self.lse.copy_(self.lse.T.clone())
        return super().results()


class MaximumForgotten(Kernel):
    """The logarithm of the sum without the maximum that the sum is relative to."""

    kind = "LSE"

    def state(self, sums: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = super().state(sums, top, total)
        return out, torch.where(total == 0, lse, torch.log2(total))


class RoundedTo16Bits(Kernel):
    """lse goes through the queries' dtype."""

    kind = "LSE"

    def natural(self, lse: Tensor) -> Tensor:
        return super().natural(lse).to(torch.bfloat16).float()


class FiniteForRowsWithoutKeys(Kernel):
    """The lowest finite number instead of -inf: a merge believes it (vllm #49334)."""

    kind = "LSE"

    def natural(self, lse: Tensor) -> Tensor:
        return super().natural(lse).clamp(min=torch.finfo(torch.float32).min)


class UnwrittenByTheMerge(Kernel):
    """The merge stage writes out alone (aiter #1420, its first item)."""

    kind = "LSE"

    def reduce(self, merge: Merge) -> None:
        kept = self.lse.clone()
        super().reduce(merge)
        self.lse.copy_(kept)


FAULTS = (
    BaseTwo,
    FoldedShape,
    LayoutGuessedFromSizes,
    MaximumForgotten,
    RoundedTo16Bits,
    FiniteForRowsWithoutKeys,
    UnwrittenByTheMerge,
)
