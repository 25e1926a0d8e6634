"""Faults of kind EMPTY: rows that see no key."""

from __future__ import annotations

import math

import torch
from conformance.mutants.kernel import Kernel
from conformance.mutants.work import Item, Plan
from torch import Tensor


class EmptyRowsLeftUnwritten(Kernel):
    """A sequence without keys gets no work, so its rows keep what was there (vllm #37442)."""

    kind = "EMPTY"

    def plan_tile(self, plan: Plan, sequence: int, first_row: int, cuts: list[tuple[int, int]]) -> None:
        if plan.lengths[sequence]:
            super().plan_tile(plan, sequence, first_row, cuts)


class NothingOverNothing(Kernel):
    """A row without keys divides 0 by 0 (flashinfer #2883)."""

    kind = "EMPTY"

    def state(self, sums: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return sums / total[:, None], top + torch.log2(total)


class PlusInfinity(Kernel):
    """A row without keys has lse +inf (vllm #15492)."""

    kind = "EMPTY"

    def natural(self, lse: Tensor) -> Tensor:
        return super().natural(torch.where(lse == -math.inf, math.inf, lse))


class OrphansLeftUnwritten(Kernel):
    """Query rows of no sequence, a graph's padding, are not written."""

    kind = "EMPTY"

    def clear(self, token: int) -> None:
        pass


class BlindRowsPoisonThemselves(Kernel):
    """-inf minus -inf in a row that sees nothing of a tile that others do see (ik_llama.cpp #2344)."""

    kind = "EMPTY"

    def finish(self, item: Item, out: Tensor, lse: Tensor) -> None:
        blind = (self.limits(item) <= 0) & (item.end_key > item.first_key)
        super().finish(item, torch.where(blind[:, None], math.nan, out), torch.where(blind, math.nan, lse))


class LengthZeroTakenAsOne(Kernel):
    """What pads a batch is given a length of 1, and reads whatever its row of the table holds (sglang #1571)."""

    kind = "EMPTY"

    def length_of(self, seq_len: int) -> int:
        return super().length_of(max(1, seq_len))


FAULTS = (
    EmptyRowsLeftUnwritten,
    NothingOverNothing,
    PlusInfinity,
    OrphansLeftUnwritten,
    BlindRowsPoisonThemselves,
    LengthZeroTakenAsOne,
)
