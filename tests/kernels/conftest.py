"""What the tests of kernels run under: no call is known from a test before, whose policy may have been another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedmla.kernels.repeat import MEMO


@pytest.fixture(autouse=True)
def _no_call_is_known() -> Iterator[None]:
    MEMO.clear()
    yield
    MEMO.clear()
