"""The registered attention function: absorbed over the pages, or expanded where that is cheaper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import pagedmla
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.integrations.transformers.absorb import (
    HeadSizes,
    absorb_query,
    absorbed_weights,
    absorbing_is_cheaper,
    has_weight_view,
    project_output,
)
from pagedmla.integrations.transformers.compressed_kv import CompressedKV
from pagedmla.integrations.transformers.latent_store import LatentStore, PagedStep
from pagedmla.integrations.transformers.modules import MLAAttention
from pagedmla.integrations.transformers.step import AttentionStep, custom_mask, paged_step

Mask = AttentionStep | torch.Tensor | None

_REFUSED_KEYWORDS = {
    "output_attentions": "attention weights are never formed: disable(model), and use eager attention",
    "sliding_window": "every earlier token is attended to",
    "softcap": "scores are not capped",
    "s_aux": "attention sinks are not built",
    "indices": "sparse attention is not built",
    "position_bias": "scores have no bias",
}

SETTINGS_ATTRIBUTE = "_pagedmla_settings"
"""Under which ``enable`` leaves an ``AttentionSettings`` on a module; its presence says that the module is enabled."""


@dataclass(frozen=True)
class AttentionSettings:
    """What ``enable`` leaves on each MLA module.

    Attributes:
        backend: passed on to ``pagedmla.decode``; None: chosen there.
        absorb_below: absorb when a forward has fewer new tokens than this, else expand; None: whichever
            multiplies less.
    """

    backend: str | None = None
    absorb_below: int | None = None


def settings_of(module: object) -> AttentionSettings | None:
    """The settings of an enabled module; None for any other."""
    return getattr(module, SETTINGS_ATTRIBUTE, None)


def latent_attention(
    module: MLAAttention,
    query: torch.Tensor,
    key: CompressedKV | torch.Tensor,
    value: CompressedKV | torch.Tensor,
    attention_mask: Mask,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function.

    Args:
        module: the attention; one that is not enabled is passed on to Transformers' SDPA attention.
        query: [num_rows, num_heads, num_new, qk_nope_head_dim + qk_rope_head_dim], rotated.
        key: the latents; see ``CompressedKV``.
        value: the same object.
        attention_mask: what ``latent_mask`` made, or a 4D mask of the caller's.
        scaling: multiplies the scores.  Always the one that the model passes: only it knows YaRN's factor.
        dropout: must be 0.

    Returns:
        [num_rows, num_new, num_heads, v_head_dim] in the query's dtype, and None for the weights.

    Raises:
        Unsupported: training, attention weights, or anything else in ``kwargs`` that changes what attention
            means.
    """
    settings = settings_of(module)
    if settings is None or not isinstance(key, CompressedKV):
        mask = attention_mask.dense() if isinstance(attention_mask, AttentionStep) else attention_mask
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = _check_call(module, scaling, dropout, kwargs)
    if key.store is None:
        return _attend_contiguous(module, settings, query, key, attention_mask, scale), None
    if torch.is_grad_enabled() and query.requires_grad:
        wanted = "torch.no_grad() or torch.inference_mode() around a forward with a paged latent cache"
        raise Unsupported("gradients", "cache", wanted, "a forward that records gradients")
    return _attend_paged(module, settings, query, key, key.store, attention_mask, scale), None


def _check_call(module: MLAAttention, scaling: float | None, dropout: float, kwargs: dict[str, Any]) -> float:
    if scaling is None:
        raise InvalidArgument("softmax_scale", "scaling", "the model's softmax scale", "None")
    if dropout:
        raise Unsupported("dropout", "dropout", "0: attention weights are never formed", str(dropout))
    if module.training and torch.is_grad_enabled():
        raise Unsupported(
            "training", "model", "model.eval(), or disable(model) to train", "a model in training mode"
        )
    for name, reason in _REFUSED_KEYWORDS.items():
        given = kwargs.get(name)
        if given is not None and given is not False:
            shown = given if isinstance(given, bool | int | float) else type(given).__name__
            raise Unsupported(name, name, f"none ({reason})", str(shown))
    if kwargs.get("is_causal") is False:
        raise Unsupported("causal", "is_causal", "causal attention", "False")
    if getattr(module.config, "output_attentions", False):
        raise Unsupported(
            "output_attentions", "output_attentions", "False (weights are never formed)", "True"
        )
    return scaling


def _absorbs(module: MLAAttention, settings: AttentionSettings, num_new: int, num_keys: int) -> bool:
    if settings.absorb_below is not None:
        return num_new < settings.absorb_below
    return absorbing_is_cheaper(num_new, num_keys, HeadSizes.of(module), has_weight_view(module.kv_b_proj))


def _attend_contiguous(
    module: MLAAttention,
    settings: AttentionSettings,
    query: torch.Tensor,
    kv: CompressedKV,
    mask: Mask,
    scaling: float,
) -> torch.Tensor:
    """All keys at hand in two tensors: no cache, or one of Transformers' own."""
    tensor = mask.dense() if isinstance(mask, AttentionStep) else mask
    absorb = _absorbs(module, settings, query.shape[2], kv.latent.shape[2])
    return _attend_tensors(module, query, kv.latent, kv.rope, tensor, scaling, absorb)


