"""MEM: memory that a row does not own changes nothing, and is changed by nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Options
from pagedmla.conformance.builder import Call
from pagedmla.conformance.inputs import GUARD_VALUE, POISONS
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import specs
from pagedmla.conformance.subject import Broken, Result, Step, Subject, first_difference

_GUARD_ROWS = 16
"""Rows before and after out and lse that must stay: as many as a tile of rows that goes too far."""


def nan_outputs(subject: Subject, spec: BatchSpec, options: Options) -> tuple[Tensor, Tensor | None]:
    """(out [T, H, kv_lora_rank], lse [T, H]) full of nan to write into; no lse where the implementation has none."""
    conventions = subject.conventions(spec, options)
    rows = (spec.starts[-1] + spec.rows_after, spec.num_heads)
    dtype = torch.bfloat16 if spec.q_dtype.itemsize == 1 else spec.q_dtype
    out = torch.full((*rows, spec.kv_lora_rank), math.nan, dtype=dtype, device=subject.device)
    if conventions.lse_base is None:
        return out, None
    return out, torch.full(rows, math.nan, dtype=conventions.lse_dtype, device=subject.device)


@st.composite
def padded_specs(draw: st.DrawFn, scope: Scope) -> BatchSpec:
    """Batches of one query token each, of several, and with rows of q that are nobody's."""
    even, max_q_len = draw(st.sampled_from(((True, 1), (True, 1), (True, 3), (False, 3))))
    spec = draw(specs(scope.configuration, max_q_len=max_q_len, even=even))
    if even:
        return spec
    return replace(spec, rows_before=draw(st.integers(0, 2)), rows_after=draw(st.integers(0, 3)))


@st.composite
def _poisons(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, str, Any]:
    """A batch with one poison around it, another poison, options."""
    one, two = draw(st.permutations(POISONS))[:2]
    return replace(draw(padded_specs(scope)), poison=one), two, draw(scope.options())


def _poison_changes_no_bit(subject: Subject, example: tuple[BatchSpec, str, Any]) -> None:
    spec, poison, options = example
    other = replace(spec, poison=poison)
    one = subject.run(subject.build(spec), options)
    two = subject.run(subject.build(other), options)
    difference = first_difference(one, two)
    if difference:
        detail = f"{difference}: memory that nobody owns held {spec.poison} in one and {poison} in the other"
        raise Broken(detail, Step(spec, options), Step(other, options))
    subject.check(one, spec, options)


