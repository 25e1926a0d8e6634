"""MODEL: the scale that was given is used, and the absorbed form is the attention that the model was trained with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedmla import reference
from pagedmla.conformance import numerics
from pagedmla.conformance.adapters.adapter import Options
from pagedmla.conformance.builder import Call
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import seeds, specs
from pagedmla.conformance.subject import Broken, Refused, Step, Subject, blind_rows

_GUESSES = (*(dim**-0.5 for dim in (576, 512, 320, 192, 128, 64)), 1.0)
"""Scales that code guesses from a head size, or leaves out: where one of them is right, the guess would not show."""
_DECADES = (-3.0, 1.0)
_V_HEAD_DIM = 5
# both ways of computing the same thing in float64, some thousand roundings each, and far below any kernel's bound
_FLOAT64 = 2.0**-32


@st.composite
def _scales(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    """A batch with any softmax_scale; queries are as large as its scores need."""
    scale = 10.0 ** draw(st.floats(*_DECADES).filter(_is_no_guess))
    spread = draw(st.sampled_from((0.5, 1.7, 4.0)))
    # the softmax of a single key is 1 for every scale
    return draw(specs(scope.configuration, least=2, softmax_scale=scale, spread=spread)), draw(
        scope.options()
    )


def _is_no_guess(decade: float) -> bool:
    return all(abs(decade - math.log10(guess)) > 0.02 for guess in _GUESSES)


def _is_right(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    subject.checked(spec, options)


@st.composite
def _models(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, int, Any]:
    """A batch, the seed of its up-projections, options."""
    q_len = draw(st.sampled_from((1, 1, 3)))
    spec = draw(specs(scope.configuration, max_seqs=2, max_q_len=q_len, even=True, least=2))
    return spec, draw(seeds), draw(scope.options())


def _absorbed_equals_unabsorbed(subject: Subject, example: tuple[BatchSpec, int, Any]) -> None:
    """decode, then W_UV, against multi-head attention over decompressed keys and values.

    out is within bound of the exact o, so W_UV out is within |W_UV| bound of W_UV o.
    """
    spec, seed, options = example
    subject.require(spec, options)
    call = subject.build(spec)
    # not held against the oracle here: this is the other derivation, which must be able to fail by itself
    result = subject.run(call, options)
    q_nope, q_pe, w_uk = _unabsorbed(call, seed)
    shape = (spec.num_heads, _V_HEAD_DIM, spec.kv_lora_rank)
    w_uv = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    wanted = reference.multi_head(
        q_nope, q_pe, call.kv_cache, call.block_table, call.seq_lens, w_uk, w_uv,
        softmax_scale=call.softmax_scale, cu_seqlens_q=call.cu_seqlens_q, causal=call.causal, kv_scale=call.kv_scale,
    )  # fmt: skip
    got = reference.up_project(result.out.cpu(), w_uv)
    expected = subject.expected(spec, options)
    # a row that sees no key holds poison in its query, and its bound, which is 0, is computed from it
    bound = torch.where(blind_rows(spec)[:, None, None], 0.0, expected.bound) + _FLOAT64 * _largest(call)
    allowed = reference.up_project(bound, w_uv.abs())
    wrong = ~((got - wanted).abs() <= allowed)
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        values = f"{got[index].item():.9g} where {wanted[index].item():.9g} is right"
        detail = f"value{list(index)} after W_UV is {values}, bound {allowed[index].item():.3e}"
        raise Broken(f"{detail}: multi-head attention gives another result", Step(spec, options))


def _unabsorbed(call: Call, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q_nope [T, H, n], q_pe [T, H, rope], W_UK [H, n, kv_lora_rank]), f64, such that W_UK^T q_nope is the call's query.

    The stored queries of a head and some random rows make up B [n, kv_lora_rank].  With an orthogonal A, W_UK = A^T B, and
    token t's q_nope = A^T e_t: then W_UK^T q_nope = B^T A A^T e_t, which is row t of B, the query as it was stored.
    """
    generator = torch.Generator().manual_seed(seed)
    queries = _stored(call.q, call.q_scale)
    queries[blind_rows(call.spec)] = 0.0  # they hold poison
    tokens, heads, rank = *queries.shape[:2], call.kv_lora_rank
    size = tokens + 3
    basis = torch.randn(heads, size, rank, generator=generator, dtype=torch.float64)
    basis[:, :tokens] = queries[..., :rank].transpose(0, 1)
    rotation = torch.linalg.qr(torch.randn(heads, size, size, generator=generator, dtype=torch.float64)).Q
    return rotation[:, :tokens].transpose(0, 1), queries[..., rank:], rotation.transpose(1, 2) @ basis


