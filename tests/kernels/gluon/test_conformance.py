"""Every configuration that the table accepts for Hopper, against the oracle, with poison where the kernel may not read."""

from __future__ import annotations

import pytest
from gluon_backend import DEVICE, needs_hopper

from pagedmla.conformance.cases import Case, cases_for
from pagedmla.conformance.runner import run_case
from pagedmla.contract.target import KNOWN_TARGETS

# the oracle's matrices are large here
pytestmark = [needs_hopper, pytest.mark.all_threads]


@pytest.mark.parametrize("case", cases_for(KNOWN_TARGETS["sm_90"], "gluon"), ids=str)
def test_case(case: Case) -> None:
    result = run_case(case, DEVICE, "gluon")
    assert result.passed, result.detail