@st.composite
def _guarded(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    return draw(padded_specs(scope)), draw(scope.options())


def _guards_stay(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    subject.require(spec, options)
    given: dict[str, Tensor | None] = {}
    storages = []
    for name, tensor in zip(("out", "lse"), nan_outputs(subject, spec, options), strict=True):
        given[name] = None
        if tensor is not None:
            shape = (len(tensor) + 2 * _GUARD_ROWS, *tensor.shape[1:])
            storages.append((name, tensor.new_full(shape, GUARD_VALUE)))
            given[name] = storages[-1][1][_GUARD_ROWS:-_GUARD_ROWS].copy_(tensor)
    out = given["out"]
    if out is None:  # nan_outputs always has one; this is for the type checker
        return
    subject.run(subject.build(spec), options, out, given["lse"])
    for name, storage in storages:
        for place, rows in (("before", storage[:_GUARD_ROWS]), ("after", storage[-_GUARD_ROWS:])):
            if not bool((rows == GUARD_VALUE).all()):
                raise Broken(f"memory {place} {name} was written", Step(spec, options))
    subject.check(subject.normalise(out, given["lse"], spec, options), spec, options)


def _inputs_stay(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    subject.require(spec, options)
    call = subject.build(spec)
    names = [name for name in vars(call) if isinstance(getattr(call, name), Tensor)]
    before = {name: _bytes(call, name) for name in names}
    subject.run(call, options)
    for name in names:
        if not torch.equal(before[name], _bytes(call, name)):
            raise Broken(f"{name} was written by the call, which may only read it", Step(spec, options))


def _bytes(call: Call, name: str) -> Tensor:
    return getattr(call, name).clone().view(torch.uint8)


@st.composite
def _calls(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any, BatchSpec, Any]:
    """Two batches and how each is called."""
    one, two = draw(padded_specs(scope)), draw(padded_specs(scope))
    return one, draw(scope.options()), two, draw(scope.options())


def _earlier_calls_leave_nothing(subject: Subject, example: tuple[BatchSpec, Any, BatchSpec, Any]) -> None:
    one, options, two, other_options = example
    subject.require(two, other_options)
    call = subject.build(one)
    before = _copy(subject.run(call, options))
    subject.check(before, one, options)
    subject.checked(two, other_options)
    difference = first_difference(before, subject.run(call, options))
    if difference:
        detail = f"{difference}: the same call, with another call in between"
        raise Broken(detail, Step(one, options), Step(two, other_options), Step(one, options))


def _copy(result: Result) -> Result:
    """Whoever keeps its outputs may write the next call's into them."""
    return Result(result.out.clone(), None if result.lse is None else result.lse.clone())


_BAD_PAGES = (-1, -(2**31), 2**31 - 1, 0)
"""Live page ids; 0 stands for the first one past the pool."""
_BAD_LENGTHS = (-1, -(2**31), 2**31 - 1, 0)
"""Lengths; 0 stands for one more than the table's row holds."""


@st.composite
def _bad_values(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, int, str, int, Any]:
    """A batch, the sequence that goes bad, where and how, options."""
    q_len = draw(st.sampled_from((1, 1, 3)))
    # every sequence has keys for all of its queries, so that no row of the bad one is one that must be 0
    spec = draw(specs(scope.configuration, max_q_len=q_len, even=True, least=q_len))
    victim = draw(st.integers(0, len(spec.seq_lens) - 1))
    name = draw(st.sampled_from(("block_table", "seq_lens")))
    value = draw(st.sampled_from(_BAD_PAGES if name == "block_table" else _BAD_LENGTHS))
    return spec, victim, name, value, draw(scope.options())


def _bad_values_stay_at_home(subject: Subject, example: tuple[BatchSpec, int, str, int, Any]) -> None:
    spec, victim, name, value, options = example
    subject.require(spec, options)
    call = subject.build(spec)
    good = _copy(subject.run(call, options))
    bad = getattr(call, name).clone()
    if name == "block_table":
        bad[victim, 0] = value or len(call.kv_cache)
    else:
        bad[victim] = value or call.block_table.shape[1] * spec.page_size + 1
    result = subject.run(replace(call, **{name: bad}), options)
    # the bad sequence's rows are unspecified: the right ones stand in for them
    rows = slice(spec.starts[victim], spec.starts[victim + 1])
    result.out[rows] = good.out[rows]
    if result.lse is not None and good.lse is not None:
        result.lse[rows] = good.lse[rows]
    place = "page 0" if name == "block_table" else "the length"
    note = f"{name}: {place} of sequence {victim} is {bad[victim].flatten()[0].item()}"
    subject.check(result, spec, options, note)


_OUT = frozenset({"out"})
PROPERTIES = (
    Property(
        "MEM",
        "poison",
        "whatever page tails, spare pages, page 0 and rows of q of nobody hold, nan and infinities too, no bit changes",
        _poisons,
        _poison_changes_no_bit,
    ),
    Property(
        "MEM",
        "guard-bands",
        "nothing before or after out and lse is written",
        _guarded,
        _guards_stay,
        needs=_OUT,
    ),
    Property(
        "MEM",
        "inputs-stay",
        "a call leaves queries, cache, table, lengths and query starts as they were",
        _guarded,
        _inputs_stay,
    ),
    Property(
        "MEM",
        "earlier-calls",
        "a call gives the same bits whatever other call, of another shape or in another way, was made in between",
        _calls,
        _earlier_calls_leave_nothing,
    ),
    Property(
        "MEM",
        "bad-values",
        "a live page id outside the pool, or a length past the table, neither crashes nor harms another sequence's rows",
        _bad_values,
        _bad_values_stay_at_home,
        needs=frozenset({"bounded"}),
    ),
)
