"""On a card: no program of a cooperative launch waits for one that is not resident, whatever else holds the card."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("cooperative.py")
SCENARIOS = (
    "two_streams", "four_streams", "both_kernels", "beside_a_full_card", "two_graphs", "ten_thousand_launches",
    "an_aborted_capture", "any_workspace", "any_lengths", "noise",
)  # fmt: skip
# of the kernel for few rows, and of that for many with one lane and two
HEADS = (16, 20, 128)
# some seconds each, most of them of the compiler's
TIME_LIMIT_S = 120

needs_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)),
    reason="needs an NVIDIA Hopper GPU",
)


def watched(command: list[str], limit_s: float) -> str:
    """The last line that ``command`` prints.

    Raises:
        AssertionError: it fails, or does not end in time; it is ended then.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"no end within {limit_s} seconds: programs wait for each other") from error
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1] if done.stdout else ""


@needs_hopper
@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_ends_and_is_right(scenario: str, num_heads: int) -> None:
    assert watched([sys.executable, str(SCRIPT), scenario, str(num_heads)], TIME_LIMIT_S) == "ok"


def test_every_scenario_is_run() -> None:
    tree = ast.parse(SCRIPT.read_text())
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "SCENARIOS"
    ]
    assert isinstance(table, ast.DictComp)
    names = table.generators[0].iter
    assert isinstance(names, ast.Tuple)
    assert [getattr(name, "id", "") for name in names.elts] == list(SCENARIOS)


def test_what_does_not_end_fails_instead_of_hanging() -> None:
    with pytest.raises(AssertionError, match="no end within"):
        watched([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    with pytest.raises(AssertionError, match="wrong"):
        watched([sys.executable, "-c", "raise SystemExit('wrong')"], 30)
