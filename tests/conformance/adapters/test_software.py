"""Where software is looked for, and what is said when it is not there or does not load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedmla.conformance.adapters import make_adapter
from pagedmla.conformance.adapters.software import (
    PEER_ERRORS,
    find_software,
    first_line,
    import_software,
    load_library,
    peer_errors,
    version_of,
)
from pagedmla.conformance.subject import Subject

from .conftest import batch_for

LONE_FILE = """
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
is_hip = current_platform.is_rocm()
def decode_attention_fwd(
    q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale, page_size=1,
    logit_cap=0.0, k_scale=None, v_scale=None, is_mla=False,
):
    import pagedmla
    assert is_mla and k_scale.item() == v_scale.item() == 1.0
    pagedmla.decode(q, k_buffer[:, :, 0], req_to_token, b_seq_len, softmax_scale=sm_scale, out=o, lse=lse, backend="torch")
"""

OTHERS = ("flash_mla", "fa3", "vllm_triton", "flashinfer_fa2", "flashinfer_fa3", "aiter")


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module path and the loaded modules as they were; triton stays, which cannot be loaded twice."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] != "triton":
            del sys.modules[name]


def vllm_modules() -> set[str]:
    return {name for name in sys.modules if name.split(".")[0] == "vllm"}


def test_the_version_is_the_wheels_or_the_files_own(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"abc")
    found = find_software("somebody", ("inner/x.so",), tmp_path)
    assert not isinstance(found, str)
    assert found.path == tmp_path / "x.so"
    assert found.version == "somebody, file ba7816bf8f01"  # SHA-256 of "abc"
    (tmp_path / "somebody-1.2.dist-info").mkdir()
    found = find_software("somebody", ("inner/x.so",), tmp_path)
    assert not isinstance(found, str)
    assert (found.version, found.installed) == ("somebody 1.2", False)
    installed = find_software("torch", ("nn/modules/linear.py",), None)
    assert not isinstance(installed, str)
    assert (installed.installed, installed.path.name) == (True, "linear.py")
    assert "is installed without nothing.so" in str(find_software("torch", ("nothing.so",), None))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_nowhere_is_said_not_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for package in ("flashinfer", "vllm", "aiter"):
        monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for folder in (None, tmp_path):
        reason = make_adapter(name).load(folder)
        assert reason is not None
        assert "not installed" in reason


def test_a_file_that_is_no_library_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "_flashmla_C.abi3.so").write_bytes(b"not a library")
    (tmp_path / "_vllm_fa3_C.abi3.so").write_bytes(b"not a library")
    for name, file in (("flash_mla", "_flashmla_C.abi3.so"), ("fa3", "_vllm_fa3_C.abi3.so")):
        reason = make_adapter(name).load(tmp_path)
        assert reason is not None
        assert reason.startswith(f"{file} does not load")
    assert "does not load" in str(load_library(tmp_path / "none.so"))


def test_vllms_lone_file_runs_and_leaves_no_stand_in_behind(tmp_path: Path, any_device: None) -> None:
    (tmp_path / "vllm_triton_decode.py").write_text(LONE_FILE)
    before, adapter = vllm_modules(), make_adapter("vllm_triton")
    assert adapter.load(tmp_path) is None
    assert adapter.version.startswith("vllm, file ")
    assert vllm_modules() == before
    Subject(adapter, torch.device("cpu")).checked(batch_for(adapter, 131, 5), {})


def test_a_lone_file_that_does_not_load_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "vllm_triton_decode.py").write_text("import a_module_that_nobody_has\n")
    before = vllm_modules()
    assert "a_module_that_nobody_has" in str(make_adapter("vllm_triton").load(tmp_path))
    assert vllm_modules() == before


def test_modules_come_out_of_the_folder_and_say_what_they_lack(tmp_path: Path) -> None:
    (tmp_path / "somebodys.py").write_text("__version__ = '7'\ndef flash_mla_with_kvcache(): ...\n")
    (tmp_path / "needy.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    reasons = {
        name: make_adapter(name).load(tmp_path)
        for name in (
            "flash_mla:somebodys",
            "flashinfer:somebodys",
            "flash_mla:needy",
            "aiter:broken",
            "aiter:package",
            "flash_mla:package.inner",
            "aiter:nowhere",
        )
    }
    assert reasons == {
        "flash_mla:somebodys": "somebodys has no get_mla_metadata",
        "flashinfer:somebodys": "somebodys has no BatchMLAPagedAttentionWrapper",
        "flash_mla:needy": "needy needs a_module_that_nobody_has, which is not installed",
        "aiter:broken": "broken does not load: ZeroDivisionError: division by zero",
        "aiter:package": "package has no mla_decode_fwd",
        "flash_mla:package.inner": "package has no module package.inner",
        "aiter:nowhere": "nowhere is not installed, and not in a folder of peers",
    }
    assert version_of("somebodys") == "somebodys 7"
    assert version_of("package") == "package of an unknown version"
    assert import_software("somebodys", None) is sys.modules["somebodys"]


def test_errors_are_told_in_a_line() -> None:
    assert first_line(ValueError("\none\ntwo")) == "ValueError: one"
    assert first_line(KeyError()) == "KeyError"
    assert set(PEER_ERRORS) < set(peer_errors())
