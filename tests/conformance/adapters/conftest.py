"""Adapters of other projects over stand-ins, on a CPU that passes for whatever device they want."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pagedmla.conformance.adapters import aiter, limits, make_adapter, software
from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.spec import BatchSpec
from pagedmla.contract.target import Target

from .fakes import FakeAiter, FakeFlashInfer, FakeFlashMLA, fake_fa3, fake_vllm_triton

CPU = torch.device("cpu")
_FILE = Path("vllm/v1/attention/ops/triton_decode_attention.py")

STAND_INS = (
    "flash_mla",
    "fa3",
    "vllm_triton",
    "flashinfer_fa2",
    "flashinfer_fa3",
    "aiter",
    "flash_mla:flash_mla",
    "flash_mla:older",
    "flash_mla:newer",
    "flashinfer:somebodys",
    "aiter:somebodys",
)

Install = Callable[..., Adapter]


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device an implementation wants, this is one."""
    monkeypatch.setattr(limits, "not_cuda", lambda device: None)
    monkeypatch.setattr(limits, "not_arch", lambda device, *taken: None)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, any_device: None) -> Install:
    """Puts the stand-in of an adapter's software in place, and gives the adapter, loaded."""

    def install(name: str, spoil: float = 0.0) -> Adapter:
        _put(monkeypatch, name, spoil)
        adapter = make_adapter(name)
        assert adapter.load(None) is None
        assert adapter.name == name
        assert adapter.version
        return adapter

    return install


def _put(monkeypatch: pytest.MonkeyPatch, name: str, spoil: float) -> None:
    fake_mla, fake_aiter = FakeFlashMLA(spoil, tensors=name != "flash_mla:newer"), FakeAiter(spoil)
    found = software.Software(_FILE, "vllm 0.0", True)
    if name in ("flash_mla", "fa3"):
        monkeypatch.setattr(f"pagedmla.conformance.adapters.{name}.find_software", lambda *a: found)
        monkeypatch.setattr(f"pagedmla.conformance.adapters.{name}.load_library", lambda path: None)
        monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
        library, operation, fake = (
            ("_flashmla_C", "dense_decode_fwd", fake_mla.dense_decode_fwd)
            if name == "flash_mla"
            else ("_vllm_fa3_C", "fwd", fake_fa3(spoil))
        )
        monkeypatch.setattr(getattr(torch.ops, library), operation, fake, raising=False)
    elif name == "vllm_triton":
        module = ModuleType("vllm.v1.attention.ops.triton_decode_attention")
        module.decode_attention_fwd = fake_vllm_triton(spoil)  # type: ignore[attr-defined]
        _modules(monkeypatch, module)
        monkeypatch.setattr("pagedmla.conformance.adapters.vllm_triton.find_software", lambda *a: found)
    elif name.startswith("flashinfer"):
        module = ModuleType("somebodys" if ":" in name else "flashinfer.mla")
        wrapper = type("BatchMLAPagedAttentionWrapper", (FakeFlashInfer,), {"spoil": spoil})
        module.BatchMLAPagedAttentionWrapper = wrapper  # type: ignore[attr-defined]
        _modules(monkeypatch, module)
    elif name == "aiter":
        target = Target("amd", "gfx950", 256, 160 * 1024)
        monkeypatch.setattr(aiter, "Target", SimpleNamespace(detect=lambda device: target))
        # the decode is in a submodule, the planner at the top
        _modules(monkeypatch, fake_aiter.module("aiter", "get_mla_metadata_info_v1", "get_mla_metadata_v1"))
        _modules(monkeypatch, fake_aiter.module("aiter.mla", "mla_decode_fwd"))
    elif name == "aiter:somebodys":
        _modules(monkeypatch, fake_aiter.module("somebodys"))
    else:
        _modules(monkeypatch, fake_mla.module(name.partition(":")[2]))


def _modules(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Puts ``module`` into sys.modules, with empty packages above it."""
    parts = module.__name__.split(".")
    for count in range(1, len(parts)):
        package = ".".join(parts[:count])
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def batch_for(adapter: Adapter, *seq_lens: int, **fields: Any) -> BatchSpec:
    """A small batch, of pages and heads that the adapter takes."""
    page_size = 64 if adapter.name in ("flash_mla", "flash_mla:flash_mla") else 16
    heads = 16 if adapter.name == "aiter" else 3
    return BatchSpec(seq_lens, **{"num_heads": heads, "page_size": page_size, **fields})
