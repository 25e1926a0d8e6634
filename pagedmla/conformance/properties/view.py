"""VIEW: strides and storage offsets are part of a tensor; the same numbers give the same result however they lie.

The same to the bit where one kernel is claimed to run them all; else each is right by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Options
from pagedmla.conformance.builder import Call
from pagedmla.conformance.changed_calls import check_elsewhere
from pagedmla.conformance.properties.arch import run_or_refuse
from pagedmla.conformance.properties.mem import nan_outputs, padded_specs
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import lengths, seeds, specs
from pagedmla.conformance.subject import Broken, Step, Subject


def _slice(*extra: int) -> Callable[[Tensor], Tensor]:
    """A copy inside of a larger tensor with so many more numbers before and after on each axis, all of their bits set."""

    def view(tensor: Tensor) -> Tensor:
        shape = [size + 2 * more for size, more in zip(tensor.shape, extra, strict=True)]
        size = tensor.element_size()
        inside = torch.full((*shape, size), 255, dtype=torch.uint8, device=tensor.device).view(tensor.dtype)
        inside = inside.view(shape)
        for axis, more in enumerate(extra):
            inside = inside.narrow(axis, more, tensor.shape[axis])
        return inside.copy_(tensor)

    return view


def _swapped(tensor: Tensor) -> Tensor:
    """The first two axes stored in the other order, as a batched projection leaves heads."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _every_other(tensor: Tensor) -> Tensor:
    """In the even places of axis 0; each odd one repeats its neighbour, so that a stride ignored is wrong and no crash."""
    return tensor.repeat_interleave(2, dim=0)[::2]


def _layer(axis: int) -> Callable[[Tensor], Tensor]:
    """The second of three layers that share one pool, interleaved at ``axis``."""
    extra = tuple(int(place == axis) for place in range(4))
    return lambda tensor: _slice(*extra)(tensor.unsqueeze(axis)).select(axis, 0)


_UNALIGNED = "an unaligned slice"
_STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows apart": _slice(2, 0, 0),
    "heads apart": _slice(0, 2, 0),
    "an inner slice": _slice(1, 1, 16),
    "heads first": _swapped,
}
VIEWS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "q": {**_STRIDED, _UNALIGNED: _slice(1, 0, 3)},
    "kv_cache": {
        "a slice of the pool": _slice(3, 0, 0),
        "layers between pages": _layer(1),
        "layers between tokens": _layer(2),
        "tokens apart": _slice(0, 3, 0),
        "an inner slice": _slice(1, 0, 16),
        _UNALIGNED: _slice(1, 1, 1),
    },
    "block_table": {
        "columns left over": _slice(0, 3),
        "every other row": _every_other,
        "columns first": _swapped,
    },
    "seq_lens": {"every other": _every_other, "behind others": _slice(3)},
    "cu_seqlens_q": {"every other": _every_other, "behind others": _slice(3)},
}
"""Tensor of a call -> a view's name -> who makes it.  All but one keep 16 bytes' alignment in every dtype."""

_ROW_VIEWS = {"packed": Tensor.clone, **_STRIDED}
_LSE_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": Tensor.clone,
    "rows apart": _slice(0, 3),
    "heads first": _swapped,
}


@st.composite
def _inputs(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, dict[str, str], Any]:
    """A batch, the views of one or two of its tensors, options."""
    spec = draw(padded_specs(scope))
    there = [name for name in VIEWS if name != "cu_seqlens_q" or spec.ragged]
    names = draw(st.sets(st.sampled_from(there), min_size=1, max_size=2))
    # an address that a load cannot take is a fault of the device, and no exception: asked of those who look first
    left_out = set() if "validates" in scope.adapter.features else {_UNALIGNED}
    views = {name: draw(st.sampled_from(sorted(VIEWS[name].keys() - left_out))) for name in sorted(names)}
    return spec, views, draw(scope.options())


def _views_give_the_same_bits(subject: Subject, example: tuple[BatchSpec, dict[str, str], Any]) -> None:
    spec, views, options = example
    subject.require(spec, options)
    call = subject.build(spec)
    changes = {name: VIEWS[name][view](getattr(call, name)) for name, view in views.items()}
    note = ", ".join(f"{name} as a view: {view}" for name, view in views.items())
    _compare(subject, call, replace(call, **changes), options, note)  # type: ignore[arg-type]


def _compare(subject: Subject, call: Call, view: Call, options: Options, note: str) -> None:
    packed = subject.run(call, options)
    subject.check(packed, call.spec, options)
    check_elsewhere(subject, packed, run_or_refuse(subject, view, options), call.spec, options, note)


