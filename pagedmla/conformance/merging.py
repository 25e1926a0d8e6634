"""Attending to pieces of the keys and merging: how far the merged result may be from one pass.

Notation.  The keys of a row are cut into pieces.  Piece k alone has the exact result o_k and the exact logarithm L_k of its sum
of exponentials.  With L = log sum_k exp(L_k) and w_k = exp(L_k - L), one pass is exactly o = sum_k w_k o_k.  A correct kernel
returns o_k + eps_k and L_k + delta_k with

    |eps_k| <= b_k ,  |delta_k| <= d_k = LSE_ABSOLUTE + (LSE_RELATIVE + lse_rounding) |L_k| + lse_slack_k ,

where b_k is the piece's own bound of ``numerics``, and lse_slack_k its slack where weights are summed rounded (step 5 there).

1. Output.  With f_k = exp(delta_k) and Z = sum_k w_k f_k the merge weighs piece k by w_k f_k / Z.  Since
   sum_k w_k (o_k - o) = 0, exactly

       merged - o  =  (1 / Z) sum_k w_k f_k eps_k  +  (1 / Z) sum_k w_k (f_k - 1) (o_k - o) ,

   and 1 / Z <= exp(D), D = sum_k w_k d_k, by Jensen.  So

       bound = exp(D) sum_k w_k (exp(d_k) b_k + (exp(d_k) - 1) |o_k - o|) .

2. Logarithm.  merged - L = log sum_k w_k exp(delta_k) is at least -D, by Jensen, and at most

       lse_bound = log sum_k w_k exp(d_k) ,  which is at least D, by Jensen again.

3. The merge itself is worked out here, in float64 and with natural logarithms: for K pieces at most (8 + 2 K + 4 max |L_k|)
   roundings of a weight, each 2^-53, are added to both bounds.

A piece without keys has w_k = 0, and its result (0, -inf) adds nothing; where every piece is empty the merge is exactly that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagedmla.conformance import numerics
from pagedmla.conformance.adapters.adapter import Options
from pagedmla.conformance.builder import Batch, draw_batch, lay_out
from pagedmla.conformance.changed_calls import expect_call, run_changed
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Broken, Refused, Result, Step, Subject

Pieces = Sequence[Sequence[Tensor]]
"""[piece][sequence]: i64 positions of the sequence's tokens that lie in the piece; every token in exactly one."""

_U64 = 2.0**-53


@dataclass(frozen=True)
class MergedBound:
    """How far a merge may be from one pass; f64 on the CPU, 0 in rows that see no key in any piece.

    Attributes:
        out: [T, H, kv_lora_rank].
        lse: [T, H].
    """

    out: Tensor
    lse: Tensor


def merge(results: Sequence[Result]) -> tuple[Tensor, Tensor]:
    """Merges the results of pieces in float64, by natural logarithms.

    Args:
        results: of each piece, in the contract's conventions: a row without keys is (0, -inf).

    Returns:
        out f64 [T, H, kv_lora_rank] and lse f64 [T, H], on the CPU.  A nan in any piece stays visible.
    """
    outs = torch.stack([result.out.cpu().double() for result in results])
    logs = torch.stack([_lse(result).cpu().double() for result in results])
    weights, lse = _weights(logs)
    return (weights * outs).sum(0), lse


