"""How far a correct kernel may be from the float64 oracle: one bound, derived once, and its comparison.

Notation.  One query row and head, n visible keys; s_j its exact scores, p_j its exact probabilities, v_j one
component of the values, o = sum_j p_j v_j.  u = 2^-24 is float32's unit roundoff; gamma_k = k u / (1 - k u)
bounds the relative error of k roundings (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
Inputs were rounded to their dtype before either side saw them, so they add nothing.

1. Scores.  A float32 dot product of d terms in any order, then the scales, log2(e), the subtraction of the
   maximum and exp's own error: the kernel's exponent differs from s_j by at most

       e_j = gamma_k * softmax_scale * sum_i |q_i k_ji|  +  2 u max_i |s_i|  +  8 u ,   k = d + 8 .

   k = d + 8 needs hundreds of roundings that all lean one way.  Roundings of mean zero stay within 8 sqrt(d + 8)
   but for one score in 10^10 (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019,
   inner products with lambda = 8), so k is the smaller of the two: without it, at d = 576, weights rounded to
   bfloat16 would hide in the bound.

2. Softmax.  With factors f_j = exp(delta_j), |delta_j| <= e_j, the kernel weighs by p_j f_j / Z, where
   Z = sum_j p_j f_j.  Since sum_j p_j (v_j - o) = 0, exactly

       sum_j p_j f_j v_j / Z - o  =  (1 / Z) sum_j p_j (f_j - 1) (v_j - o) .

   |f_j - 1| <= w_j = exp(e_j) - 1, and 1 / Z <= exp(sum_j p_j e_j) by Jensen; with Cauchy and Schwarz

       softmax_error = exp(sum_j p_j e_j) * sqrt(sum_j p_j w_j^2) * sqrt(sum_j p_j v_j^2 - o^2) .

   So an error common to all keys cancels, as it does in the kernel, and a key that dominates leaves nothing.
   Two convex combinations of the same values also never differ by more than max_j |v_j| + |o|.

3. Weights and sums.  A weight is rounded to ``p_dtype``, u_p; numerator and denominator are float32 sums over
   the keys in any order, in blocks that are rescaled or splits that are merged: at most one product, one
   addition and one rescaling (its exponential and its product) per key, 4 n roundings.  A = sum_j p_j |v_j|:

       sum_error = (gamma_(4n+8) + u_p) * (A + |o|)  +  t_p sum_j |v_j| ,

   u_p = 0 for float32 (counted already); t_p is what an unnormalised weight loses at its range's bottom.

4. Output.  err = softmax_error + sum_error, then one rounding to the output's dtype, u_out, or half its
   smallest subnormal:

       bound = err + u_out * (|o| + err) + subnormal_out / 2 .

A row that sees no key has bound 0: it is exactly 0.  lse: 1e-5 relative + 1e-5, natural log, -inf exactly.

5. lse of rounded weights.  A kernel that declares it sums weights after they were rounded to ``p_dtype``, and not before: its
   lse is the logarithm of another sum.  A weight is exp(s_j - m), m the largest score so far; rounded to the nearest it is
   off by at most u_p of itself, or by t_p, half the smallest subnormal.  Later rescalings by exp(m - m') <= 1 shrink both.
   The key with the largest score of all has weight exp(0) = 1, which every dtype holds.  Against that key the exact sum is
   Z = 1 / p_max, p_max its probability, so the rounded sum is off, relative to Z, by at most

       delta = u_p (1 - p_max) + (n - 1) t_p p_max ,   and   |log(Z (1 + d)) - log Z| <= -log(1 - delta) = lse_slack

   for every |d| <= delta.  u_p = 2^-8 for bfloat16, 2^-11 for float16.  A row of one key has no slack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedmla import reference

LSE_RELATIVE = 1e-5
LSE_ABSOLUTE = 1e-5
_U32 = 2.0**-24


@dataclass(frozen=True)
class Expected:
    """What a kernel must return, and how far it may be from it; everything f64 on the CPU.

    Attributes:
        out: [T, H, kv_lora_rank].
        lse: [T, H].
        bound: [T, H, kv_lora_rank], the most that each number of ``out`` may be off.
        lse_slack: [T, H], what lse may be off besides its tolerance, since rounded weights are summed; None: nothing.
    """

    out: Tensor
    lse: Tensor
    bound: Tensor
    lse_slack: Tensor | None = None


@dataclass(frozen=True)
class Comparison:
    """The outcome of holding a kernel's results against ``Expected``.

    Attributes:
        passed: everything lies within its bound.
        out_error: largest absolute error of ``out``; nan where a result is not a number.
        out_bound_ratio: largest error divided by its bound; at most 1 passes, inf where a bound of 0 is
            missed.
        out_index: (row, head, component) of that ratio, or None for an empty result.
        lse_error: largest absolute error of ``lse``; inf for a wrong infinity, nan for a nan.
        lse_index: (row, head) of the worst lse, or None for an empty result.
        detail: the first thing that is wrong, in words; empty when passed.
    """

    passed: bool
    out_error: float
    out_bound_ratio: float
    out_index: tuple[int, ...] | None
    lse_error: float
    lse_index: tuple[int, ...] | None
    detail: str


def expect(
    q: reference.Query,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    out_dtype: torch.dtype,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    kv_lora_rank: int = 512,
    q_scale: reference.Scale = None,
    kv_scale: reference.Scale = None,
    p_dtype: torch.dtype = torch.float32,
    lse_of_rounded_weights: bool = False,
) -> Expected:
    """The oracle's result with its bound, in one pass.

    Args:
        out_dtype: dtype of the kernel's output.
        p_dtype: dtype that the kernel rounds softmax weights to before they meet the values.
        lse_of_rounded_weights: whether the kernel says that it sums them for lse after that.
        the others: as for ``pagedmla.decode``.
    """
    first = q[0] if isinstance(q, tuple) else q
    num_tokens, num_heads = first.shape[:2]
    out = torch.zeros(num_tokens, num_heads, kv_lora_rank, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), float("-inf"), dtype=torch.float64)
    bound = torch.zeros_like(out)
    slack = torch.zeros_like(lse) if lse_of_rounded_weights else None
    parts = reference.attend(
        q,
        kv_cache,
        block_table,
        seq_lens,
        softmax_scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        kv_lora_rank=kv_lora_rank,
        q_scale=q_scale,
        kv_scale=kv_scale,
    )
    for part in parts:
        out[part.rows] = part.out()
        lse[part.rows] = part.lse
        bound[part.rows] = output_bound(
            part, softmax_scale=softmax_scale, out_dtype=out_dtype, p_dtype=p_dtype
        )
        if slack is not None:
            slack[part.rows] = lse_slack(part, p_dtype)
    return Expected(out, lse, bound, slack)


def output_bound(
    part: reference.SequenceAttention,
    *,
    softmax_scale: float,
    out_dtype: torch.dtype,
    p_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The most that each output of one sequence may be off, f64 [n_q, H, kv_lora_rank]; derived above.

    Args:
        part: the sequence's attention in float64.
        softmax_scale: multiplies the scores.
        out_dtype: dtype of the kernel's output.
        p_dtype: dtype that the kernel rounds softmax weights to; float32 for the torch backend.
    """
    p, v = part.probabilities, part.values
    num_keys, head_dim = part.keys.shape
    if num_keys == 0:
        return torch.zeros(*p.shape[:2], v.shape[1], dtype=torch.float64)
    out, absolute = p @ v, p @ v.abs()
    error = _softmax_error(part, softmax_scale, head_dim, out)
    u_p = 0.0 if p_dtype == torch.float32 else _unit_roundoff(p_dtype)
    error += (_gamma(4 * num_keys + 8) + u_p) * (absolute + out.abs())
    error += max(torch.finfo(torch.float32).tiny, _half_subnormal(p_dtype)) * v.abs().sum(dim=0)
    bound = error + _unit_roundoff(out_dtype) * (out.abs() + error) + _half_subnormal(out_dtype)
    # not a product: the query of a row that sees nothing may be nan
    return torch.where((part.lse != float("-inf")).unsqueeze(-1), bound, 0.0)


