"""Calls that their spec does not describe, since a property changed numbers or where they lie: how they are run and judged."""

from __future__ import annotations

from dataclasses import replace

from pagedmla.conformance import numerics
from pagedmla.conformance.adapters.adapter import Options
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Broken, Result, Step, Subject, first_difference
from pagedmla.contract.problem import out_dtype_of


def expect_call(subject: Subject, call: Call, options: Options) -> numerics.Expected:
    """The oracle's answer to a call that its spec does not describe: tokens, scales or queries were changed."""
    conventions = subject.conventions(call.spec, options)
    q_dtype = call.spec.q_dtype
    return numerics.expect(
        call.q, call.kv_cache, call.block_table, call.seq_lens,
        out_dtype=out_dtype_of(q_dtype),
        p_dtype=conventions.p_dtype or q_dtype,
        lse_of_rounded_weights=conventions.lse_of_rounded_weights,
        **call.semantics(),  # type: ignore[arg-type]
    )  # fmt: skip


def run_changed(subject: Subject, call: Call, options: Options, note: str) -> Result:
    """``subject.run`` of a call that its spec does not describe; ``note`` says what was changed, in words."""
    try:
        return subject.run(call, options)
    except Broken as broken:
        steps = [replace(step, note=note) for step in broken.steps]
        raise Broken(f"{broken.detail}: {note}", *steps) from broken


def check_changed(subject: Subject, call: Call, options: Options, note: str) -> Result:
    """Runs a call that its spec does not describe, and holds it against the float64 oracle of just this call.

    Raises:
        Broken: with the worst place and ``note``.
        Refused: by the implementation.
    """
    result = run_changed(subject, call, options, note)
    detail = subject.difference(result, expect_call(subject, call, options), call.spec, options)
    if detail:
        raise Broken(f"{detail}: {note}", Step(call.spec, options, note))
    return result


def check_elsewhere(
    subject: Subject, packed: Result, result: Result, spec: BatchSpec, options: Options, note: str
) -> None:
    """Holds the result of a batch whose tensors lie elsewhere, or with other strides, against the one of packed tensors.

    Strides and addresses may choose the kernel, and other kernels have other bits.  So it has to be right by itself, and has
    the same bits where the implementation claims "one_kernel".

    Raises:
        Broken: with the place and ``note``.
    """
    step = Step(spec, options, note)
    if "one_kernel" in subject.adapter.features:
        difference = first_difference(packed, result)
        if difference:
            raise Broken(f"{difference}: {note}", Step(spec, options), step)
    detail = subject.difference(result, subject.expected(spec, options), spec, options)
    if detail:
        raise Broken(f"{detail}: {note}", step)
