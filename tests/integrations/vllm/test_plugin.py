"""Registration: which vLLM is taken, and what a user reads where none is."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from integrations.vllm import stand_in

from pagedmla.integrations.vllm import plugin
from pagedmla.integrations.vllm.versions import refusal_of_version

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("version", ["0.21.0", "0.21.1rc2", "0.25.1+cu130", "0.33.0"])
def test_known_releases_are_taken(version: str) -> None:
    assert refusal_of_version(version) is None


@pytest.mark.parametrize("version", ["0.20.2", "0.34.0", "1.0.0", "0.9.21", "dev"])
def test_others_are_refused_in_one_line_with_both_ends_of_the_range(version: str) -> None:
    assert refusal_of_version(version) == f"vllm: wanted vllm 0.21 to 0.33, got vllm {version} [vllm_version]"


def test_no_vllm_is_said_as_well() -> None:
    assert (
        refusal_of_version(None)
        == "vllm: wanted vllm 0.21 to 0.33, got none that is installed [vllm_missing]"
    )


@pytest.fixture
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.21.0")


@pytest.mark.usefixtures("_found", "modules")
def test_the_backend_is_registered_once_or_twice_and_the_path_leads_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugin.register()
    plugin.register()
    assert caplog.records == []
    module, _, name = stand_in.AttentionBackendEnum.CUSTOM.get_path().rpartition(".")
    assert getattr(import_module(module), name).get_name() == "CUSTOM"
    # a backend from vLLM itself is left alone
    assert not stand_in.AttentionBackendEnum.TRITON_MLA.is_overridden()


@pytest.mark.usefixtures("_found", "modules")
def test_a_name_that_another_plug_in_took_is_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    stand_in.register_backend(stand_in.AttentionBackendEnum.CUSTOM, "theirs.Backend")
    plugin.register()
    assert stand_in.AttentionBackendEnum.CUSTOM.get_path() == "theirs.Backend"
    assert len(caplog.records) == 1
    assert "theirs.Backend" in caplog.text
    assert "VLLM_PLUGINS=pagedmla" in caplog.text


@pytest.mark.usefixtures("modules")
def test_an_unknown_release_gets_one_line_and_no_backend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.40.1")
    plugin.register()
    assert [(record.levelno, "\n" in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, False)
    ]
    assert "got vllm 0.40.1 [vllm_version]" in caplog.text
    assert not stand_in.AttentionBackendEnum.CUSTOM.is_overridden()


def test_the_entry_point_leads_to_the_function() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split('[project.entry-points."vllm.general_plugins"]')[1].split("\n[")[0]
    found = re.findall(r'^(\w+) = "([\w.]+):(\w+)"', section, flags=re.MULTILINE)
    # VLLM_PLUGINS, and the message above, use the name
    assert [name for name, _, _ in found] == ["pagedmla"]
    assert getattr(import_module(found[0][1]), found[0][2]) is plugin.register


def test_loading_the_plug_in_imports_no_vllm_and_no_triton() -> None:
    source = (
        "import sys, pagedmla.integrations.vllm.plugin\n"
        "print(sorted({'vllm', 'triton'} & {name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_adapter_alone_touches_vllm(modules: dict[str, ModuleType]) -> None:
    folder = ROOT / "pagedmla" / "integrations" / "vllm"
    importing = [
        path.name
        for path in sorted(folder.glob("*.py"))
        if re.search(r"^\s*(from|import) vllm\b", path.read_text(), flags=re.MULTILINE)
    ]
    assert importing == ["backend.py", "plugin.py"]
