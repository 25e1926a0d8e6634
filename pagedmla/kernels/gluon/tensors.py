"""What the kernels take of the given tensors: rows that are copied 16 bytes at a time.

The copy engine (TMA), which the kernel for many rows uses, takes matrices: rows at even distances, which it counts in i32
(CUDA driver API, cuTensorMapEncodeTiled).  Threads copy rows from wherever they lie.  A query that is otherwise is copied; a
cache that is otherwise is refused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.support import Refusal
from pagedmla.kernels.gluon.choice import Choice, refuses_count
from pagedmla.kernels.gluon.layouts import TILE

BLOCK_ROWS = 64
"""Rows of what is copied at once, of keys and of many heads' queries."""

_ALIGNMENT = 16
_MOST_ROWS = 2**31 - 1
_MOST_STRIDE = 2**40


class Rows(NamedTuple):
    """A matrix [num_rows, width] in memory of a tensor.

    Attributes:
        base: the tensor whose first number is the matrix's.
        num_rows, width: rows, and numbers of a row.
        stride: numbers from one row to the next.
    """

    base: Tensor
    num_rows: int
    width: int
    stride: int

    def descriptor(self, columns: int, rows: int = BLOCK_ROWS) -> TensorDescriptor:
        """For copies of [rows, columns]."""
        shape, strides = [self.num_rows, self.width], [self.stride, 1]
        return TensorDescriptor(self.base, shape, strides, [rows, columns], TILE)


class QueryParts(NamedTuple):
    """The queries as a kernel reads them.

    Attributes:
        latent, rope: [num_tokens, num_heads, ...]; they may be the same tensor.
        rope_column: where the rotated part begins in a row of the second.
    """

    latent: Tensor
    rope: Tensor
    rope_column: int


def query_bytes(num_tokens: int, num_heads: int, head_dim_qk: int) -> int:
    """Bytes that packed copies of the queries take, whatever the address of the memory for them."""
    return 2 * num_tokens * num_heads * head_dim_qk + _ALIGNMENT


def query_parts(args: DecodeArguments, choice: Choice, room: Tensor | None) -> QueryParts:
    """The queries where they lie, or packed copies in ``room``.

    Args:
        args: checked.
        choice: the kernel.
        room: uint8 [at least ``query_bytes``], written only where a copy is needed; None: torch's allocator gives memory then.
    """
    latent, room = _readable(args.q, choice, room)
    if args.q_pe is None:
        return QueryParts(latent, latent, args.kv_lora_rank)
    return QueryParts(latent, _readable(args.q_pe, choice, room)[0], 0)


def is_in_place(args: DecodeArguments, choice: Choice) -> bool:
    """Whether the queries need no copy."""
    return all(part is None or _reads(choice, part) for part in (args.q, args.q_pe))


def _readable(part: Tensor, choice: Choice, room: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``part`` or a packed copy of it, and what is left of ``room``."""
    if _reads(choice, part):
        return part, room
    if room is None:
        return part.clone(memory_format=torch.contiguous_format), None
    room = room[-room.data_ptr() % _ALIGNMENT :]
    size = part.numel() * part.element_size()
    return room[:size].view(part.dtype).view(part.shape).copy_(part), room[size:]


def _reads(choice: Choice, part: Tensor) -> bool:
    """Whether the kernel can read ``part`` of the queries where it lies."""
    if choice.kernel == "many_heads":
        return _matrix_or_none(part) is not None
    # the threads of the kernel for few rows find each by its own strides; a lone one has no next
    sizes, strides = part.shape[:2], part.stride()[:2]
    apart = [stride for size, stride in zip(sizes, strides, strict=True) if size > 1]
    return not any(_misfit(part, stride) for stride in apart or [0])


def matrix_of(part: Tensor) -> Rows:
    """A part of ``query_parts`` for the kernel for many rows as [num_tokens * num_heads, width].

    Raises:
        ValueError: its rows do not lie at even distances.
    """
    found = _matrix_or_none(part)
    if found is None:
        raise ValueError(
            f"rows at even distances wanted, got shape {tuple(part.shape)}, strides {part.stride()}"
        )
    return found


def _matrix_or_none(part: Tensor) -> Rows | None:
    """[num_tokens, num_heads, width] as [num_tokens * num_heads, width], or None where its rows lie otherwise."""
    num_tokens, num_heads, width = part.shape
    token_stride, head_stride = part.stride()[:2]
    if num_heads == 1:
        stride = token_stride
    elif num_tokens == 1 or token_stride == num_heads * head_stride:
        stride = head_stride
    else:
        return None
    if num_tokens * num_heads == 1:
        # the only row has no next one
        stride = width
    if stride < width or _misfit(part, stride):
        return None
    return Rows(part, num_tokens * num_heads, width, stride)


def _misfit(tensor: Tensor, stride: int) -> str:
    """What of the address or of the distance between rows, in numbers, no kernel takes; empty where both fit."""
    num_bytes = stride * tensor.element_size()
    if tensor.data_ptr() % _ALIGNMENT:
        return f"address {hex(tensor.data_ptr())}"
    if num_bytes % _ALIGNMENT or num_bytes >= _MOST_STRIDE:
        return f"{num_bytes} bytes from one row to the next"
    return ""


def cache_rows(kv_cache: Tensor) -> tuple[Rows, int]:
    """A cache that ``refuses_tensors`` takes: (its tokens as rows, rows from one page to the next).

    Pages may lie apart, as one layer's do in a pool of many: what lies between them are rows that nobody asks for.
    """
    num_pages, page_size, width = kv_cache.shape
    page_stride, token_stride = _cache_strides(kv_cache)
    rows_per_page = page_stride // token_stride if num_pages > 1 else 0
    return Rows(kv_cache, (num_pages - 1) * rows_per_page + page_size, width, token_stride), rows_per_page


def _cache_strides(kv_cache: Tensor) -> tuple[int, int]:
    """Numbers from one page to the next, and from one token to the next."""
    num_pages, page_size, width = kv_cache.shape
    page_stride, token_stride = kv_cache.stride()[:2]
    if page_size > 1:
        return page_stride, token_stride
    # a page's only token has no next one in it: whatever its stride says, the next page's is the next
    return page_stride, page_stride if num_pages > 1 else width


def refuses_tensors(args: DecodeArguments) -> Refusal | None:
    """Why no kernel takes this call though the problem is its own, or None.  Looks at sizes, strides and addresses."""
    num_pages, _, width = args.kv_cache.shape
    if num_pages == 0:
        return None
    page_stride, token_stride = _cache_strides(args.kv_cache)
    misfit = _misfit(args.kv_cache, token_stride)
    if misfit:
        wanted = f"an address and a distance between tokens that are multiples of {_ALIGNMENT} bytes"
        return Refusal("gluon", "alignment", "kv_cache", wanted, misfit)
    if token_stride < width or (num_pages > 1 and page_stride % token_stride):
        wanted = f"tokens at least {width} numbers apart, and pages a whole number of tokens apart"
        return Refusal("gluon", "strides", "kv_cache", wanted, f"strides {tuple(args.kv_cache.stride())}")
    num_rows = cache_rows(args.kv_cache)[0].num_rows
    if num_rows > _MOST_ROWS:
        wanted = f"at most {_MOST_ROWS} tokens from the first to the last, those of other layers between them included"
        return Refusal("gluon", "num_rows", "kv_cache", wanted, str(num_rows))
    return refuses_count(args)
