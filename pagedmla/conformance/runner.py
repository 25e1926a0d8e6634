"""Runs one case: a decode with poison everywhere, held against the oracle, and again with another poison."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import pagedmla
from pagedmla.conformance import numerics
from pagedmla.conformance.cases import Case
from pagedmla.conformance.inputs import Inputs, build_inputs
from pagedmla.contract.errors import PagedMLAError
from pagedmla.contract.support import BACKENDS, choose_backend
from pagedmla.contract.target import Target

Decode = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class CaseResult:
    """What came of one case.

    Attributes:
        case: the case.
        passed: every check held.
        out_error: largest absolute error of ``out`` against float64; nan when there is no result.
        out_bound_ratio: largest error over its derived bound; at most 1 in a passing case.
        lse_error: largest absolute error of ``lse``.
        detail: the smallest useful thing to know about the failure; empty when passed.
    """

    case: Case
    passed: bool
    out_error: float
    out_bound_ratio: float
    lse_error: float
    detail: str


def run_case(
    case: Case,
    device: torch.device | str,
    backend: str | None,
    decode: Decode | None = None,
    p_dtype: torch.dtype | None = None,
) -> CaseResult:
    """Checks one case.

    The results must lie within the derived bound of the float64 oracle, be written in full (they start as
    nan), leave the guard rows around them alone, and not change in a bit when all memory that nobody owns does.

    Args:
        case: what to run.
        device: where.
        backend: name of the backend, or None for the choice.
        decode: the function under test, with ``pagedmla.decode``'s signature; that one when left out.
        p_dtype: dtype that the kernel rounds softmax weights to.  Left out: what the support table says of the backend, and
            float32 for a ``decode`` of unknown backend.
    """
    call = decode if decode is not None else pagedmla.decode
    seed = zlib.crc32(case.name.encode())
    inputs = build_inputs(case, device, seed, "nan")
    other_poison = "inf" if seed % 2 else "finite"
    other = build_inputs(case, device, seed, other_poison)
    try:
        out, lse = _call(call, case, inputs, backend)
        again = _call(call, case, other, backend)
    except (PagedMLAError, RuntimeError) as error:
        return CaseResult(case, False, math.nan, math.inf, math.nan, f"{type(error).__name__}: {error}")
    if p_dtype is None:
        p_dtype = torch.float32
        if backend is not None or decode is None:
            name = choose_backend(case.problem, Target.detect(device), backend)
            p_dtype = BACKENDS[name].p_dtype(case.problem)
    comparison = numerics.compare(out, lse, _expect(case, inputs, p_dtype))
    detail = (
        _misplaced(inputs, out, lse)
        or comparison.detail
        or ("" if inputs.guards_intact() and other.guards_intact() else "rows around out or lse were written")
        or _first_difference(("out", "lse"), (out, lse), again, other_poison)
    )
    if comparison.detail:
        detail = f"{detail}; {_locate(case, comparison)}"
    return CaseResult(
        case=case,
        passed=not detail,
        out_error=comparison.out_error,
        out_bound_ratio=comparison.out_bound_ratio,
        lse_error=comparison.lse_error,
        detail=detail,
    )


def _call(decode: Decode, case: Case, inputs: Inputs, backend: str | None) -> tuple[Tensor, Tensor]:
    problem = case.problem
    return decode(
        inputs.q,
        inputs.kv_cache,
        inputs.block_table,
        inputs.seq_lens,
        out=inputs.out,
        lse=inputs.lse,
        backend=backend,
        schedule=problem.schedule,
        num_kv_splits=problem.num_kv_splits,
        batch_invariant=problem.batch_invariant,
        **inputs.semantics(problem),
    )


def _expect(case: Case, inputs: Inputs, p_dtype: torch.dtype) -> numerics.Expected:
    return numerics.expect(
        inputs.q,
        inputs.kv_cache,
        inputs.block_table,
        inputs.seq_lens,
        out_dtype=case.problem.out_dtype,
        p_dtype=p_dtype,
        **inputs.semantics(case.problem),  # type: ignore[arg-type]
    )


def _misplaced(inputs: Inputs, out: Tensor, lse: Tensor) -> str:
    """Why what came back is not the tensors that were given, or an empty string."""
    for name, got, given in (("out", out, inputs.out), ("lse", lse, inputs.lse)):
        if got.dtype != given.dtype or got.data_ptr() != given.data_ptr():
            return f"{name} came back as another tensor than the one given ({got.dtype} for {given.dtype})"
    return ""


def _first_difference(
    names: tuple[str, ...], first: tuple[Tensor, ...], second: tuple[Tensor, ...], poison: str
) -> str:
    for name, one, two in zip(names, first, second, strict=True):
        bits = torch.int16 if one.dtype.itemsize == 2 else torch.int32
        different = one.contiguous().view(bits) != two.contiguous().view(bits)
        if bool(different.any()):
            index = different.nonzero()[0].tolist()
            values = f"{one[tuple(index)].item():.9g} became {two[tuple(index)].item():.9g}"
            return f"{name}{index} {values} when memory that nobody owns changed from nan to {poison}"
    return ""


def _locate(case: Case, comparison: numerics.Comparison) -> str:
    """Which sequence the first wrong row belongs to."""
    index = comparison.out_index if comparison.out_bound_ratio > 1 else comparison.lse_index
    if index is None:
        return f"seq_lens {case.seq_lens}"
    row = index[0] - (1 if case.ragged else 0)
    for sequence, (length, q_len) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        if 0 <= row < q_len:
            return f"query {row} of {q_len} of sequence {sequence}, which has {length} keys"
        row -= q_len
    return "a row of no sequence"
