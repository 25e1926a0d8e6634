"""``pagedmla info`` prints what the support table says, and nothing that it does not."""

from __future__ import annotations

import json
import platform

import pytest
import torch

from pagedmla.cli import report
from pagedmla.contract.support import AXES, BACKENDS, accepted_problems, refusals, sample_problems
from pagedmla.contract.target import Target

from .conftest import run_cli

CPU = Target("cpu", "x86_64", 2, 0)


def test_json_is_one_document_made_from_the_table() -> None:
    result = run_cli("info", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["versions"]["python"] == platform.python_version()
    assert document["versions"]["torch"] == torch.__version__
    cpu = document["targets"]["cpu"]
    assert cpu["vendor"] == "cpu"
    assert [backend["name"] for backend in cpu["backends"]] == list(BACKENDS)
    for backend in cpu["backends"]:
        assert backend["accepted"] == len(accepted_problems(CPU, backend["name"]))
        assert [axis["field"] for axis in backend["axes"]] == [axis.field for axis in AXES]


def test_every_refusal_is_shown_with_its_reason() -> None:
    text = " ".join(run_cli("info").stdout.split())
    document = json.loads(run_cli("info", "--json").stdout)
    for backend in document["targets"]["cpu"]["backends"]:
        shown = {
            (group["code"], group["argument"], got, reason["wanted"])
            for group in backend["refusals"]
            for reason in group["reasons"]
            for got in reason["got"]
        }
        expected = {
            (refusal.code, refusal.argument, refusal.got, refusal.wanted)
            for problem in sample_problems()
            for refusal in refusals(problem, Target.detect("cpu"), backend["name"])
        }
        assert shown == expected
        for code, argument, _, wanted in expected:
            assert f"[{code}] {argument}" in text
            assert f"taken: {wanted}" in text


def test_the_versions_and_the_machine_are_shown() -> None:
    text = run_cli("info").stdout
    assert f"torch {torch.__version__}" in text
    assert "triton" in text
    assert platform.machine() in text
    for backend, row in BACKENDS.items():
        assert f"backend {backend}: {row.summary}" in " ".join(text.split())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_report_sorts_each_sampled_value_by_what_the_table_says(backend: str) -> None:
    made = report.report_backend(backend, CPU)
    problems = list(sample_problems())
    assert made.sampled == len(problems)
    assert made.accepted == sum(not refusals(problem, CPU, backend) for problem in problems)
    schedules = next(axis for axis in made.axes if axis.field == "schedule")
    expected = {
        str(value): any(p.schedule == value and not refusals(p, CPU, backend) for p in problems)
        for value in (None, "split", "persistent")
    }
    assert set(schedules.taken) == {value for value, taken in expected.items() if taken}
    assert set(schedules.refused) == {value for value, taken in expected.items() if not taken}