def _attend_paged(
    module: MLAAttention,
    settings: AttentionSettings,
    query: torch.Tensor,
    kv: CompressedKV,
    store: LatentStore,
    mask: Mask,
    scaling: float,
) -> torch.Tensor:
    """The new tokens are stored, then attended to with what the pages hold."""
    num_rows, num_new = query.shape[0], query.shape[2]
    step = paged_step(mask, store, kv.layer, num_rows, num_new)
    pool = store.write(kv.layer, step, kv.latent, kv.rope, query.dtype)
    custom = custom_mask(mask, step, query.device)
    absorb = _absorbs(module, settings, num_new, step.max_length)
    if custom is None and absorb:
        return _decode(module, settings, query, pool, step, scaling)
    if custom is None and step.is_first and not step.has_padding:
        return _attend_tensors(module, query, kv.latent, kv.rope, None, scaling, absorb=False)
    return _attend_gathered(module, query, store, kv.layer, step, custom, scaling, absorb)


def _decode(
    module: MLAAttention,
    settings: AttentionSettings,
    query: torch.Tensor,
    pool: torch.Tensor,
    step: PagedStep,
    scaling: float,
) -> torch.Tensor:
    # the pool has the query's dtype, and all of this stays in it: autocast would turn one half of the query only
    with torch.autocast(query.device.type, enabled=False):
        w_uk, w_uv = absorbed_weights(module, query.dtype, query.device)
        q_latent, q_rope = absorb_query(query, w_uk)
        here = step.on(query.device)
        out_latent, _ = pagedmla.decode(
            (q_latent, q_rope),
            pool,
            here.block_table,
            here.seq_lens,
            softmax_scale=float(scaling),
            kv_lora_rank=module.kv_lora_rank,
            backend=settings.backend,
        )
        return project_output(out_latent, w_uv, query.shape[0])


def _attend_gathered(
    module: MLAAttention,
    query: torch.Tensor,
    store: LatentStore,
    layer: int,
    step: PagedStep,
    custom: torch.Tensor | None,
    scaling: float,
    absorb: bool,
) -> torch.Tensor:
    """Past and new tokens copied out of their pages, each row's from column 0 on."""
    if step.max_length == 0:
        # nothing but padding so far
        return query.new_zeros(*query.shape[:1], step.num_new, query.shape[1], module.v_head_dim)
    latent, rope = (
        store.gather(layer, step).unsqueeze(1).split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
    )
    if custom is not None:
        return _attend_tensors(module, query, latent, rope, custom, scaling, absorb)
    visible = step.visible_on(query.device)[:, None, :, None]
    sees = torch.arange(step.max_length, device=query.device) < visible
    # padding before a row's first token sees nothing; it is let see everything, since a softmax of nothing is NaN, and what
    # comes out is nobody's business
    return _attend_tensors(module, query, latent, rope, sees | (visible == 0), scaling, absorb)


def _attend_tensors(
    module: MLAAttention,
    query: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    absorb: bool,
) -> torch.Tensor:
    """latent [num_rows, 1, num_keys, kv_lora_rank], rope [num_rows, 1, num_keys, rope]; mask 4D over them, None: causal."""
    # without a mask SDPA attention has a meaning of its own for fewer queries than keys: it is left to it
    has_meaning = mask is not None or query.shape[2] in (1, latent.shape[2])
    if absorb and has_meaning:
        return _absorbed(module, query, latent[:, 0], rope[:, 0], mask, scaling)
    key, value = type(module).expand_kv(module, latent, rope)
    return sdpa_attention_forward(module, query, key, value, mask, dropout=0.0, scaling=scaling)[0]


def _absorbed(
    module: MLAAttention,
    query: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Absorbed attention in plain operations, for masks of any shape; latent [num_rows, num_keys, ..], rope alike."""
    num_rows, num_heads, num_new, _ = query.shape
    num_keys = latent.shape[1]
    w_uk, w_uv = absorbed_weights(module, query.dtype, query.device)
    q_latent = torch.matmul(query[..., : w_uk.shape[1]], w_uk).flatten(1, 2)
    q_rope = query[..., w_uk.shape[1] :].flatten(1, 2)
    scores = torch.matmul(q_latent, latent.to(query.dtype).transpose(1, 2))
    if rope.shape[-1]:
        scores = scores + torch.matmul(q_rope, rope.to(query.dtype).transpose(1, 2))
    scores = scores.view(num_rows, num_heads, num_new, num_keys).float() * scaling
    if mask is None and num_new > 1:
        mask = torch.ones(num_new, num_keys, dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        # not -inf: a query that sees no key would turn its row, and through the next layer's cache others,
        # into NaN
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1).to(query.dtype).flatten(1, 2)
    out_latent = torch.matmul(weights, latent.to(query.dtype)).view(num_rows, num_heads, num_new, -1)
    return torch.matmul(out_latent, w_uv.transpose(1, 2)).transpose(1, 2)
