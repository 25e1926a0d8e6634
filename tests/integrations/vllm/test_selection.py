"""What vLLM's selector is told, by itself and through vLLM's own collecting of reasons."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from integrations.vllm.stand_in import DeviceCapability, MultipleOf, select_common_block_size

from pagedmla.contract.errors import Unsupported
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.target import KNOWN_TARGETS, Target
from pagedmla.integrations.vllm.selection import (
    Configuration,
    reason_against,
    require_kernel,
    require_plain_attention,
    target_of,
)

HOPPER = KNOWN_TARGETS["sm_90"]
DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [576, 320])
@pytest.mark.parametrize("block_size", [None, 1, 16, 64, 544])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_the_models_that_are_served(
    dtype: torch.dtype, head_size: int, block_size: int | None, arch: str
) -> None:
    word = {torch.bfloat16: "bfloat16", torch.float16: "float16"}[dtype]
    for kv_cache_dtype in (None, "auto", word):
        configuration = Configuration(head_size, dtype, kv_cache_dtype, block_size)
        assert reason_against(configuration, KNOWN_TARGETS[arch]) is None


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"use_mla": False, "head_size": 128}, ["use_mla=False", "Multi-head Latent Attention", "[use_mla]"]),
        ({"use_sparse": True}, ["use_sparse=True", "[use_sparse]"]),
        ({"has_sink": True}, ["has_sink=True", "[has_sink]"]),
        ({"head_size": 192}, ["head_size=192", "576 (512 + 64) or 320 (256 + 64)"]),
        ({"kv_cache_dtype": "fp8"}, ["torch.bfloat16 with a fp8_per_tensor cache", "[dtype_pair]"]),
        ({"kv_cache_dtype": "fp8_ds_mla"}, ["a fp8_ds_mla cache", "[dtype_pair]"]),
        ({"kv_cache_dtype": "nvfp4"}, ["kv_cache_dtype=nvfp4", "auto or float16 or bfloat16"]),
        ({"kv_cache_dtype": "float16"}, ["torch.bfloat16 with a fp16 cache"]),
        ({"dtype": torch.float32}, ["torch.float32 with a fp32 cache"]),
        ({"use_sparse": True, "head_size": 192}, ["[use_sparse]", "[head_size]"]),
    ],
)
def test_what_is_refused_and_why(changes: dict[str, Any], parts: list[str]) -> None:
    given = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"} | changes
    reason = reason_against(Configuration(**given), HOPPER)
    assert reason is not None
    assert "\n" not in reason
    assert [part for part in parts if part not in reason] == []


@pytest.mark.parametrize(
    ("vendor", "capability", "arch"),
    [
        ("nvidia", (9, 0), "sm_90"),
        ("nvidia", (10, 0), "sm_100"),
        ("nvidia", (8, 7), "sm_87"),
        ("amd", (9, 4), "gfx942"),
        ("amd", (9, 5), "gfx950"),
    ],
)
def test_a_capability_names_the_device(vendor: str, capability: tuple[int, int], arch: str) -> None:
    target = target_of(vendor, capability)
    assert (target.vendor, target.arch) == (vendor, arch)
    assert target.shared_memory_bytes > 0


def test_an_old_gpu_is_refused_with_the_tables_reason() -> None:
    reason = reason_against(Configuration(576, torch.float16), target_of("nvidia", (7, 5)))
    assert reason is not None
    assert "from sm_80 on" in reason
    assert "nvidia sm_75" in reason


def test_the_torch_backend_is_no_kernel_for_a_gpu() -> None:
    problem = DecodeProblem(num_heads=16, softmax_scale=0.1, q_dtype=torch.float32, kv_layout="fp32")
    with pytest.raises(Unsupported) as caught:
        require_kernel(problem, HOPPER)
    assert {refusal.backend for refusal in caught.value.refusals} == {"gluon", "triton"}
    require_kernel(problem, Target("cpu", "any", 1, 0))


def test_what_a_layer_may_want_is_named() -> None:
    require_plain_attention(alibi_slopes=None, sliding_window=None, logits_soft_cap=None, attn_type="decoder")
    with pytest.raises(Unsupported) as caught:
        require_plain_attention(sliding_window=128, logits_soft_cap=None, attn_type="encoder")
    assert "sliding_window=128" in str(caught.value)
    assert "attn_type='encoder'" in str(caught.value)
    assert len(caught.value.refusals) == 2


def _validate(backend: ModuleType, **changes: Any) -> list[str]:
    given = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": False,
        "device_capability": DeviceCapability(9, 0),
    }
    return backend.PagedMLABackend.validate_configuration(**given | changes)


def test_vllms_selector_takes_the_backend_and_shows_our_reasons(backend: ModuleType) -> None:
    assert _validate(backend) == []
    assert _validate(backend, head_size=320, dtype=torch.float16, block_size=16) == []
    # vLLM's own words and ours
    sparse = _validate(backend, use_sparse=True)
    assert sparse[0] == "sparse not supported"
    assert "none chosen by an indexer" in sparse[1]
    assert any("Multi-head Latent" in reason for reason in _validate(backend, use_mla=False, head_size=128))
    assert any("fp8_per_tensor" in reason for reason in _validate(backend, kv_cache_dtype="fp8"))
    assert any("sm_75" in r for r in _validate(backend, device_capability=DeviceCapability(7, 5)))


def test_more_arguments_of_newer_releases_do_no_harm(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = backend.PagedMLABackend.__mro__[1]

    def newer(
        cls: type,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> None:
        return None

    # one more in the middle
    monkeypatch.setattr(base, "supports_combination", classmethod(newer))
    ask = backend.PagedMLABackend.supports_combination
    given = (576, torch.bfloat16, "auto", None, True, False)
    assert ask(*given, False, False, DeviceCapability(9, 0)) is None
    assert "[use_sparse]" in ask(*given, True, False, DeviceCapability(9, 0))


class _OnlyOf64:
    """As FLASHMLA (v1/attention/backends/mla/flashmla.py:58)."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [64]


class _MultiplesOf16:
    """As FLASH_ATTN_MLA (v1/attention/backends/mla/flashattn_mla.py:52)."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]


@pytest.mark.parametrize(
    ("block_size", "others", "page_size"),
    [
        (1, [], 1),
        (16, [], 16),
        (64, [], 64),
        (544, [], 544),
        # smaller than the manager's block
        (128, [_OnlyOf64], 64),
        (544, [_MultiplesOf16], 544),
        (192, [_OnlyOf64, _MultiplesOf16], 64),
    ],
)
def test_the_page_size_that_kernels_get(
    backend: ModuleType, block_size: int, others: list[type], page_size: int
) -> None:
    assert select_common_block_size(block_size, [backend.PagedMLABackend, *others]) == page_size
    assert backend.PagedMLABackend.supports_block_size(block_size)


def test_blocks_of_64_where_the_user_names_none(backend: ModuleType) -> None:
    assert backend.PagedMLABackend.get_preferred_block_size(16) == 64
    # newer releases pass a specification
    assert backend.PagedMLABackend.get_supported_kernel_block_sizes(None)[:2] == [64, 16]
