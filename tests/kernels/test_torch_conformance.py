"""Every configuration that the torch backend accepts, against the oracle, with poison everywhere it may not read."""

from __future__ import annotations

import pytest

from pagedmla.conformance.cases import Case, cases_for
from pagedmla.conformance.runner import run_case
from pagedmla.contract.target import Target


@pytest.mark.parametrize("case", cases_for(Target.detect("cpu"), "torch"), ids=str)
def test_case(case: Case) -> None:
    result = run_case(case, "cpu", "torch")
    assert result.passed, result.detail
