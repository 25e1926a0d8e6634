"""Configurations that the table accepts, against the oracle, with poison everywhere the kernels may not read."""

from __future__ import annotations

import pytest
from triton_backend import DEVICE, ON_CARD

from pagedmla.conformance.cases import Case, cases_for
from pagedmla.conformance.runner import run_case
from pagedmla.contract.target import Target

ACCEPTED = cases_for(Target.detect(DEVICE), "triton")


# interpreted, all of them take minutes: the other files here visit heads, pages and sizes on smaller shapes
@pytest.mark.parametrize("case", ACCEPTED if ON_CARD else ACCEPTED[::5], ids=str)
def test_case(case: Case) -> None:
    result = run_case(case, DEVICE, "triton")
    assert result.passed, result.detail


def test_rounded_weights_are_in_the_bound() -> None:
    """The bound is the backend's own: a kernel that keeps float32 weights is held to the narrower one."""
    case = next(case for case in ACCEPTED if case.problem.kv_lora_rank == 128)
    results = [run_case(case, DEVICE, "triton", p_dtype=dtype) for dtype in (None, case.problem.layout.dtype)]
    assert results[0].out_bound_ratio == results[1].out_bound_ratio
