"""Calls that their spec does not describe, since a property changed tokens, scales or queries: how they are run and judged."""

from __future__ import annotations

from dataclasses import replace

from pagedmla.conformance import numerics
from pagedmla.conformance.adapters.adapter import Options
from pagedmla.conformance.builder import Call
from pagedmla.conformance.subject import Broken, Result, Step, Subject
from pagedmla.contract.problem import out_dtype_of


def expect_call(subject: Subject, call: Call, options: Options) -> numerics.Expected:
    """The oracle's answer to a call that its spec does not describe: tokens, scales or queries were changed."""
    conventions = subject.adapter.conventions_for(call.spec, options, subject.device)
    q_dtype = call.spec.q_dtype
    return numerics.expect(
        call.q, call.kv_cache, call.block_table, call.seq_lens,
        out_dtype=out_dtype_of(q_dtype),
        p_dtype=conventions.p_dtype or q_dtype,
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
    conventions = subject.adapter.conventions_for(call.spec, options, subject.device)
    result = run_changed(subject, call, options, note)
    expected = expect_call(subject, call, options)
    lse = expected.lse.float() if result.lse is None else result.lse
    comparison = numerics.compare(result.out, lse, expected, lse_rounding=conventions.lse_rounding)
    if not comparison.passed:
        raise Broken(f"{comparison.detail}: {note}", Step(call.spec, options, note))
    return result
