"""Weight absorption (DeepSeek-V2 paper, section 2.1.2 and appendix): the key and value up-projections, moved
to the query and output.

    k_nope[h] = W_UK[h] c      q_nope . k_nope[h] = (W_UK[h]^T q_nope) . c
    v[h]      = W_UV[h] c      sum_j p_j v_j[h]   = W_UV[h] (sum_j p_j c_j)

so that attention runs on the cached latents c themselves and nothing is expanded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pagedmla.integrations.transformers.modules import MLAAttention


@dataclass(frozen=True)
class HeadSizes:
    """Per-head sizes of an MLA attention: ``qk_nope_head_dim``, ``v_head_dim`` and the latent's ``kv_lora_rank``."""

    nope: int
    value: int
    rank: int

    @classmethod
    def of(cls, module: MLAAttention) -> HeadSizes:
        """The sizes of an MLA attention module."""
        return cls(module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank)


def has_weight_view(kv_b_proj: nn.Module) -> bool:
    """Whether ``kv_b_proj.weight`` IS the map that the module applies, so that a view of it may be used.

    Only of a plain ``nn.Linear`` that nobody has hooked: a quantised, LoRA-wrapped, parametrised, sharded or
    offloaded one computes something else, or holds its numbers elsewhere.
    """
    if type(kv_b_proj) is not nn.Linear or "forward" in vars(kv_b_proj):
        return False
    if kv_b_proj._forward_hooks or kv_b_proj._forward_pre_hooks:
        return False
    weight = kv_b_proj.weight
    is_plain = type(weight) is nn.Parameter or type(weight) is torch.Tensor
    return is_plain and weight.dtype in (torch.float32, torch.float16, torch.bfloat16) and not weight.is_meta


def absorbed_weights(
    module: MLAAttention, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK [num_heads, qk_nope_head_dim, kv_lora_rank] and W_UV [num_heads, v_head_dim, kv_lora_rank].

    Views of the weight where that is possible (``has_weight_view``), else what the module makes of the
    identity.  Nothing is
    kept from one call to the next: weights are updated, adapters switched.

    Args:
        module: an MLA attention module.
        dtype, device: the query's.
    """
    sizes = HeadSizes.of(module)
    if has_weight_view(module.kv_b_proj):
        weight = module.kv_b_proj.get_parameter("weight").to(dtype)
    else:
        weight = module.kv_b_proj(torch.eye(sizes.rank, dtype=dtype, device=device)).t()
    per_head = weight.reshape(-1, sizes.nope + sizes.value, sizes.rank)
    return per_head[:, : sizes.nope], per_head[:, sizes.nope :]


def absorbing_is_cheaper(num_new: int, num_keys: int, sizes: HeadSizes, is_view: bool) -> bool:
    """Whether absorbing takes fewer multiplications than expanding every key, for T new tokens over L keys.

    Per head, with r = kv_lora_rank, n = qk_nope_head_dim, v = v_head_dim (the rope part costs both the same):

        absorbed:  T L (2 r)    scores and weighted sum on latents      + T r (n + v)   into and out of the
            latent space
        expanded:  T L (n + v)  scores and weighted sum on keys, values + L r (n + v)   the expansion itself

    For a long context that is T < r (n + v) / (2 r - n - v): 171 new tokens for DeepSeek-V3, 398 for 192/256
    heads.  With L = T (a first prefill) expanding wins whenever 2 r > n + v; with 2 r <= n + v absorbing
    always does.

    Args:
        num_new: T, new tokens of a row.
        num_keys: L, keys of the longest row, new ones included.
        sizes: of the attention.
        is_view: False adds the r**2 (n + v) multiplications of asking the module for its weights.
    """
    both = sizes.nope + sizes.value
    probe = 0 if is_view else sizes.rank * sizes.rank * both
    absorbed = 2 * num_new * num_keys * sizes.rank + num_new * sizes.rank * both + probe
    expanded = num_new * num_keys * both + num_keys * sizes.rank * both
    return absorbed < expanded


def absorb_query(query: torch.Tensor, w_uk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves queries into the latent space.

    Args:
        query: [num_rows, num_heads, num_new, qk_nope_head_dim + qk_rope_head_dim].
        w_uk: [num_heads, qk_nope_head_dim, kv_lora_rank].

    Returns:
        [num_rows * num_new, num_heads, kv_lora_rank] and [num_rows * num_new, num_heads, qk_rope_head_dim],
        rows one after another.
    """
    num_heads, nope, _ = w_uk.shape
    by_head = query.transpose(0, 1).reshape(num_heads, -1, query.shape[-1])
    q_latent = torch.bmm(by_head[..., :nope], w_uk)
    return q_latent.transpose(0, 1), by_head[..., nope:].transpose(0, 1)


def project_output(out_latent: torch.Tensor, w_uv: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Weighted sums of latents to values.

    Args:
        out_latent: [num_rows * num_new, num_heads, kv_lora_rank], as ``absorb_query`` orders them.
        w_uv: [num_heads, v_head_dim, kv_lora_rank].
        num_rows: rows of the batch.

    Returns:
        [num_rows, num_new, num_heads, v_head_dim].
    """
    values = torch.bmm(out_latent.transpose(0, 1), w_uv.transpose(1, 2))
    return values.transpose(0, 1).reshape(num_rows, -1, values.shape[0], values.shape[2])
