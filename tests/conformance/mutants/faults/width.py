"""Faults of kind WIDTH: offsets that are computed in 32 bits somewhere."""

from __future__ import annotations

from conformance.mutants.kernel import Kernel
from torch import Tensor


def _signed(offsets: Tensor) -> Tensor:
    """What 32 signed bits keep."""
    return (offsets + 2**31) % 2**32 - 2**31


class SignedOffsets(Kernel):
    """Page times page stride in 32 signed bits, in numbers (vllm #47671): a negative offset reads before the pool."""

    kind = "WIDTH"

    def offsets(self, pages: Tensor, slots: Tensor) -> Tensor:
        return _signed(super().offsets(pages, slots))


class UnsignedOffsets(Kernel):
    """The same in 31 bits without a sign: what is read lies in the pool and is finite (vllm #50427)."""

    kind = "WIDTH"

    def offsets(self, pages: Tensor, slots: Tensor) -> Tensor:
        return super().offsets(pages, slots) % 2**31


class ByteOffsets(Kernel):
    """Byte offsets in 32 unsigned bits: right up to 4 GiB (aiter #2768)."""

    kind = "WIDTH"

    def offsets(self, pages: Tensor, slots: Tensor) -> Tensor:
        size = self.args.cache.dtype.itemsize
        return super().offsets(pages, slots) * size % 2**32 // size


class SignedByteOffsets(Kernel):
    """Byte offsets in 32 signed bits (aiter #4474)."""

    kind = "WIDTH"

    def offsets(self, pages: Tensor, slots: Tensor) -> Tensor:
        size = self.args.cache.dtype.itemsize
        return _signed(super().offsets(pages, slots) * size) // size


class QueryOffsets(Kernel):
    """Rows of the queries are found by 32 signed bits."""

    kind = "WIDTH"

    def query_offsets(self, part: Tensor, token: Tensor, head: Tensor) -> Tensor:
        return _signed(super().query_offsets(part, token, head))


class OutOffsets(Kernel):
    """Rows of the output are found by 32 signed bits."""

    kind = "WIDTH"

    def out_offsets(self, token: Tensor, head: Tensor) -> Tensor:
        return _signed(super().out_offsets(token, head))


FAULTS = (SignedOffsets, UnsignedOffsets, ByteOffsets, SignedByteOffsets, QueryOffsets, OutOffsets)
