"""Faults of kind SHAPE: head counts and the dimensions of the latent."""

from __future__ import annotations

from conformance.mutants.kernel import Kernel
from conformance.mutants.plan_step import VECTOR
from conformance.mutants.work import Item
from torch import Tensor


class WrongFold(Kernel):
    """128 heads are folded to 8 groups of 16, and unfolded with both in the wrong order (aiter #1420)."""

    kind = "SHAPE"

    def store_out(self, token: Tensor, head: Tensor, rows: Tensor) -> None:
        if self.heads == 128:
            head = head % 16 * 8 + head // 16
        super().store_out(token, head, rows)


class TailHeadsLost(Kernel):
    """Above 16 heads, those past a multiple of 16 have no lane (aiter #4412)."""

    kind = "SHAPE"

    def rows_of(self, sequence: int, first_row: int) -> tuple[Tensor, Tensor, Tensor]:
        query, head, live = super().rows_of(sequence, first_row)
        return query, head, live & (head < max(16, self.heads // 16 * 16))


class RopeIgnoredAt256(Kernel):
    """With a latent of 256 numbers the rotated part starts where the tile for 512 has none."""

    kind = "SHAPE"

    def products(self, q: Tensor, tile: Tensor) -> Tensor:
        return super().products(q[:, :256], tile[:, :256]) if self.rank == 256 else super().products(q, tile)


class OnlyRequestZero(Kernel):
    """Every sequence reads the queries of the first: a check of row 0 passes (flashinfer #2750)."""

    kind = "SHAPE"

    def load_queries(self, item: Item) -> Tensor:
        first = Item(0, item.first_row, item.first_key, item.end_key, item.slot)
        return super().load_queries(first)


class HeadsThoughtPadded(Kernel):
    """Queries are thought to be padded to a power of two heads, as other tensors of the launch are (sglang #39235)."""

    kind = "SHAPE"

    def gather_rows(self, part: Tensor, token: Tensor, head: Tensor) -> Tensor:
        padded = 1 << (self.heads - 1).bit_length()
        row = (token * padded + head).clamp(max=part.shape[0] * self.heads - 1)
        return super().gather_rows(part, row // self.heads, row % self.heads)


class RopeOf64Only(Kernel):
    """A rotated part of 32 is read as half of one of 64: its second half is left out."""

    kind = "SHAPE"

    def products(self, q: Tensor, tile: Tensor) -> Tensor:
        rope = self.width - self.rank
        width = self.rank + rope // 2 // VECTOR * VECTOR if 0 < rope < 64 else self.width
        return super().products(q[:, :width], tile[:, :width])


FAULTS = (
    WrongFold,
    TailHeadsLost,
    RopeIgnoredAt256,
    OnlyRequestZero,
    HeadsThoughtPadded,
    RopeOf64Only,
)
