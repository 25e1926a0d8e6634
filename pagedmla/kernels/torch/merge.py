"""The union of softmax states over disjoint sets of keys (flash-decoding's second stage).

A state is (out, lse): the attention over some keys, and the natural logarithm of the sum of their exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_states(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges states in the order given: lse = log sum_i exp(lse_i), out = sum_i exp(lse_i - lse) out_i.

    Args:
        outs: f32 or f64 [..., dv] each, at least one.
        lses: the same dtype [...] each, natural logarithm.

    Returns:
        out [..., dv] and lse [...].  A state without keys (lse -inf, or +inf as some kernels write it) is the identity, bit
        for bit, whatever its ``out`` holds; without any other, (0, -inf).  A NaN in a state with keys stays visible.
    """
    stacked = torch.stack(list(lses))
    # no row's sum of exponentials is infinite, so +inf can only be another kernel's word for no keys
    empty = torch.isinf(stacked)
    stacked = stacked.masked_fill(empty, -torch.inf)
    # all states may be empty: shifting by a finite number keeps exp() away from inf - inf
    shift = stacked.amax(0).clamp_(min=torch.finfo(stacked.dtype).min)
    weights = (stacked - shift).exp_()
    total = weights.sum(0)
    shares = weights / torch.where(total == 0, 1.0, total)
    merged = torch.zeros_like(outs[0])
    started = torch.zeros_like(empty[0])
    for out, share, skip in zip(outs, shares, empty, strict=True):
        part = out * share[..., None]
        # the first part is taken as it is: added to 0, it would lose the sign of its zeros
        grown = torch.where(started[..., None], merged + part, part)
        merged = torch.where(skip[..., None], merged, grown)
        started |= ~skip
    # log 1 = 0: spelt out, since adding 0 loses a sign too
    return merged, torch.where(total == 1, shift, shift + total.log())
