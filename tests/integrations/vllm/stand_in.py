"""As much of vLLM 0.21.0 as the plug-in touches, written after its source; the comments say where each part stands there.

MLA = model_executor/layers/attention/mla_attention.py, BACKEND = v1/attention/backend.py.  Whatever the plug-in overrides has
vLLM's signature and is called as vLLM calls it.  What would need a model, a C++ operator or a process group is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


class DeviceCapability(NamedTuple):
    """platforms/interface.py:60."""

    major: int
    minor: int


class MultipleOf:
    """BACKEND:48."""

    def __init__(self, base: int) -> None:
        self.base = base


class AttentionType(str, Enum):
    """BACKEND:32."""

    DECODER = "decoder"
    ENCODER = "encoder"


class AttentionCGSupport(Enum):
    """BACKEND:499."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class QueryLenSupport(Enum):
    """MLA:1119."""

    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend:
    """MLA:1180 over AttentionBackend, BACKEND:55."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [320, 576]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """BACKEND:175."""
        if block_size is None:
            return True
        sizes = [getattr(size, "base", size) for size in cls.get_supported_kernel_block_sizes()]
        return not sizes or any(block_size % size == 0 for size in sizes)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """BACKEND:257."""
        return None

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        device_capability: DeviceCapability,
    ) -> list[str]:
        """BACKEND:271, without the features that MLA layers cannot have."""
        reasons = []
        sizes = cls.get_supported_head_sizes()
        if sizes and head_size not in sizes:
            reasons.append("head_size not supported")
        if dtype not in cls.supported_dtypes:
            reasons.append("dtype not supported")
        if kv_cache_dtype is not None and kv_cache_dtype not in cls.supported_kv_cache_dtypes:
            reasons.append("kv_cache_dtype not supported")
        if not cls.supports_block_size(block_size):
            reasons.append("block_size not supported")
        if use_mla != cls.is_mla():
            reasons.append("non-MLA not supported")
        if has_sink:
            reasons.append("attention sinks not supported")
        if use_sparse != cls.is_sparse():
            reasons.append("sparse not supported")
        # by position, as there (BACKEND:322)
        found = cls.supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, device_capability
        )
        return reasons if found is None else [*reasons, found]


@dataclass
class MLACommonDecodeMetadata:
    """MLA:1254."""

    block_table: Tensor
    seq_lens: Tensor
    dcp_tot_seq_lens: Tensor | None


@dataclass
class MLACommonMetadata:
    """MLA:1264, the fields that a decode meets."""

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode: MLACommonDecodeMetadata | None = None


@dataclass
class CommonAttentionMetadata:
    """BACKEND:353, likewise."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    dcp_local_seq_lens: Tensor | None = None


class MLACommonMetadataBuilder:
    """MLA:1374."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.SINGLE_ONLY
    reorder_batch_threshold: int = 1

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        metadata_cls: type | None = None,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        """MLA:1469, without what prefill needs."""
        self.metadata_cls = metadata_cls or MLACommonMetadata
        self.kv_cache_spec, self.vllm_config, self.device = kv_cache_spec, vllm_config, device
        # there: of the process group
        self.dcp_world_size = vllm_config.parallel_config.decode_context_parallel_size
        # BACKEND:550, _init_reorder_batch_threshold
        drafts = vllm_config.speculative_config
        if self.query_len_support != QueryLenSupport.SINGLE_ONLY and drafts is not None:
            most = 1 + (2 if drafts.parallel_drafting else 1) * drafts.num_speculative_tokens
            self.reorder_batch_threshold = max(self.reorder_batch_threshold, most)
        if self.dcp_world_size > 1 and not supports_dcp_with_varlen:
            self.reorder_batch_threshold = 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """BACKEND:542."""
        return cls._cudagraph_support

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> MLACommonDecodeMetadata:
        """MLA:1556."""
        return MLACommonDecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device)

    def build(self, common_prefix_len: int, m: CommonAttentionMetadata) -> MLACommonMetadata:
        """MLA:1589, of a batch that is all decodes (v1/attention/backends/utils.py:547)."""
        if m.max_query_len > self.reorder_batch_threshold:
            raise ValueError("a prefill, which this stand-in does not split off")
        seq_lens, total = m.seq_lens, None
        if self.dcp_world_size > 1:
            assert m.dcp_local_seq_lens is not None
            seq_lens, total = m.dcp_local_seq_lens, m.seq_lens[: m.num_reqs]
        # MLA:1837, by name, as there
        decode = self._build_decode(
            block_table_tensor=m.block_table_tensor[: m.num_reqs, ...],
            seq_lens_device=seq_lens[: m.num_reqs],
            max_seq_len=m.max_seq_len,
            query_start_loc_cpu=m.query_start_loc_cpu[: m.num_reqs + 1],
            query_start_loc_device=m.query_start_loc[: m.num_reqs + 1],
            num_decode_tokens=m.num_actual_tokens,
            dcp_tot_seq_lens_device=total,
        )
        return self.metadata_cls(m.num_actual_tokens, m.num_reqs, m.num_actual_tokens, decode)


class MLACommonImpl:
    """MLA:1939 over AttentionImplBase, BACKEND:685."""

    can_return_lse_for_decode: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        self.num_heads, self.scale = num_heads, float(scale)
        self.kv_lora_rank = kv_lora_rank
        self.supports_quant_query_input = True

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """MLA:2329."""
        raise NotImplementedError


class AttentionBackendEnum(Enum):
    """v1/attention/backends/registry.py:34; a backend's value is the path of its class."""

    TRITON_MLA = "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
    CUSTOM = None

    def get_path(self) -> str:
        """registry.py:92."""
        path = _OVERRIDES.get(self, self.value)
        if not path:
            raise ValueError(f"Backend {self.name} must be registered before use.")
        return path

    def is_overridden(self) -> bool:
        """registry.py:123."""
        return self in _OVERRIDES