def _stored(tensor: Tensor, scale: float | None) -> Tensor:
    numbers = tensor.cpu().double()
    return numbers if scale is None else numbers * torch.tensor(scale, dtype=torch.float32).double()


def _largest(call: Call) -> Tensor:
    """The largest finite number of the cache, which no output passes."""
    return _stored(call.kv_cache, call.kv_scale).nan_to_num(0.0, 0.0, 0.0).abs().max()


@st.composite
def _orders(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, int, str, Any]:
    """A batch, the seed of an order of the rotated numbers, whose are put into it, options."""
    spec = draw(specs(scope.configuration, max_seqs=3, least=2))
    return spec, draw(seeds), draw(st.sampled_from(("both", "q", "kv_cache"))), draw(scope.options())


def _rotated_numbers_pair_up(subject: Subject, example: tuple[BatchSpec, int, str, Any]) -> None:
    spec, seed, which, options = example
    if spec.qk_rope_head_dim < 2:
        raise Refused("there are no rotated numbers to put into another order")
    subject.require(spec, options)
    order = torch.randperm(spec.qk_rope_head_dim, generator=torch.Generator().manual_seed(seed))
    call = subject.build(spec)
    names = ("q", "kv_cache") if which == "both" else (which,)
    changes: dict[str, Any] = {name: _reordered(getattr(call, name), spec, order) for name in names}
    moved = replace(call, **changes)
    note = f"the rotated numbers of {' and '.join(names)} in the order of torch.randperm with seed {seed}"
    result = subject.run(moved, options)
    if which == "both":
        # a sum in another order: exactly the same scores
        subject.check(result, spec, options, note)
        return
    _check_changed(subject, moved, result.out, spec, options, note)


def _check_changed(
    subject: Subject, call: Call, out: Tensor, spec: BatchSpec, options: Options, note: str
) -> None:
    """Other scores: the oracle's of the changed call, unless they are so near that a kernel could miss the change."""
    p_dtype = subject.conventions(spec, options).p_dtype or spec.q_dtype
    before = subject.expected(spec, options)
    after = numerics.expect(
        call.q, call.kv_cache, call.block_table, call.seq_lens,
        out_dtype=out.dtype, p_dtype=p_dtype, **call.semantics(),  # type: ignore[arg-type]
    )  # fmt: skip
    if bool(((after.out - before.out).abs() <= before.bound + after.bound).all()):
        raise Refused("the order of the rotated numbers makes no difference here")
    comparison = numerics.compare(out, after.lse.float(), after)
    if not comparison.passed:
        raise Broken(comparison.detail, Step(spec, options, note))


def _reordered(tensor: Tensor, spec: BatchSpec, order: Tensor) -> Tensor:
    places = torch.cat([torch.arange(spec.kv_lora_rank), spec.kv_lora_rank + order]).to(tensor.device)
    return tensor[..., places].contiguous()


PROPERTIES = (
    Property(
        "MODEL",
        "scale",
        "the softmax_scale that is given is used, whatever its size, and never guessed from a head size",
        _scales,
        _is_right,
    ),
    Property(
        "MODEL",
        "absorbed",
        "decode and the value up-projection give ordinary multi-head attention over decompressed keys and values",
        _models,
        _absorbed_equals_unabsorbed,
        share=0.5,
    ),
    Property(
        "MODEL",
        "rotated-order",
        "one order of the rotated numbers for queries and keys changes nothing; for one of them alone it counts",
        _orders,
        _rotated_numbers_pair_up,
    ),
)