@st.composite
def _expanded(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    """The same sequence several times over."""
    page_size = scope.configuration.spec((1,)).page_size
    length, beams = draw(lengths(page_size, scope.configuration.most_keys, least=1)), draw(st.integers(2, 4))
    spec = scope.configuration.spec((length,) * beams, ids=(0,) * beams, seed=draw(seeds))
    return spec, draw(scope.options())


def _rows_of_stride_zero(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    subject.require(spec, options)
    call = subject.build(spec)
    names = ("q", "block_table", "seq_lens")
    rows = {name: getattr(call, name)[:1] for name in names}
    shapes = {name: getattr(call, name).shape for name in names}
    copied = {name: rows[name].expand(shapes[name]).contiguous() for name in names}
    expanded = {name: rows[name].expand(shapes[name]) for name in names}
    note = "q, block_table and seq_lens as one row each, expanded"
    _compare(subject, replace(call, **copied), replace(call, **expanded), options, note)


@dataclass(frozen=True)
class PairCall(Call):
    """A call whose ``q`` is the pair (latent, rotated), each with strides of its own."""

    @property
    def q_latent(self) -> Tensor:
        """The first of the pair: [T, H, kv_lora_rank]."""
        return self.q[0]

    @property
    def q_rope(self) -> Tensor:
        """The second of the pair: [T, H, qk_rope_head_dim]."""
        return self.q[1]


@st.composite
def _pairs(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, str, str, Any]:
    latent, rope = (draw(st.sampled_from(sorted(_ROW_VIEWS))) for _ in range(2))
    return draw(specs(scope.configuration)), latent, rope, draw(scope.options())


def _a_pair_gives_the_same_bits(subject: Subject, example: tuple[BatchSpec, str, str, Any]) -> None:
    spec, latent, rope, options = example
    subject.require(spec, options)
    call = subject.build(spec)
    pair = _ROW_VIEWS[latent](call.q_latent.contiguous()), _ROW_VIEWS[rope](call.q_rope.contiguous())
    view = PairCall(**{**vars(call), "q": pair})
    note = f"the queries as two tensors, the latent part {latent}, the rotated part {rope}"
    _compare(subject, call, view, options, note)


@st.composite
def _outputs(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, str, str, Any]:
    out, lse = draw(st.sampled_from(sorted(_ROW_VIEWS))), draw(st.sampled_from(sorted(_LSE_VIEWS)))
    return draw(specs(scope.configuration, least=1)), out, lse, draw(scope.options())


def _outputs_may_be_views(subject: Subject, example: tuple[BatchSpec, str, str, Any]) -> None:
    spec, out_view, lse_view, options = example
    subject.require(spec, options)
    call = subject.build(spec)
    packed = subject.run(call, options)
    out, lse = nan_outputs(subject, spec, options)
    out, lse = _ROW_VIEWS[out_view](out), None if lse is None else _LSE_VIEWS[lse_view](lse)
    given = [tensor for tensor in (out, lse) if tensor is not None]
    before = [_whole(tensor).clone() for tensor in given]
    run_or_refuse(subject, call, options, out, lse)
    note = f"out given as a view, {out_view}, and lse, {lse_view}"
    check_elsewhere(subject, packed, subject.normalise(out, lse, spec, options), spec, options, note)
    for tensor in given:
        tensor.fill_(math.nan)
    if not all(torch.equal(one, _whole(two)) for one, two in zip(before, given, strict=True)):
        detail = f"memory between or around the rows was written: {note}"
        raise Broken(detail, Step(spec, options), Step(spec, options, note))


def _whole(view: Tensor) -> Tensor:
    """The bytes of everything in the storage that ``view`` looks at."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


_STRIDES = frozenset({"strides"})
PROPERTIES = (
    Property(
        "VIEW",
        "inputs",
        "queries, caches of interleaved layers, tables and lengths given as views give the values of the float64 oracle, and "
        "the bits of packed ones where one kernel is claimed to run both, or are refused by a ValueError, "
        "NotImplementedError or RuntimeError before anything is written",
        _inputs,
        _views_give_the_same_bits,
        needs=_STRIDES,
    ),
    Property(
        "VIEW",
        "expanded",
        "one row of queries, table and lengths, expanded over the batch, gives the values of the float64 oracle, and the bits "
        "of copies where one kernel is claimed to run both, or is refused",
        _expanded,
        _rows_of_stride_zero,
        needs=_STRIDES,
        share=0.5,
    ),
    Property(
        "VIEW",
        "pair-of-queries",
        "queries as two tensors with strides of their own give the values of the float64 oracle, and the bits of one tensor "
        "where one kernel is claimed to run both, or are refused",
        _pairs,
        _a_pair_gives_the_same_bits,
        needs=frozenset({"strides", "q_pair"}),
    ),
    Property(
        "VIEW",
        "outputs",
        "out and lse given as views are written there and nowhere between, with the values of the float64 oracle, and the bits "
        "of packed ones where one kernel is claimed to run both, or are refused",
        _outputs,
        _outputs_may_be_views,
        needs=_STRIDES | {"out"},
    ),
)
