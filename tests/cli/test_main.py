"""The command as a process: help without Transformers, the version, and bad usage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pagedmla

from .conftest import run_cli

ROOT = Path(__file__).resolve().parents[2]


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )


def test_help_names_the_commands() -> None:
    done = run_process("-m", "pagedmla.cli", "--help")
    assert done.returncode == 0
    for command in ("generate", "info", "check"):
        assert command in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["info"]])
def test_transformers_is_not_loaded_before_a_model_is(arguments: list[str]) -> None:
    source = f"""
import sys
sys.argv = {["pagedmla", *arguments]!r}
from pagedmla.cli.entry import run
try:
    run()
finally:
    sys.stderr.write(str("transformers" in sys.modules))
"""
    done = run_process("-c", source)
    assert done.returncode == 0
    assert done.stderr.endswith("False")


def test_a_missing_extra_is_named() -> None:
    source = """
import sys
sys.modules["transformers"] = None
sys.modules["safetensors"] = None
sys.argv = ["pagedmla", "generate", "--device", "cpu"]
from pagedmla.cli.entry import run
run()
"""
    done = run_process("-c", source)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'pagedmla[transformers]'" in done.stderr


def test_the_version_is_the_packages() -> None:
    assert run_cli("--version").stdout.strip() == pagedmla.__version__


@pytest.mark.parametrize(
    "arguments",
    [
        ["unknown"],
        ["check", "--limit", "0"],
        ["check", "--limit", "x"],
        ["generate", "--tokens", "0"],
        ["generate", "--tokens", "-5"],
        ["generate", "--page-size", "0"],
        ["generate", "--temperature", "-1"],
        ["generate", "--dtype", "fp8"],
        ["info", "--nonsense"],
    ],
)
def test_bad_usage_exits_with_2(arguments: list[str]) -> None:
    result = run_cli(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: pagedmla" in result.stderr
