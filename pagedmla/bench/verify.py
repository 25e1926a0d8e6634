"""Whether a contender's result is right: no number is printed without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedmla.bench.batch import DecodeBatch, ExpectedSequence
from pagedmla.bench.shapes import KV_LORA_RANK
from pagedmla.conformance.numerics import LSE_ABSOLUTE, LSE_RELATIVE


@dataclass(frozen=True)
class Check:
    """The outcome of holding one result against float64.

    Attributes:
        out_error: largest relative error of a sequence's ``out`` in the 2-norm; nan when there is nothing to compare.
        lse_error: largest absolute error of ``lse``; None when none was returned.
        detail: what is wrong, in words; empty when all is right.
    """

    out_error: float
    lse_error: float | None
    detail: str


def allowed_error(dtype: torch.dtype) -> float:
    """The most that ``out`` may be off, relative, in the 2-norm over a sequence.

    Three roundings to ``dtype``, each at most its unit roundoff and none knowing of the others: the softmax weights, the
    partial results of splits (peers keep them in 16 bits) and the output.  1e-5 covers float32's exponentials and sums.
    """
    return math.sqrt(3) * torch.finfo(dtype).eps / 2 + 1e-5


def check_result(
    batch: DecodeBatch, expected: Sequence[ExpectedSequence], out: Tensor, lse: Tensor | None
) -> Check:
    """Holds ``out`` [num_tokens, num_heads, 512] and ``lse`` [num_tokens, num_heads], natural log, against float64.

    Every number must be finite, in the sequences without an oracle too.
    """
    shape = batch.shape
    if tuple(out.shape) != (shape.num_tokens, shape.num_heads, KV_LORA_RANK):
        return Check(math.nan, None, f"out has shape {list(out.shape)}")
    if not bool(torch.isfinite(out).all()):
        return Check(math.nan, None, "out is not finite everywhere")
    if lse is not None and not bool(torch.isfinite(lse).all()):
        return Check(math.nan, math.nan, "lse is not finite everywhere")
    out_error, lse_error, details = 0.0, 0.0, []
    allowed = allowed_error(batch.q.dtype)
    for answer in expected:
        rows = slice(answer.sequence * shape.q_len, (answer.sequence + 1) * shape.q_len)
        error = ((out[rows].double() - answer.out).norm() / answer.out.norm()).item()
        out_error = max(out_error, error)
        if not error <= allowed:
            details.append(f"out of sequence {answer.sequence} is off by {error:.1e}, allowed {allowed:.1e}")
        if lse is not None:
            off = (lse[rows].double() - answer.lse).abs()
            lse_error = max(lse_error, off.max().item())
            if not bool((off <= LSE_ABSOLUTE + LSE_RELATIVE * answer.lse.abs()).all()):
                details.append(f"lse of sequence {answer.sequence} is off by {off.max().item():.1e}")
    return Check(out_error, None if lse is None else lse_error, "; ".join(details))