def lse_slack(part: reference.SequenceAttention, p_dtype: torch.dtype) -> Tensor:
    """What the lse of one sequence's rows may be off when weights are summed rounded, f64 [n_q, H]; step 5 above."""
    p = part.probabilities
    if p_dtype == torch.float32 or p.shape[-1] == 0:
        return torch.zeros(p.shape[:2], dtype=torch.float64)
    seen = (part.scores != float("-inf")).sum(dim=-1)
    largest = p.amax(dim=-1)
    delta = _unit_roundoff(p_dtype) * (1 - largest) + (seen - 1) * _half_subnormal(p_dtype) * largest
    # a row that sees nothing is exactly -inf
    return torch.where(seen > 0, -torch.log1p(-delta), 0.0)


def lse_tolerance(expected: Expected, lse_rounding: float = 0.0) -> Tensor:
    """The most that each lse may be off, f64 [T, H].

    Args:
        expected: from ``expect``.
        lse_rounding: unit roundoff of the dtype that the kernel rounds its lse to, where that is not float32.
    """
    size = torch.where(expected.lse == -torch.inf, 0.0, expected.lse.abs())
    tolerance = LSE_ABSOLUTE + (LSE_RELATIVE + lse_rounding) * size
    return tolerance if expected.lse_slack is None else tolerance + expected.lse_slack


