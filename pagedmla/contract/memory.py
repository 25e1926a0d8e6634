"""Which tensors may lie on which: an output must be memory of its own, or rows are overwritten before they are read."""

from __future__ import annotations

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.errors import InvalidArgument


def check_memory(args: DecodeArguments, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Refuses outputs and workspaces that lie on an input or on each other, and outputs that lie on themselves.

    Looks at addresses only, so it is for real tensors.  It is exact: views of one buffer that interleave without sharing a
    byte are fine.  Tensors far apart cost a comparison of two ranges each.

    Raises:
        InvalidArgument: names the tensor that would be written and what it lies on.
    """
    written = {"out": out, "lse": lse}
    if args.workspace is not None:
        written["workspace"] = args.workspace
    read = {"q": args.q, "q_pe": args.q_pe, "kv_cache": args.kv_cache, "block_table": args.block_table}
    read |= {"seq_lens": args.seq_lens, "cu_seqlens_q": args.cu_seqlens_q}
    # where each tensor lies is worked out once: this runs in every call
    checked = [(name, tensor, _byte_range(tensor)) for name, tensor in read.items() if tensor is not None]
    for name, tensor in written.items():
        if _overlaps_itself(tensor):
            got = f"strides {tuple(tensor.stride())} for {list(tensor.shape)}"
            raise InvalidArgument("overlap", name, "memory of its own for every element", got)
        first, end = _byte_range(tensor)
        for other_name, other, (other_first, other_end) in checked:
            if end > other_first and other_end > first and _share_memory(tensor, other):
                raise InvalidArgument(
                    "overlap", name, f"memory apart from {other_name}'s", "overlapping memory"
                )
        checked.append((name, tensor, (first, end)))


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of ``tensor`` and the one past its last, in bytes; nothing for one without elements."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = 0
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * step
    return first, first + (last + 1) * tensor.element_size()


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device:
        # addresses of different devices have nothing to do with each other
        return False
    a_starts, a_width = _pieces(a)
    b_starts, b_width = _pieces(b)
    # for each piece of a, the last piece of b that starts at or before it, and the first one after it
    at = torch.searchsorted(b_starts, a_starts, right=True)
    before = (at > 0) & (b_starts[(at - 1).clamp(min=0)] + b_width > a_starts)
    after = (at < b_starts.numel()) & (b_starts[at.clamp(max=b_starts.numel() - 1)] < a_starts + a_width)
    return bool((before | after).any())


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    if tensor.numel() < 2 or tensor.is_contiguous() or _is_nested(tensor):
        return False
    starts, width = _pieces(tensor)
    pieces = tensor.numel() * tensor.element_size() // width
    return starts.numel() < pieces or bool((starts[1:] - starts[:-1] < width).any())


def _is_nested(tensor: torch.Tensor) -> bool:
    """Whether each dimension steps over all of the smaller ones, as in slices and transposes: no two elements meet then."""
    extent = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step < extent:
                return False
            extent += step * (size - 1)
    return True


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Addresses of a tensor's contiguous pieces, ascending and each once, and the bytes of a piece."""
    sizes, steps, width = list(tensor.shape), list(tensor.stride()), 1
    while sizes and (sizes[-1] == 1 or steps[-1] == width):
        width *= sizes.pop()
        steps.pop()
    starts = torch.zeros((), dtype=torch.int64, device="cpu")
    for size, step in zip(sizes, steps, strict=True):
        starts = starts[..., None] + torch.arange(size, device="cpu") * step
    addresses = starts.flatten() * tensor.element_size() + tensor.data_ptr()
    return addresses.unique(), width * tensor.element_size()
