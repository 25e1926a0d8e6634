"""Faults of kind ARCH: what should be refused is answered, wrongly."""

from __future__ import annotations

import torch
from conformance.mutants.kernel import Kernel
from conformance.mutants.work import Plan

from pagedmla.conformance.adapters.adapter import Options


class DimensionsUnchecked(Kernel):
    """A part that is no multiple of a load is cut to one, without a word (transformers #48648)."""

    kind = "ARCH"

    @staticmethod
    def refusal(heads: int, rank: int, rope: int, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        return None


class NoSplitsTaken(Kernel):
    """Fewer splits than one are no work, and the result is never written."""

    kind = "ARCH"

    @staticmethod
    def bad_options(options: Options) -> str | None:
        splits = options.get("num_kv_splits")
        return None if isinstance(splits, int) and splits < 1 else Kernel.bad_options(options)

    def plan_tile(self, plan: Plan, sequence: int, first_row: int, cuts: list[tuple[int, int]]) -> None:
        if int(self.options.get("num_kv_splits", 1)) >= 1:  # type: ignore[call-overload]
            super().plan_tile(plan, sequence, first_row, cuts)

    def splits(self, length: int, row_tiles: int) -> int:
        return max(1, super().splits(length, row_tiles))


class SizesUnchecked(Kernel):
    """Tensors are read by the sizes of others."""

    kind = "ARCH"

    def misfit(self) -> str | None:
        return None


FAULTS = (DimensionsUnchecked, NoSplitsTaken, SizesUnchecked)