def compare(
    out: Tensor,
    lse: Tensor,
    expected: Expected,
    *,
    lse_rounding: float = 0.0,
    lse_limit: float = math.inf,
) -> Comparison:
    """Holds a kernel's results against the oracle's.  A nan never passes; infinities must match exactly.

    Args:
        out: [T, H, kv_lora_rank].
        lse: f32 [T, H].
        expected: from ``expect``.
        lse_rounding: unit roundoff of the dtype that the kernel rounds its lse to, where that is not float32.
        lse_limit: the largest lse that this dtype holds: past it the infinity of its sign is right, too.
    """
    for name, got, wanted in (("out", out, expected.out), ("lse", lse, expected.lse)):
        if got.shape != wanted.shape:
            detail = f"{name} has shape {tuple(got.shape)} where {tuple(wanted.shape)} is right"
            return Comparison(False, math.nan, math.inf, None, math.nan, None, detail)
    out, lse = out.detach().cpu().double(), lse.detach().cpu().double()
    error = (out - expected.out).abs()
    # 0 / 0 is a row without keys that is exactly 0; nan counts as infinitely far
    ratio = torch.where(error == 0, 0.0, error / expected.bound).nan_to_num(nan=math.inf, posinf=math.inf)
    past = torch.where(expected.lse.abs() > lse_limit, math.inf * expected.lse.sign(), expected.lse)
    same = (lse == expected.lse) | (lse == past)
    lse_error = torch.where(same, 0.0, (lse - expected.lse).abs())
    allowed = lse_tolerance(expected, lse_rounding)
    lse_ratio = torch.where(lse_error == 0, 0.0, lse_error / allowed).nan_to_num(
        nan=math.inf, posinf=math.inf
    )
    out_worst, lse_worst = _worst(ratio), _worst(lse_ratio)
    detail = ""
    if ratio.numel() and not bool((ratio <= 1).all()):
        detail = _describe(
            "out", out, expected.out, out_worst, f"bound {expected.bound[out_worst].item():.3e}"
        )
    elif lse_ratio.numel() and not bool((lse_ratio <= 1).all()):
        detail = _describe("lse", lse, expected.lse, lse_worst, f"bound {allowed[lse_worst].item():.3e}")
    return Comparison(
        passed=not detail,
        out_error=error.max().item() if error.numel() else 0.0,
        out_bound_ratio=ratio.max().item() if ratio.numel() else 0.0,
        out_index=out_worst,
        lse_error=lse_error.max().item() if lse_error.numel() else 0.0,
        lse_index=lse_worst,
        detail=detail,
    )


def _softmax_error(
    part: reference.SequenceAttention, softmax_scale: float, head_dim: int, out: Tensor
) -> Tensor:
    """Steps 1 and 2: f64 [n_q, H, kv_lora_rank]."""
    p, v = part.probabilities, part.values
    seen = part.scores != float("-inf")
    scores = torch.where(seen, part.scores, torch.zeros_like(part.scores))
    products = softmax_scale * (part.queries.abs() @ part.keys.abs().T)
    largest = scores.abs().amax(dim=-1, keepdim=True)
    # beyond exp's range the bound by convexity takes over
    roundings = min(head_dim + 8, 8 * math.sqrt(head_dim + 8))
    exponent = (_gamma(roundings) * products + 2 * _U32 * largest + 8 * _U32).clamp(max=300.0)
    spread = torch.sqrt((p * torch.expm1(exponent).square()).sum(dim=-1, keepdim=True))
    normalise = torch.exp((p * exponent).sum(dim=-1, keepdim=True))
    variance = (p @ v.square() - out.square()).clamp(min=0.0)
    by_convexity = torch.where(seen.any(dim=-1, keepdim=True), v.abs().amax(dim=0), 0.0) + out.abs()
    return torch.minimum(normalise * spread * torch.sqrt(variance), by_convexity)


def _gamma(roundings: float) -> float:
    return roundings * _U32 / (1 - roundings * _U32)


def _unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _half_subnormal(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2


def _worst(ratio: Tensor) -> tuple[int, ...] | None:
    if ratio.numel() == 0:
        return None
    return tuple(int(index) for index in torch.unravel_index(ratio.argmax(), ratio.shape))


def _describe(name: str, got: Tensor, wanted: Tensor, index: tuple[int, ...] | None, bound: str) -> str:
    values = f"{got[index].item():.9g} where {wanted[index].item():.9g} is right"
    return f"{name}{list(index or ())} is {values}, {bound}"
