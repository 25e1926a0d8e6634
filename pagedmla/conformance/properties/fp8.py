"""FP8: every code is read as its format has it, and a scale multiplies keys and values on reading, once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.conformance.builder import Batch, Call, draw_batch, lay_out
from pagedmla.conformance.changed_calls import check_changed
from pagedmla.conformance.inputs import KV_SCALE
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import seeds, specs
from pagedmla.conformance.subject import Broken, Step, Subject, first_difference
from pagedmla.reference import float8_table

SCALES = (2.0**-7, 0.06, 1.0, 2.0, 2.0**7)
_FORMATS = ("e4m3fn", "e4m3fnuz")
# codes drawn evenly have a root mean square of about 100: with this scale they are about as large as other tokens
_CODE_SCALE = 0.0103
_MOST_CODED = 40
# sign 1 bit, exponent 4, mantissa 3: a step of the exponent, and its field
_EXPONENT_STEP, _EXPONENT_MASK = 1 << 3, 0b1111 << 3

Example = tuple[BatchSpec, Any]


def _formats(scope: Scope) -> st.SearchStrategy[dict[str, Any]]:
    """dtypes of queries and an fp8 cache: the pairs that the implementation takes, or all, so that it can say why not."""
    own = scope.configuration.spec(()).dtype
    pairs = [{"dtype": dtype, "kv_dtype": kv} for kv in _FORMATS for dtype in dict.fromkeys((own, kv))]
    taken = [
        pair
        for pair in pairs
        if any(
            scope.adapter.refuses(scope.configuration.spec((1,), **pair), options, scope.device) is None
            for options in scope.adapter.options
        )
    ]
    return st.sampled_from(taken or pairs)


@st.composite
def _batches(draw: st.DrawFn, scope: Scope) -> Example:
    return draw(specs(scope.configuration, **draw(_formats(scope)))), draw(scope.options())


@st.composite
def _scaled(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, float, Any]:
    spec, options = draw(_batches(scope))
    return spec, draw(st.sampled_from(SCALES)), options


def _scale_is_right(subject: Subject, example: tuple[BatchSpec, float, Any]) -> None:
    spec, scale, options = example
    subject.require(spec, options)
    # scores would grow with the scale, far past what a softmax can show
    softmax_scale = spec.softmax_scale * KV_SCALE / scale
    call = replace(subject.build(spec), kv_scale=scale, softmax_scale=softmax_scale)
    check_changed(subject, call, options, f"kv_scale={scale}, softmax_scale={softmax_scale}")


@st.composite
def _coded(draw: st.DrawFn, scope: Scope) -> Example:
    """Short sequences: of one token alone the output is its numbers, exactly."""
    lens = (1, *draw(st.lists(st.integers(1, _MOST_CODED), max_size=2)))
    pair = draw(_formats(scope))
    return scope.configuration.spec(lens, **pair, spread=0.8, seed=draw(seeds)), draw(scope.options())


def _every_code_is_right(subject: Subject, example: Example) -> None:
    spec, options = example
    subject.require(spec, options)
    generator = torch.Generator().manual_seed(spec.seed)
    batch = draw_batch(spec)
    tokens = tuple(_all_codes(keys, generator) for keys in batch.tokens)
    queries, q_scale, note = batch.queries, None, "keys hold every code that is a number"
    if spec.q_dtype.itemsize == 1:
        queries = tuple(_all_codes(rows, generator) for rows in queries)
        q_scale, note = _CODE_SCALE / 4, f"queries and {note}"
    call = replace(lay_out(Batch(queries, tokens), spec), kv_scale=_CODE_SCALE, q_scale=q_scale)
    check_changed(subject, call.to(subject.device), options, f"{note}, kv_scale={_CODE_SCALE}")


def _all_codes(like: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor like ``like`` whose numbers go through every code but nan, again and again, in random order."""
    codes = (~float8_table(like.dtype).isnan()).nonzero().flatten()
    turns = -(-like.numel() // len(codes))
    order = torch.cat([torch.randperm(len(codes), generator=generator) for _ in range(max(1, turns))])
    return codes[order[: like.numel()]].to(torch.uint8).view(like.dtype).reshape(like.shape)


@st.composite
def _halved(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, int, Any]:
    spec, options = draw(_batches(scope))
    return spec, draw(st.integers(1, 3)), options


def _only_the_product_counts(subject: Subject, example: tuple[BatchSpec, int, Any]) -> None:
    spec, halvings, options = example
    subject.require(spec, options)
    batch = draw_batch(spec)
    # a normal number stays one when it is halved, so that nothing is rounded
    stored = [_at_least(keys.view(torch.uint8), 1 + halvings) for keys in batch.tokens]
    results = []
    for halved in (0, halvings):
        tokens = tuple((codes - halved * _EXPONENT_STEP).view(spec.cache_dtype) for codes in stored)
        call = replace(lay_out(Batch(batch.queries, tokens), spec), kv_scale=KV_SCALE * 2**halved)
        note = f"stored numbers divided by {2**halved}, kv_scale multiplied by it"
        results.append(check_changed(subject, call.to(subject.device), options, note))
    difference = first_difference(*results)
    if difference:
        detail = f"{difference}: as stored, and with {note}; powers of two multiply exactly"
        raise Broken(detail, Step(spec, options), Step(spec, options, note))


def _at_least(codes: Tensor, exponent: int) -> Tensor:
    """u8 codes whose exponent field is raised to ``exponent`` where it is smaller."""
    small = (codes & _EXPONENT_MASK) < exponent * _EXPONENT_STEP
    return torch.where(small, (codes & ~_EXPONENT_MASK & 0xFF) | exponent * _EXPONENT_STEP, codes)


@st.composite
def _unscaled(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, float, Any]:
    own = scope.configuration.spec(()).dtype
    spec = draw(specs(scope.configuration, kv_dtype=own))
    return spec, draw(st.sampled_from((0.06, 2.0))), draw(scope.options())


def _a_scale_of_nothing_is_no_scale(subject: Subject, example: tuple[BatchSpec, float, Any]) -> None:
    spec, scale, options = example
    subject.require(spec, options)
    call: Call = replace(subject.build(spec), kv_scale=scale)
    try:
        raw = subject.adapter.prepare(call, options).run()
    except Exception:  # noqa: BLE001 - whatever it says, it said no
        return
    note = f"kv_scale={scale} for a cache of {call.kv_cache.dtype}: neither refused nor ignored"
    try:
        subject.check(subject.normalise(*raw, spec, options), spec, options, note)
    except Broken as broken:
        raise Broken(f"{broken.detail}: {note}", *broken.steps) from broken


PROPERTIES = (
    Property(
        "FP8",
        "fp8-scales",
        "kv_scale multiplies keys and values on reading, once, for any scale",
        _scaled,
        _scale_is_right,
    ),
    Property(
        "FP8",
        "fp8-codes",
        "every code of the format is read as its definition has it, in keys, values and fp8 queries",
        _coded,
        _every_code_is_right,
    ),
    Property(
        "FP8",
        "fp8-product",
        "halving what is stored and doubling the scale is the same cache, to the bit",
        _halved,
        _only_the_product_counts,
    ),
    Property(
        "FP8",
        "fp8-scale-of-nothing",
        "a scale that is given for a cache which is not fp8 is refused, or changes nothing",
        _unscaled,
        _a_scale_of_nothing_is_no_scale,
        needs=frozenset({"validates"}),
    ),
)
