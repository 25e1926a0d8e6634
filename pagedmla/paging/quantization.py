"""Per-tensor fp8: what a writer does to a number before it is stored."""

from __future__ import annotations

import torch

from pagedmla.contract.kv_layout import KVLayout


def quantize(values: torch.Tensor, layout: KVLayout, scale: torch.Tensor | float) -> torch.Tensor:
    """Divides by ``scale`` and rounds to the layout's fp8 type, as a reader that multiplies by ``scale`` expects.

    Numbers past the largest finite code become that code: a plain cast makes NaN of them.  NaN stays NaN.

    Args:
        values: numbers of any floating type and shape.
        layout: a scaled layout.
        scale: f32 scalar tensor or float; the stored number is value / scale.
    """
    scaled = values.to(torch.float32) / scale
    return scaled.clamp(-layout.max_value, layout.max_value).to(layout.dtype)
