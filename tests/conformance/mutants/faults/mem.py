"""Faults of kind MEM: memory that a row does not own."""

from __future__ import annotations

import torch
from conformance.mutants.kernel import Kernel, storage_of
from conformance.mutants.work import Item
from torch import Tensor


class ZeroTimesNan(Kernel):
    """The tail of the last page is given weight 0, and not selected away (flash-attention #2374)."""

    kind = "MEM"

    def load_keys(self, item: Item, keys: Tensor) -> Tensor:
        columns, last = keys // self.page_size, (item.end_key - 1) // self.page_size
        in_page = torch.where(columns <= last, keys, item.end_key - 1)
        pages, slots = self.pages_of(item, in_page)
        pages = pages.clamp(0, self.args.cache.shape[0] - 1)
        return self.gather(self.offsets(pages, slots))


class CellsPastTheEndFollowed(Kernel):
    """A whole tile's pages are looked up, those past the sequence's end too; only their scores are masked."""

    kind = "MEM"

    def load_keys(self, item: Item, keys: Tensor) -> Tensor:
        in_table = keys.clamp(max=self.args.table.shape[1] * self.page_size - 1)
        pages, slots = self.pages_of(item, in_table)
        # a page that does not exist would be a fault; what does exist is somebody else's
        tile = self.gather(self.offsets(pages.clamp(0, self.args.cache.shape[0] - 1), slots))
        in_last_page = keys // self.page_size == (item.end_key - 1) // self.page_size
        return torch.where((in_last_page & (keys >= item.end_key))[:, None], 0.0, tile)


class NeighboursRowWritten(Kernel):
    """A tile of rows is stored whole, past the rows that its sequence has."""

    kind = "MEM"

    def store(self, sequence: int, first_row: int, out: Tensor, lse: Tensor) -> None:
        query, head, live = self.rows_of(sequence, first_row)
        token = query + self.plan.starts[sequence]
        end = self.out.storage_offset() + self.out_offsets(token, head) + self.rank
        mapped = end <= len(storage_of(self.out))
        self.store_out(token[mapped], head[mapped], out[mapped])
        self.store_lse(token[live], head[live], self.natural(lse[live]))


class TableCleanedInPlace(Kernel):
    """Unused cells of the caller's table are set to 0, so that they may be followed."""

    kind = "MEM"

    def run(self) -> tuple[Tensor, Tensor]:
        self.args.table.clamp_(0, self.args.cache.shape[0] - 1)
        return super().run()


class QueriesScaledInPlace(Kernel):
    """The caller's queries are multiplied by the softmax scale, where they lie."""

    kind = "MEM"

    def run(self) -> tuple[Tensor, Tensor]:
        self.args.q_latent.mul_(self.args.softmax_scale)
        self.args.q_rope.mul_(self.args.softmax_scale)
        return super().run()

    def softmax_scale(self) -> float:
        return 1.0


class ScratchTakenAsZero(Kernel):
    """A split without keys writes no state: the scratch is thought to be zero (sglang #10330)."""

    kind = "MEM"

    def finish(self, item: Item, out: Tensor, lse: Tensor) -> None:
        if item.slot is None or item.first_key < item.end_key:
            super().finish(item, out, lse)


class PageIdsTrusted(Kernel):
    """A live page id outside the pool is followed."""

    kind = "MEM"

    def load_keys(self, item: Item, keys: Tensor) -> Tensor:
        live = keys < item.end_key
        pages, slots = self.pages_of(item, torch.where(live, keys, item.first_key))
        return torch.where(live[:, None], self.gather(self.offsets(pages, slots)), 0.0)


class LengthsTrusted(Kernel):
    """A length past the table's width is followed into the next row's cells, and beyond."""

    kind = "MEM"

    def length_of(self, seq_len: int) -> int:
        return max(0, seq_len)


class OutAddedTo(Kernel):
    """The result is added to what out holds, which is thought to be zero."""

    kind = "MEM"

    def store_out(self, token: Tensor, head: Tensor, rows: Tensor) -> None:
        super().store_out(token, head, rows + self.out[token, head].float())


FAULTS = (
    ZeroTimesNan,
    CellsPastTheEndFollowed,
    NeighboursRowWritten,
    TableCleanedInPlace,
    QueriesScaledInPlace,
    ScratchTakenAsZero,
    PageIdsTrusted,
    LengthsTrusted,
    OutAddedTo,
)
