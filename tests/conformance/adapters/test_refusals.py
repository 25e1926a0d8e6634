"""What is known not to be taken is refused in words, before anything is called; what is known to be taken is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagedmla.conformance.adapters import aiter, limits, make_adapter
from pagedmla.conformance.configurations import configurations_for
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Refused, Subject
from pagedmla.contract.target import Target

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
HOPPER = Target("nvidia", "sm_90", 132, 232448)
AMPERE = Target("nvidia", "sm_80", 108, 166912)
PEERS = ("flash_mla", "fa3", "vllm_triton", "flashinfer_fa2", "flashinfer_fa3")

USUAL = BatchSpec((131, 0, 7), page_size=64)
EVEN_2: dict[str, Any] = {"q_lens": (2, 2, 2)}

# field changes -> who does not take them, and the words that say so
CHANGES: tuple[tuple[dict[str, Any], dict[str, str]], ...] = (
    ({}, {}),
    ({"dtype": "fp16"}, {}),
    ({"num_heads": 1}, {}),
    ({"num_heads": 129}, {}),
    ({"page_size": 16}, {"flash_mla": "pages of 64 tokens, not 16"}),
    ({"page_size": 1}, {"flash_mla": "pages of 64 tokens, not 1"}),
    (EVEN_2, {"vllm_triton": "one query token"}),
    ({**EVEN_2, "causal": False}, {"vllm_triton": "one query token"}),
    ({"q_lens": (1, 0, 3)}, {"flash_mla": "the same number", "vllm_triton": "one query token"}),
    (
        {"rows_after": 1},
        {
            "flash_mla": "the same number",
            "vllm_triton": "one query token",
            "flashinfer_fa2": "of its sequences alone",
            "flashinfer_fa3": "of its sequences alone",
        },
    ),
    ({"rows_before": 1}, dict.fromkeys(PEERS, "")),
    ({"q_lens": (0, 0, 0)}, dict.fromkeys(PEERS, "query token")),
    ({"dtype": "fp32"}, dict.fromkeys(PEERS, "bfloat16 and float16, not torch.float32")),
    ({"kv_dtype": "e4m3fn"}, dict.fromkeys(PEERS, "a cache of the queries' dtype")),
    (
        {"kv_lora_rank": 256},
        dict.fromkeys(
            ("flash_mla", "flashinfer_fa2", "flashinfer_fa3"), "takes 512 + 64 numbers a token, not 256 + 64"
        ),
    ),
    ({"qk_rope_head_dim": 0}, {name: "" for name in PEERS if name != "vllm_triton"}),
    ({"kv_lora_rank": 320}, dict.fromkeys(PEERS, "")),
)


def on(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(limits, "Target", SimpleNamespace(detect=lambda device: target))


@pytest.mark.parametrize(("change", "refused"), CHANGES, ids=lambda value: repr(value)[:60])
def test_what_peers_take_on_hopper(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], refused: dict[str, str]
) -> None:
    on(monkeypatch, HOPPER)
    spec = BatchSpec(**{**vars(USUAL), **change})
    for name in PEERS:
        reason = make_adapter(name).refuses(spec, {}, CUDA)
        assert (reason is None) == (name not in refused), (name, reason)
        assert refused.get(name, "") in (reason or "")


def test_what_peers_take_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, AMPERE)
    for name in PEERS:
        reason = make_adapter(name).refuses(USUAL, {}, CUDA)
        if name in ("vllm_triton", "flashinfer_fa2"):
            assert reason is None
        else:
            assert reason == "takes sm_90, not sm_80"


@pytest.mark.parametrize("name", [*PEERS, "aiter", "flash_mla:flash_mla"])
def test_no_peer_takes_a_cpu(name: str) -> None:
    adapter = make_adapter(name)
    assert "takes" in (adapter.refuses(USUAL, {}, CPU) or "")
    assert configurations_for(adapter, CPU) == []
    with pytest.raises(Refused):
        Subject(adapter, CPU).checked(USUAL, {})


def aiter_on(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    target = Target("amd", arch, 304, 65536)
    on(monkeypatch, target)
    monkeypatch.setattr(aiter, "Target", SimpleNamespace(detect=lambda device: target))


@pytest.mark.parametrize(
    ("arch", "change", "options", "words"),
    [
        ("gfx942", {}, {}, ""),
        ("gfx942", {}, {"persistent": True}, ""),
        ("gfx950", {"num_heads": 24}, {"persistent": True}, ""),
        ("gfx950", {"num_heads": 128, **EVEN_2, "causal": False}, {"persistent": True}, ""),
        ("gfx942", {"num_heads": 128, **EVEN_2}, {}, ""),
        (
            "gfx942",
            {"num_heads": 24},
            {},
            "no kernel without a schedule for 24 heads and 1 query tokens on gfx942",
        ),
        ("gfx942", {"num_heads": 64}, {}, "no kernel without a schedule for 64 heads"),
        ("gfx942", {"num_heads": 24}, {"persistent": True}, "no kernel with a schedule for 24 heads"),
        ("gfx942", {**EVEN_2, "causal": False}, {}, "masks causally"),
        ("gfx942", {"q_lens": (1, 2, 3)}, {}, "the same number of query tokens"),
        ("gfx942", {"dtype": "fp16"}, {}, "takes bfloat16, not torch.float16"),
        ("gfx942", {"kv_dtype": "e4m3fnuz"}, {}, "a cache of the queries' dtype"),
        ("gfx942", {"page_size": 48}, {}, "a power of two"),
        ("gfx942", {"kv_lora_rank": 256}, {}, "512 + 64"),
        ("gfx90a", {}, {}, "takes gfx942 and gfx950, not gfx90a"),
    ],
)
def test_what_aiter_takes(
    monkeypatch: pytest.MonkeyPatch, arch: str, change: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    aiter_on(monkeypatch, arch)
    spec = BatchSpec(**{**vars(USUAL), **change})
    reason = make_adapter("aiter").refuses(spec, options, CUDA)
    assert (reason is None) == (not words)
    assert words in (reason or "")


@pytest.mark.parametrize("name", ["aiter:somebodys", "flash_mla:somebodys", "flashinfer:somebodys"])
def test_of_unknown_modules_only_the_signature_is_known(name: str) -> None:
    adapter = make_adapter(name)
    for change in ({}, {"page_size": 3}, {"num_heads": 129}, {"kv_lora_rank": 320}, {"dtype": "fp32"}):
        assert adapter.refuses(BatchSpec(**{**vars(USUAL), **change}), {}, CPU) is None
    assert adapter.refuses(BatchSpec((3,), q_lens=(0,)), {}, CPU) is not None
    ragged = adapter.refuses(BatchSpec((3, 4), q_lens=(1, 2)), {}, CPU)
    assert (ragged is None) == (name != "flash_mla:somebodys")
