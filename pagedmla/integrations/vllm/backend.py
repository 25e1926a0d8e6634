"""The four classes that vLLM asks a backend for; loaded when vLLM wants the backend CUSTOM, and only then.

Read in vLLM 0.21.0: model_executor/layers/attention/mla_attention.py (its base classes, and the caller of ``forward_mqa``) and
v1/attention/backend.py.  What changes between releases is met by taking arguments by name and letting others pass.
``validate_configuration`` is not overridden: its arguments differ most, and vLLM's own words about what it asks stay.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs  # type: ignore[import-not-found]
from vllm.model_executor.layers.attention.mla_attention import (  # type: ignore[import-not-found]
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform  # type: ignore[import-not-found]
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf  # type: ignore[import-not-found]

from pagedmla.contract.errors import Unsupported
from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.contract.problem import DecodeProblem
from pagedmla.decode import Query
from pagedmla.integrations.vllm.capacity import step_bounds
from pagedmla.integrations.vllm.selection import (
    HEAD_DIMS,
    KERNEL_BLOCK_SIZES,
    KV_CACHE_DTYPES,
    PREFERRED_BLOCK_SIZE,
    Configuration,
    reason_against,
    require_plain_attention,
    target_of,
)
from pagedmla.integrations.vllm.step import DecodeStep, StepBuffers


class PagedMLABackend(MLACommonBackend):
    """What vLLM's selector asks."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """vLLM's enumeration has this one name for backends from outside, and looks names up in it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedMLAImpl]:
        """Runs in every layer."""
        return PagedMLAImpl

    @staticmethod
    def get_builder_cls() -> type[PagedMLAMetadataBuilder]:
        """Runs once a step."""
        return PagedMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Numbers of a cached token."""
        return list(HEAD_DIMS)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[Any]:
        """Any number of tokens; the plain numbers are those that vLLM may cut a larger block into.

        Newer releases pass ``kv_cache_spec``.
        """
        return [*KERNEL_BLOCK_SIZES, MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Tokens of a block where the user names no size."""
        return PREFERRED_BLOCK_SIZE

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """The decode has such a mode, and the builder asks for it when vLLM does."""
        return True

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """Why not, in one line, or None; vLLM shows it among its own reasons."""
        # 0.21 passes everything by position, newer releases pass more
        given = inspect.signature(super().supports_combination).bind(*args, **kwargs).arguments
        configuration = Configuration(
            **{name: given[name] for name in Configuration.__dataclass_fields__ if name in given}
        )
        capability = given["device_capability"]
        vendor = "amd" if current_platform.is_rocm() else "nvidia"
        return reason_against(configuration, target_of(vendor, (capability.major, capability.minor)))


@dataclass
class PagedMLADecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's own fields, and the step.

    Attributes:
        step: what every layer of the step calls.
    """

    step: DecodeStep


class PagedMLAMetadataBuilder(MLACommonMetadataBuilder):
    """Makes a step's metadata; there is one for each group of layers and each micro-batch, with buffers of its own."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        # with a sequence's tokens on several ranks, bottom-right alignment with a rank's own keys is wrong from two query
        # tokens on; vLLM then sends such requests through its prefill
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            MLACommonMetadata,
            supports_dcp_with_varlen=False,
        )
        layer = _the_layer(vllm_config, layer_names)
        problem = DecodeProblem(
            # under decode context parallelism the queries of all ranks' heads arrive
            num_heads=layer.num_heads * self.dcp_world_size,
            softmax_scale=float(layer.scale),
            kv_lora_rank=layer.kv_lora_rank,
            qk_rope_head_dim=layer.qk_rope_head_dim,
            page_size=kv_cache_spec.block_size,
            q_dtype=vllm_config.model_config.dtype,
            kv_layout=layout_of_dtype(kv_cache_spec.dtype).name,
            max_q_len=self.reorder_batch_threshold,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        bounds = step_bounds(
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            max_q_len=self.reorder_batch_threshold,
            max_model_len=vllm_config.model_config.max_model_len,
            page_size=kv_cache_spec.block_size,
            block_size=max(kv_cache_spec.block_size, vllm_config.cache_config.block_size),
            num_shards=self.dcp_world_size,
        )
        self.buffers = StepBuffers(problem, bounds, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Graphs for decode, with drafts too; not for drafts under decode context parallelism, which are no decode here."""
        sharded = vllm_config.parallel_config.decode_context_parallel_size > 1
        if sharded and vllm_config.speculative_config is not None:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
        **others: Any,
    ) -> PagedMLADecodeMetadata:
        step = self.buffers.step(
            block_table_tensor,
            seq_lens_device,
            query_start_loc_device,
            query_start_loc_cpu,
            num_decode_tokens,
        )
        return PagedMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            step=step,
        )


def _the_layer(vllm_config: Any, layer_names: list[str]) -> Any:
    """A layer that stands for all of a builder's.

    Raises:
        Unsupported: they have different numbers of heads, for which the buffers have one.
    """
    layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
    heads = sorted({layer.num_heads for layer in layers})
    if len(heads) > 1:
        wanted = "the same number of heads in all layers of a cache group"
        raise Unsupported("num_heads", "num_heads", wanted, " and ".join(map(str, heads)))
    return layers[0]


class PagedMLAImpl(MLACommonImpl):
    """One layer's attention.  Prefill, and writing the cache, are vLLM's own."""

    can_return_lse_for_decode: bool = True
    # asked by newer releases
    supports_dcp: bool = True
    lse_base_on_e: bool = True

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
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        require_plain_attention(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            # an enumeration of strings
            attn_type=getattr(attn_type, "value", attn_type),
        )
        self.supports_quant_query_input = False

    def forward_mqa(
        self, q: Query, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor]:
        """Decodes: (out [num_tokens, num_heads, kv_lora_rank], lse f32 [num_tokens, num_heads], natural logarithm)."""
        step: DecodeStep = attn_metadata.decode.step
        return step.attend(q, kv_c_and_k_pe_cache, self.scale)
