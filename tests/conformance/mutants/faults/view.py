"""Faults of kind VIEW: strides and offsets that are thought to be those of a packed tensor."""

from __future__ import annotations

from conformance.mutants.kernel import Kernel, storage_of
from conformance.mutants.work import Item
from torch import Tensor


class CacheStrideIgnored(Kernel):
    """Pages are thought to follow each other (aiter #3498): wrong in a pool that layers share."""

    kind = "VIEW"

    def offsets(self, pages: Tensor, slots: Tensor) -> Tensor:
        return (pages * self.page_size + slots) * self.width


class StorageOffsetIgnored(Kernel):
    """The cache is thought to start where its memory does (local-inference-lab/b12x #17)."""

    kind = "VIEW"

    def cache_start(self) -> int:
        return 0


class OutStridesIgnored(Kernel):
    """out is written as if it were packed."""

    kind = "VIEW"

    def out_offsets(self, token: Tensor, head: Tensor) -> Tensor:
        return (token * self.heads + head) * self.rank


class QueriesThoughtPacked(Kernel):
    """The stride of a head is taken from the sizes (aiter #3841)."""

    kind = "VIEW"

    def query_offsets(self, part: Tensor, token: Tensor, head: Tensor) -> Tensor:
        return (token * self.heads + head) * part.stride(1)


class TableStrideIgnored(Kernel):
    """Rows of the table are thought to lie one behind the other (AMD-Ecosystem/flashinfer #303)."""

    kind = "VIEW"

    def pages_of(self, item: Item, keys: Tensor) -> tuple[Tensor, Tensor]:
        table = self.args.table
        cells = table.storage_offset() + item.sequence * table.shape[1] + keys // self.page_size
        return storage_of(table)[cells].long(), keys % self.page_size


class LseStridesIgnored(Kernel):
    """lse is written as if it were packed."""

    kind = "VIEW"

    def store_lse(self, token: Tensor, head: Tensor, rows: Tensor) -> None:
        storage_of(self.lse)[self.lse.storage_offset() + token * self.heads + head] = rows


class LensThoughtPacked(Kernel):
    """seq_lens is read one number after the other."""

    kind = "VIEW"

    def read_lens(self) -> list[int]:
        first = self.args.lens.storage_offset()
        return storage_of(self.args.lens)[first : first + len(self.args.lens)].tolist()


FAULTS = (
    CacheStrideIgnored,
    StorageOffsetIgnored,
    OutStridesIgnored,
    QueriesThoughtPacked,
    TableStrideIgnored,
    LseStridesIgnored,
    LensThoughtPacked,
)
