"""ARCH: what an implementation cannot do it answers with an exception; never with an abort, never with garbage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.conformance import numerics
from pagedmla.conformance.adapters.adapter import Options
from pagedmla.conformance.builder import Call
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import DTYPES, BatchSpec
from pagedmla.conformance.strategies import seeds, specs
from pagedmla.conformance.subject import (
    Broken,
    Refused,
    Result,
    Step,
    Subject,
    raised_errors_are_broken,
    unwritten_memory_is_nan,
)

_REFUSALS = (ValueError, NotImplementedError, RuntimeError)
_FAULTS = (torch.AcceleratorError, torch.OutOfMemoryError)
_FAULT_WORDS = ("CUDA error", "HIP error", "Triton Error")


def is_fault(error: BaseException | None) -> bool:
    """Whether ``error`` came from a device that was already at work: no refusal, though it may be a RuntimeError."""
    return isinstance(error, _FAULTS) or any(words in str(error) for words in _FAULT_WORDS)


def run_or_refuse(
    subject: Subject, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
) -> Result:
    """``subject.run`` of a call that an implementation may refuse by an error, as long as it has written nothing.

    Args:
        out, lse: full of nan, so that what was written shows.

    Raises:
        Broken: any other error, or a refusal that came too late.
        Refused: a ValueError, a NotImplementedError or a RuntimeError that is no fault of the device.
    """
    try:
        return subject.run(call, options, out, lse)
    except Broken as broken:
        if not isinstance(broken.__cause__, _REFUSALS) or is_fault(broken.__cause__):
            raise
        for name, given in (("out", out), ("lse", lse)):
            if given is not None and not bool(given.isnan().all()):
                detail = f"{broken.detail}, after a part of {name} was written"
                raise Broken(detail, *broken.steps) from broken
        raise Refused(broken.detail) from broken


def answer(subject: Subject, call: Call, options: Options, step: Step) -> tuple[Tensor, Tensor | None] | None:
    """What the implementation makes of a call that it may not take; None for an exception or a no, which are right answers.

    Raises:
        Broken: a fault of the device.
    """
    try:
        with unwritten_memory_is_nan(), raised_errors_are_broken(step):
            return subject.adapter.prepare(call, options).run()
    except Broken as broken:
        if is_fault(broken.__cause__):
            raise
        return None
    except Refused:
        return None


def check_answer(subject: Subject, call: Call, got: tuple[Tensor, Tensor | None], step: Step) -> None:
    """Holds an answer to a call that might as well have been refused against the oracle.

    The adapter says nothing about such a call, so weights may have been rounded to the coarser of its two dtypes, and the
    output to any: garbage lies far outside of that too.

    Raises:
        Broken: with the worst place.
    """
    out, lse = got
    if not out.is_floating_point():
        raise Broken(f"out has dtype {out.dtype}", step)
    p_dtype = max(call.q.dtype, call.kv_cache.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    conventions = subject.adapter.conventions
    expected = numerics.expect(
        call.q, call.kv_cache, call.block_table, call.seq_lens,
        out_dtype=out.dtype, p_dtype=p_dtype, lse_of_rounded_weights=conventions.lse_of_rounded_weights,
        **call.semantics(),  # type: ignore[arg-type]
    )  # fmt: skip
    natural = expected.lse.float()
    if lse is not None and conventions.lse_base is not None:
        natural = lse.float() * math.log(conventions.lse_base)
    rounding = torch.finfo(conventions.lse_dtype).eps / 2
    comparison = numerics.compare(out, natural, expected, lse_rounding=rounding)
    if not comparison.passed:
        raise Broken(f"neither refused nor right: {comparison.detail}", step)


@st.composite
def _wild_shapes(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    """Heads, dimensions, pages and dtypes that no model has, mixed with those that some have."""
    dtypes = st.sampled_from(sorted(DTYPES))
    spec = scope.configuration.spec(
        tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))),
        num_heads=draw(st.one_of(st.sampled_from((1, 3, 16, 17, 129)), st.integers(1, 200))),
        kv_lora_rank=draw(st.one_of(st.sampled_from((1, 16, 320, 384, 512, 513, 576)), st.integers(1, 1024))),
        qk_rope_head_dim=draw(st.one_of(st.sampled_from((0, 1, 7, 64, 65, 128)), st.integers(0, 130))),
        page_size=draw(st.one_of(st.sampled_from((1, 7, 16, 64, 100)), st.integers(1, 300))),
        dtype=draw(dtypes),
        kv_dtype=draw(dtypes),
        seed=draw(seeds),
    )
    return spec, draw(scope.options())


def _refused_or_right(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    if subject.adapter.refuses(spec, options, subject.device) is None:
        subject.checked(spec, options)
        return
    # called all the same: whoever says no in words must say no in deed
    call, step = subject.build(spec), Step(spec, options, "the adapter says that this is not taken")
    got = answer(subject, call, options, step)
    if got is not None:
        check_answer(subject, call, got, step)


_ABSURD = (-1, 0, 2**31, -(2**31), 2**62, 1.5, math.nan, "", "no such thing", True, None, ())


@st.composite
def _absurd_options(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, dict[str, object]]:
    names = sorted({"no_such_option", *(name for options in scope.adapter.options for name in options)})
    options: dict[str, object] = draw(
        st.dictionaries(st.sampled_from(names), st.sampled_from(_ABSURD), min_size=1, max_size=2)
    )
    return draw(specs(scope.configuration, least=1)), options


def _absurd_options_are_refused_or_right(
    subject: Subject, example: tuple[BatchSpec, dict[str, object]]
) -> None:
    spec, options = example
    subject.require(spec, subject.adapter.options[0])
    call, step = subject.build(spec), Step(spec, options)
    got = answer(subject, call, options, step)
    if got is not None:
        check_answer(subject, call, got, step)


_Change = Callable[[Call], dict[str, Any]]
_MEANINGLESS: dict[str, _Change] = {
    "block_table without its last row": lambda call: {"block_table": call.block_table[:-1]},
    "block_table as one long row": lambda call: {"block_table": call.block_table.flatten()},
    "seq_lens without its last": lambda call: {"seq_lens": call.seq_lens[:-1]},
    "cu_seqlens_q without its last": lambda call: {"cu_seqlens_q": _starts(call)[:-1]},
    "q two numbers narrower than the cache": lambda call: {"q": call.q[..., :-2].contiguous()},
    "the cache two numbers narrower than q": lambda call: {"kv_cache": call.kv_cache[..., :-2].contiguous()},
    "q without an axis for heads": lambda call: {"q": call.q[:, 0]},
    "kv_lora_rank wider than q": lambda call: {"kv_lora_rank": call.q.shape[-1] + 2},
    "softmax_scale nan": lambda call: {"softmax_scale": math.nan},
    "a table of fractions": lambda call: {"block_table": call.block_table.float() + 0.5},
}
"""What has no right answer: only an exception will do."""
_UNUSUAL: dict[str, _Change] = {
    "block_table of 64-bit integers": lambda call: {"block_table": call.block_table.long()},
    "seq_lens of 64-bit integers": lambda call: {"seq_lens": call.seq_lens.long()},
    "softmax_scale 0": lambda call: {"softmax_scale": 0.0},
    "softmax_scale below 0": lambda call: {"softmax_scale": -call.softmax_scale},
    "cu_seqlens_q of an even batch": lambda call: {"cu_seqlens_q": _starts(call)},
}
"""What has a right answer, though an implementation need not take it."""


def _starts(call: Call) -> Tensor:
    return torch.tensor(call.spec.starts, dtype=torch.int32, device=call.q.device)


@st.composite
def _wrong_arguments(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, str, Any]:
    name = draw(st.sampled_from((*_MEANINGLESS, *_UNUSUAL)))
    # at least two keys: the softmax of one is 1 whatever its score, so a wrong argument may well be right
    return draw(specs(scope.configuration, least=2)), name, draw(scope.options())


def _wrong_arguments_raise(subject: Subject, example: tuple[BatchSpec, str, Any]) -> None:
    spec, name, options = example
    subject.require(spec, options)
    call, step = subject.build(spec), Step(spec, options, name)
    change = {**_MEANINGLESS, **_UNUSUAL}[name]
    changed = replace(call, **change(call))
    got = answer(subject, changed, options, step)
    if got is None:
        return
    if name in _MEANINGLESS:
        raise Broken(f"{name}: an answer came, where only an exception is right", step)
    check_answer(subject, changed, got, step)


_VALIDATES = frozenset({"validates"})
PROPERTIES = (
    Property(
        "ARCH",
        "wild-shapes",
        "any head count, dimension, page size and pair of dtypes is refused by an exception, or its result is right",
        _wild_shapes,
        _refused_or_right,
        needs=_VALIDATES,
    ),
    Property(
        "ARCH",
        "absurd-options",
        "an option that makes no sense is refused by an exception, or the result is right all the same",
        _absurd_options,
        _absurd_options_are_refused_or_right,
        needs=_VALIDATES,
    ),
    Property(
        "ARCH",
        "wrong-arguments",
        "tensors and numbers that do not fit together are answered with an exception, never with numbers",
        _wrong_arguments,
        _wrong_arguments_raise,
        needs=_VALIDATES,
    ),
)
