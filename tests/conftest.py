"""What all tests share: hypothesis profiles, markers, threads, and the path of the helper modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent

if not torch.cuda.is_available():
    # Triton's kernels are interpreted on the CPU; it reads this when a kernel is declared, so before any import of one
    os.environ.setdefault("TRITON_INTERPRET", "1")

# pytest's importlib mode leaves sys.path alone; the helpers (batches.py, strategies.py) are plain modules here
sys.path.insert(0, str(TESTS))

# deadline: two shared cores make single examples slow now and then.  ci: the same examples in every run.
settings.register_profile("ci", deadline=None, max_examples=15, derandomize=True, print_blob=True)
settings.register_profile(
    "search", deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_MARKERS = (
    "large: reserves about 4.5 GB of address space, nearly all of it untouched",
    "all_threads: runs with torch's own number of threads; the other numerical tests use one",
)
_ONE_THREAD = tuple(str(TESTS / name) for name in ("reference", "conformance", "kernels", "compat"))


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers that these tests use."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread where matrices are tiny: several would wait for each other most of the time."""
    before = torch.get_num_threads()
    if str(request.path).startswith(_ONE_THREAD) and not request.node.get_closest_marker("all_threads"):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
