"""Query rows and the numbers that multiply scores and values."""

from __future__ import annotations

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.kernels.torch.item_group import ItemGroup
from pagedmla.kernels.torch.scratch import Scratch


def gather_queries(args: DecodeArguments, group: ItemGroup, scratch: Scratch) -> torch.Tensor:
    """Query rows as float32, every scale multiplied in: scores are then plain products.

    Args:
        group: its tokens say which rows; an empty place becomes some row, which nobody looks at.

    Returns:
        f32 [splits * units, tile * num_heads, head_dim_qk]: the same rows for each of the group's key ranges.
    """
    queries = scratch.take((group.splits, group.num_units, group.tile, args.num_heads, args.head_dim_qk))
    width = args.q.shape[2]
    queries[..., :width].copy_(_rows_of(args.q, group))
    if args.q_pe is not None:
        queries[..., width:].copy_(_rows_of(args.q_pe, group))
    scaled = queries.mul_(score_scale(args))
    return scaled.view(group.num_items, group.tile * args.num_heads, args.head_dim_qk)


def _rows_of(q: torch.Tensor, group: ItemGroup) -> torch.Tensor:
    """[units, tile, num_heads, width]"""
    if group.consecutive is not None:
        return q[group.consecutive].unsqueeze(1)
    rows = group.tokens.clamp(min=0)
    if q.dtype.itemsize == 1:
        return q.view(torch.uint8)[rows].view(q.dtype)
    return q[rows]


def score_scale(args: DecodeArguments) -> float | torch.Tensor:
    """What multiplies <q, kv> as stored: the softmax scale and the fp8 scales."""
    scale: float | torch.Tensor = args.softmax_scale
    for factor in (args.q_scale, args.kv_scale):
        if factor is not None:
            scale = scale * (factor.reshape(()) if isinstance(factor, torch.Tensor) else factor)
    return scale


def value_scale(args: DecodeArguments) -> float | torch.Tensor | None:
    """What multiplies the values as stored."""
    return args.kv_scale.reshape(()) if isinstance(args.kv_scale, torch.Tensor) else args.kv_scale
