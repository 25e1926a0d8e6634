"""Faults of kind QLEN: several query tokens of a sequence."""

from __future__ import annotations

import torch
from conformance.mutants.kernel import Kernel
from conformance.mutants.work import Item
from torch import Tensor


class CausalOff(Kernel):
    """Every query token sees every key: invisible with one (aiter #3993)."""

    kind = "QLEN"

    def seen(self, query: Tensor, length: int, queries: int) -> Tensor:
        return torch.full_like(query, length)


class OneMaskForAll(Kernel):
    """Every query token sees what the first one may see."""

    kind = "QLEN"

    def seen(self, query: Tensor, length: int, queries: int) -> Tensor:
        return torch.full_like(query, length - queries + 1)


class SquareMask(Kernel):
    """The mask starts at the first key, as if no token were older (DeepSeek-V3 #1536)."""

    kind = "QLEN"

    def seen(self, query: Tensor, length: int, queries: int) -> Tensor:
        return (query + 1).clamp(max=length)


class MaskOfTheTile(Kernel):
    """Rows of a tile share the mask of its last row: right while a tile holds one query token."""

    kind = "QLEN"

    def limits(self, item: Item) -> Tensor:
        limits = super().limits(item)
        return torch.where(limits != 0, limits.max(), limits)


class QueryStartsIgnored(Kernel):
    """Every sequence is thought to have as many query tokens as the others."""

    kind = "QLEN"

    def query_starts(self) -> list[int]:
        tokens, sequences = self.args.q_latent.shape[0], max(1, len(self.args.lens))
        return [tokens * sequence // sequences for sequence in range(len(self.args.lens) + 1)]


class PlannedForOneToken(Kernel):
    """The plan is made for one query token of each sequence (vllm #45227)."""

    kind = "QLEN"

    def row_tiles(self, rows: int) -> range:
        return super().row_tiles(min(rows, self.heads))


class FourTokensAtMost(Kernel):
    """Query tokens past the fourth get the fourth's mask (vllm #55609 aborts instead)."""

    kind = "QLEN"

    def seen(self, query: Tensor, length: int, queries: int) -> Tensor:
        return super().seen(query.clamp(max=3), length, queries)


FAULTS = (
    CausalOff,
    OneMaskForAll,
    SquareMask,
    MaskOfTheTile,
    QueryStartsIgnored,
    PlannedForOneToken,
    FourTokensAtMost,
)
