"""Query rows and the numbers that multiply scores and values."""

from __future__ import annotations

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.kernels.torch.scratch import Scratch


def gather_queries(args: DecodeArguments, tokens: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Query rows as float32.

    Args:
        tokens: i64 [units, tile], rows of q; negative ones become some row, which nobody looks at.

    Returns:
        f32 [units, tile * num_heads, head_dim_qk].
    """
    units, tile = tokens.shape
    rows = tokens.clamp(min=0)
    queries = scratch.take((units, tile, args.num_heads, args.head_dim_qk))
    width = args.q.shape[2]
    queries[..., :width].copy_(_rows_of(args.q, rows))
    if args.q_pe is not None:
        queries[..., width:].copy_(_rows_of(args.q_pe, rows))
    return queries.view(units, tile * args.num_heads, args.head_dim_qk)


def _rows_of(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
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