def merged_bound(pieces: Sequence[numerics.Expected], lse_rounding: float = 0.0) -> MergedBound:
    """The bounds that are derived above.

    Args:
        pieces: what is right for each piece, with its bound.
        lse_rounding: unit roundoff of the dtype that the kernel rounds its lse to, where that is not float32.
    """
    outs, logs = (torch.stack([getattr(piece, name) for piece in pieces]) for name in ("out", "lse"))
    weights, lse = _weights(logs)
    seen = (lse != -torch.inf)[..., None]
    largest = torch.where(logs == -torch.inf, 0.0, logs.abs())
    lse_error = torch.stack([numerics.lse_tolerance(piece, lse_rounding) for piece in pieces])
    lse_bound = (weights[..., 0] * torch.exp(lse_error)).sum(0).log()
    # a row without keys has no bound of its own: what stands there is the poison that its query holds
    bounds = torch.stack([piece.bound for piece in pieces]).masked_fill(logs[..., None] == -torch.inf, 0.0)
    apart = (outs - (weights * outs).sum(0)).abs()
    d = lse_error[..., None]
    error = (weights * (torch.exp(d) * bounds + torch.expm1(d) * apart)).sum(0)
    roundings = (8 + 2 * len(pieces) + 4 * largest.amax(0)) * _U64
    out_bound = torch.exp((weights * d).sum(0)) * error + roundings[..., None] * outs.abs().amax(0)
    return MergedBound(
        torch.where(seen, out_bound, 0.0), torch.where(seen[..., 0], lse_bound + roundings, 0.0)
    )


def check_merged(
    subject: Subject,
    spec: BatchSpec,
    options: Options,
    pieces: Pieces,
    note: str,
    order: Sequence[int] | None = None,
) -> None:
    """Attends to each piece, merges, and holds the merge against the oracle's one pass over all keys.

    Args:
        spec: the whole batch; a query may not hide keys (one query token each, or not causal), as a piece does not know
            where its keys stood.
        pieces: who has which token.
        note: what the pieces are, in words.
        order: in which order the pieces are attended to; None: as they come.

    Raises:
        Broken: a piece's result is malformed, or the merge is not one pass.
        Refused: the implementation does not take a piece, or returns no lse.
    """
    subject.require(spec, options)
    conventions = subject.conventions(spec, options)
    if conventions.lse_base is None:
        raise Refused("returns no lse")
    batch = draw_batch(spec)
    results, expected = [], []
    for number in range(len(pieces)) if order is None else order:
        tokens = tuple(keys[mine] for keys, mine in zip(batch.tokens, pieces[number], strict=True))
        lens = tuple(len(keys) for keys in tokens)
        call = lay_out(
            Batch(batch.queries, tokens), replace(spec, seq_lens=lens, layout_seed=spec.layout_seed + number)
        )
        results.append(
            run_changed(subject, call.to(subject.device), options, f"{note}; piece {number} of them")
        )
        expected.append(expect_call(subject, call, options))
    whole = subject.expected(spec, options)
    detail = merged_difference(merge(results), whole, merged_bound(expected, conventions.lse_rounding))
    if detail:
        raise Broken(f"{detail}: {note}, then merged", Step(spec, options, note))


def merged_difference(merged: tuple[Tensor, Tensor], whole: numerics.Expected, bound: MergedBound) -> str:
    """Where a merge is not one pass, in words; empty when it is.

    Args:
        merged: (out, lse) of ``merge``.
        whole: one pass over all keys; its own bound is not used.
        bound: of ``merged_bound``.
    """
    out, lse = merged
    # the logarithm has a bound of its own, so the right one stands in for it here
    comparison = numerics.compare(out, whole.lse, numerics.Expected(whole.out, whole.lse, bound.out))
    if not comparison.passed:
        return comparison.detail
    error = torch.where(lse == whole.lse, 0.0, (lse - whole.lse).abs())
    wrong = (~(error <= bound.lse)).nonzero().tolist()
    if not wrong:
        return ""
    place = tuple(wrong[0])
    values = f"{lse[place].item():.9g} where {whole.lse[place].item():.9g} is right"
    return f"lse{list(place)} is {values}, bound {bound.lse[place].item():.3e}"


def _lse(result: Result) -> Tensor:
    if result.lse is None:
        raise Refused("returns no lse")
    return result.lse


def _weights(logs: Tensor) -> tuple[Tensor, Tensor]:
    """(f64 [pieces, T, H, 1], f64 [T, H]): each piece's share, and the merged logarithm; empty rows have shares of 0."""
    lse = torch.logsumexp(logs, dim=0)
    return torch.exp(logs - torch.where(lse == -torch.inf, 0.0, lse))[..., None], lse
