"""``pagedmla compile``: its tables, its JSON, and that a kernel that does not fit costs the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedmla.cli import targets_page
from pagedmla.contract import target as targets
from pagedmla.contract.target import Target

from .conftest import error_line, run_cli

ROOT = Path(__file__).resolve().parents[2]


def test_figures_of_a_kernel_are_printed_and_written(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = run_cli(
        "compile", "--arch", "sm_80", "--arch", "gfx942", "--kernel", "compact", "--json", str(file)
    )
    assert result.exit_code == 0
    found = json.loads(file.read_text())
    assert found["command"] == "python -m pagedmla.cli compile --arch sm_80 --arch gfx942 --kernel compact"
    assert str(tmp_path) not in json.dumps(found)
    assert list(found["targets"]) == ["sm_80", "gfx942"]
    for arch, limit in (("sm_80", 166912), ("gfx942", 65536)):
        report = found["targets"][arch]
        assert report["limit_shared_bytes"] == limit
        assert (report["variants_compiled"], report["failures"]) == (2, 0)
        assert all(one["registers_per_thread"] > 0 for one in report["compiled"])
        assert f"{arch} (" in result.stdout
    assert "4 compiled and fit, 0 failed" in result.stdout
    assert "nothing was run" in result.stdout


def test_a_kernel_that_does_not_fit_is_named_with_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(targets.KNOWN_TARGETS, "sm_80", Target("nvidia", "sm_80", 108, 1000, "a small one"))
    result = run_cli("compile", "--arch", "sm_80", "--kernel", "compact")
    assert result.exit_code == 1
    assert "1 compiled and fit, 1 failed" in result.stdout
    assert "FAILED sm_80 compact" in result.stdout
    assert "bytes of shared memory, and sm_80 has 1000" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--arch", "sm_70"), "arch: wanted one of sm_80, "),
        (("--kernel", "gemm"), "kernel: wanted some of decode"),
        (("--json", "/no/such/folder/x.json"), "--json: "),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_status_2(arguments: tuple[str, ...], part: str) -> None:
    assert part in error_line(run_cli("compile", *arguments))


def test_the_page_says_what_the_file_says() -> None:
    report = json.loads((ROOT / targets_page.REPORT).read_text())
    page = (ROOT / targets_page.PAGE).read_text()
    assert page == targets_page.rewritten(page, report), "run: python -m pagedmla.cli.targets_page"
    assert report["command"] == "python -m pagedmla.cli compile"
    for arch, target in report["targets"].items():
        (decode,) = (kernel for kernel in target["kernels"] if kernel["kernel"] == "decode")
        row = f"| `{arch}` | {target['limit_shared_bytes']:,} | {decode['largest_shared_bytes']:,} |"
        assert any(line.startswith(row) for line in page.splitlines()), row
        assert target["failures"] == 0


def test_a_page_without_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="no marks"):
        targets_page.rewritten("# Targets\n", {"targets": {}})
