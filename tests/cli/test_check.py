"""``pagedmla check`` runs what the table accepts, and its exit status and JSON can be relied on."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import pytest
import torch

from pagedmla.cli import check_runs
from pagedmla.cli.check import select_jobs
from pagedmla.conformance import runner
from pagedmla.conformance.cases import Case, cases_for
from pagedmla.conformance.runner import CaseResult
from pagedmla.contract.support import BACKENDS
from pagedmla.contract.target import Target

from .conftest import error_line, run_cli

CPU = torch.device("cpu")
FEW = ("--device", "cpu", "--limit", "3")


def break_case(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """Makes every case that runs fail by ``ratio`` of its bound."""

    def fail(case: Case, device: torch.device, backend: str | None) -> CaseResult:
        return CaseResult(case, False, math.nan, ratio, math.nan, "planted failure")

    monkeypatch.setattr(runner, "run_case", fail)


def test_accepted_cases_pass() -> None:
    result = run_cli("check", *FEW)
    assert result.exit_code == 0, result.output
    assert "3 passed, 0 failed" in result.stdout
    assert "of its bound" in result.stdout


def test_a_backend_that_rounds_its_weights_is_checked_against_its_own_bound() -> None:
    result = run_cli("check", "--json", "--backend", "triton", "-k", "128+32", "--device", "cpu")
    document: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert [case["backend"] for case in document["cases"]] == ["triton"]
    # under the bound of a kernel with float32 weights it would be near 1, or past it
    assert 0.01 < document["worst"]["out_bound_ratio"] < 0.6


def test_several_processes_give_the_same_results_in_the_same_order() -> None:
    few = ("check", "--json", "-k", "h5-", "--limit", "4", "--device", "cpu")
    documents = [json.loads(run_cli(*few, "--processes", count).stdout) for count in ("1", "2")]
    assert documents[0]["passed"] == 4
    assert documents[0]["cases"] == documents[1]["cases"]


def test_a_process_that_dies_fails_what_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = select_jobs(CPU, "torch", "h5-", 2)
    monkeypatch.setattr(check_runs, "_run_one", _die)
    results = check_runs.run_jobs(jobs, CPU, 2, lambda backend, result: None)
    assert [result.case for _, result in results] == [case for _, case in jobs]
    assert all(not result.passed and "BrokenProcessPool" in result.detail for _, result in results)


def _die(backend: str, case: Case, device: str) -> CaseResult:
    os._exit(3)


def test_json_is_the_whole_of_stdout() -> None:
    result = run_cli("check", "--json", "-k", "h5-p64-512+64-bf16/bf16-q1", "--device", "cpu")
    document: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert document["selected"] == document["passed"] == len(document["cases"]) > 0
    assert document["failed"] == 0
    for case in document["cases"]:
        assert "h5-p64-512+64-bf16/bf16-q1" in case["name"]
        assert 0 <= case["out_bound_ratio"] <= 1
        assert case["detail"] == ""
    assert document["worst"]["out_bound_ratio"] == max(case["out_bound_ratio"] for case in document["cases"])


@pytest.mark.parametrize("ratio", [7.5, math.inf, math.nan])
def test_a_failure_is_named_and_the_exit_status_is_1(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    break_case(monkeypatch, ratio)
    result = run_cli("check", *FEW)
    assert result.exit_code == 1
    assert "0 passed, 3 failed" in result.stdout
    assert result.stdout.count("planted failure") >= 3
    first = select_jobs(CPU, None, "", 3)[0][1].name
    assert first in result.stdout


def test_a_failure_in_json_is_still_json(monkeypatch: pytest.MonkeyPatch) -> None:
    break_case(monkeypatch, math.nan)
    result = run_cli("check", "--json", *FEW)
    assert result.exit_code == 1
    document = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["failed"] == 3
    assert document["cases"][0]["out_error"] == "nan"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("-k", "no such case"), "no case is selected (filter 'no such case'"),
        (
            ("--backend", "cutlass"),
            "backend: wanted None or one of " + ", ".join(BACKENDS) + ", got 'cutlass'",
        ),
        (("--device", "cuda:99"), "device: wanted"),
        (("--device", "toaster"), "device: wanted a torch device, such as cpu or cuda:0, got 'toaster'"),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments: tuple[str, ...], part: str) -> None:
    result = run_cli("check", "--json", *arguments)
    assert part in error_line(result)
    assert result.stdout == ""


def test_all_accepted_configurations_are_selected() -> None:
    target = Target.detect("cpu")
    everything = select_jobs(CPU, None, "", None)
    # Triton's interpreter runs where it is named
    assert everything == [("torch", case) for case in cases_for(target, "torch")]
    interpreted = select_jobs(CPU, "triton", "", None)
    assert interpreted == [("triton", case) for case in cases_for(target, "triton")]
    assert interpreted


def test_a_limit_spreads_over_the_list() -> None:
    everything = select_jobs(CPU, "torch", "", None)
    some = select_jobs(CPU, "torch", "", 10)
    positions = [everything.index(job) for job in some]
    assert len(set(positions)) == 10
    assert positions[-1] >= len(everything) * 0.85
    assert select_jobs(CPU, "torch", "", 10**6) == everything
