"""The union of softmax states over disjoint sets of keys (flash-decoding's second stage).

A state is (out, lse): the attention over some keys, and the natural logarithm of the sum of their exponentials.
"""

from __future__ import annotations

import torch


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges states along the first dimension, in order.

    Args:
        outs: f32 or f64 [states, ..., dv].
        lses: the same dtype [states, ...], natural logarithm; -inf for a state without keys.

    Returns:
        out [..., dv] and lse [...]: lse = log sum_i exp(lse_i), out = sum_i exp(lse_i - lse) out_i.  A state without keys is
        the identity, bit for bit, whatever its ``out`` holds; without any other, (0, -inf).  A NaN in a state with keys
        stays visible.
    """
    # lse may be -inf everywhere: shifting by a finite number keeps exp() away from inf - inf
    shift = lses.amax(0).clamp_(min=torch.finfo(lses.dtype).min)
    weights = (lses - shift).exp_()
    total = weights.sum(0)
    safe_total = torch.where(total == 0, 1.0, total)
    merged = torch.zeros_like(outs[0])
    for out, lse, weight in zip(outs, lses, weights, strict=True):
        merged += torch.where((lse == -torch.inf)[..., None], 0.0, out * (weight / safe_total)[..., None])
    return merged, shift + total.log()