_OVERRIDES: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: AttentionBackendEnum, class_path: str) -> None:
    """registry.py:203, without its use as a decorator."""
    _OVERRIDES[backend] = class_path


def select_common_block_size(kv_manager_block_size: int, backends: list[Any]) -> int:
    """v1/worker/utils.py:260: the page size that kernels get for a manager's block size."""

    def supported(size: int) -> bool:
        return all(
            any(
                size == wanted if isinstance(wanted, int) else size % wanted.base == 0
                for wanted in backend.get_supported_kernel_block_sizes()
            )
            for backend in backends
        )

    if supported(kv_manager_block_size):
        return kv_manager_block_size
    listed = {s for b in backends for s in b.get_supported_kernel_block_sizes() if isinstance(s, int)}
    for size in sorted(listed, reverse=True):
        if kv_manager_block_size % size == 0 and supported(size):
            return size
    raise ValueError(f"No common block size for {kv_manager_block_size}. ")


def layer_of(num_heads: int, kv_lora_rank: int, softmax_scale: float) -> SimpleNamespace:
    """What a builder may ask a layer (MLAAttention, MLA:353)."""
    return SimpleNamespace(
        num_heads=num_heads, scale=softmax_scale, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=64
    )


def config_of(
    layers: dict[str, SimpleNamespace],
    *,
    dtype: torch.dtype = torch.float16,
    max_num_seqs: int = 8,
    max_model_len: int = 256,
    block_size: int = 16,
    num_speculative_tokens: int = 0,
    num_shards: int = 1,
) -> SimpleNamespace:
    """What a builder may ask of VllmConfig (config/vllm.py)."""
    drafts = SimpleNamespace(num_speculative_tokens=num_speculative_tokens, parallel_drafting=False)
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype, max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        cache_config=SimpleNamespace(block_size=block_size),
        parallel_config=SimpleNamespace(decode_context_parallel_size=num_shards),
        speculative_config=drafts if num_speculative_tokens else None,
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


_CONTENTS: dict[str, tuple[Any, ...]] = {
    "model_executor.layers.attention.mla_attention": (
        MLACommonBackend,
        MLACommonDecodeMetadata,
        MLACommonImpl,
        MLACommonMetadata,
        MLACommonMetadataBuilder,
        QueryLenSupport,
    ),
    "v1.attention.backend": (AttentionCGSupport, AttentionType, MultipleOf),
    "v1.attention.backends.registry": (AttentionBackendEnum, register_backend),
}


@contextmanager
def installed() -> Iterator[dict[str, ModuleType]]:
    """The stand-in as the importable package vllm; the adapter is imported anew inside, and forgotten after.

    Gives the modules by their names, for tests that change a setting.
    """
    ours = "pagedmla.integrations.vllm.backend"
    modules = {"vllm": ModuleType("vllm")}
    for path in (*_CONTENTS, "envs", "platforms"):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(["vllm", *parts[:end]])
            module = modules.setdefault(name, ModuleType(name))
            setattr(modules[name.rpartition(".")[0]], parts[end - 1], module)
    for path, contents in _CONTENTS.items():
        for item in contents:
            setattr(modules[f"vllm.{path}"], item.__name__, item)
    modules["vllm.envs"].VLLM_BATCH_INVARIANT = False  # type: ignore[attr-defined]
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_rocm=lambda: False)  # type: ignore[attr-defined]
    kept = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name == ours or name.split(".")[0] == "vllm"
    }
    _OVERRIDES.clear()
    sys.modules.update(modules)
    try:
        yield modules
    finally:
        for name in (*modules, ours):
            sys.modules.pop(name, None)
        sys.modules.update(kept)
        _OVERRIDES.clear()
