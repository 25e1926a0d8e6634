"""Faults of kind NUM: precision, and bits that depend on the rest of the batch."""

from __future__ import annotations

import torch
from conformance.mutants.kernel import Kernel
from torch import Tensor


class AccumulatedInBf16(Kernel):
    """The sum of weighted values is kept in bfloat16."""

    kind = "NUM"

    def accumulate(self, sums: Tensor, old: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        return super().accumulate(sums, old, weights, values).to(torch.bfloat16).float()


class AccumulatedInFp16(Kernel):
    """The sum of weighted values is kept in float16 (TensorRT-Model-Connect #790)."""

    kind = "NUM"

    def accumulate(self, sums: Tensor, old: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        return super().accumulate(sums, old, weights, values).to(torch.float16).float()


class SplitsFromTheBatch(Kernel):
    """In the batch-invariant mode too, splits come from what the batch leaves free (aiter #4364)."""

    kind = "NUM"

    def cuts(self, length: int, row_tiles: int) -> list[tuple[int, int]]:
        if not self.options.get("batch_invariant"):
            return super().cuts(length, row_tiles)
        splits = max(1, min(self.UNITS // max(1, row_tiles), -(-length // self.CHUNK)))
        size = -(-length // (splits * self.KEYS)) * self.KEYS
        return [(min(length, i * size), min(length, (i + 1) * size)) for i in range(splits)]


class ScoresInFp16(Kernel):
    """Scores are kept in float16: rounded, and infinite past 65504."""

    kind = "NUM"

    def scores(self, q: Tensor, tile: Tensor) -> Tensor:
        return super().scores(q, tile).to(torch.float16).float()


class ScoresClamped(Kernel):
    """Scores are clamped where the exponential would overflow without a maximum taken off."""

    kind = "NUM"

    def scores(self, q: Tensor, tile: Tensor) -> Tensor:
        return super().scores(q, tile).clamp(max=120.0)


FAULTS = (AccumulatedInBf16, AccumulatedInFp16, SplitsFromTheBatch, ScoresInFp16, ScoresClamped)
