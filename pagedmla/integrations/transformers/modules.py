"""Finding a model's MLA attentions by their structure, and saying why one cannot be run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from pagedmla.contract.errors import InvalidArgument, Unsupported

ATTENTION_NAME = "pagedmla"
"""Under which the attention and mask functions are registered, and which an enabled model's configuration names."""


class MLAAttention(Protocol):
    """What is used of an MLA attention module, in the names that all families share.

    Attributes:
        config: the model's configuration; its ``_attn_implementation`` names the attention function.
        training: torch's flag.
        kv_b_proj: kv_lora_rank -> num_heads * (qk_nope_head_dim + v_head_dim).
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: sizes of a head and of the latent.
    """

    config: Any
    training: bool
    kv_b_proj: nn.Module
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and rotated keys [num_rows, 1, num_keys, ..] to keys and values [num_rows, num_heads, num_keys, ..]."""
        ...


def find_mla_modules(model: nn.Module) -> list[MLAAttention]:
    """The attentions that project a latent of ``kv_lora_rank`` numbers up by ``kv_b_proj``, in the model's order."""
    found = [m for m in model.modules() if hasattr(m, "kv_b_proj") and hasattr(m, "kv_lora_rank")]
    return cast("list[MLAAttention]", found)


def owners_of(model: nn.Module, modules: list[MLAAttention]) -> list[PreTrainedModel]:
    """The innermost Transformers models that hold ``modules``, each once: those whose configuration the
    modules read.

    A vision tower beside the language model is not among them, and keeps its attention.

    Raises:
        InvalidArgument: a module that lies in no Transformers model.
        Unsupported: a module that reads another configuration than its model's.
    """
    owner: dict[int, PreTrainedModel] = {}
    for candidate in model.modules():
        if isinstance(candidate, PreTrainedModel):
            # modules() goes from the outside in: the innermost comes last
            owner.update((id(module), candidate) for module in candidate.modules())
    for module in modules:
        if id(module) not in owner:
            raise InvalidArgument("model", "model", "a Transformers model", type(model).__name__)
        if module.config is not owner[id(module)].config:
            wanted = "attentions that read their own model's configuration"
            raise Unsupported("config", "model", wanted, f"a {type(module).__name__} with one of its own")
    return list({id(found): found for found in (owner[id(module)] for module in modules)}.values())


def check_modules(model: nn.Module, modules: list[MLAAttention]) -> None:
    """Raises unless every one of ``modules`` can be run absorbed.

    Raises:
        InvalidArgument: there are none.
        Unsupported: the first that cannot, with the reason.
    """
    if not modules:
        wanted = "a model with Multi-head Latent Attention (kv_b_proj, kv_lora_rank)"
        raise InvalidArgument("model", "model", wanted, type(model).__name__)
    for module in modules:
        for reason in _REASONS:
            found = reason(module)
            if found is not None:
                code, wanted, got = found
                raise Unsupported(code, "model", wanted, f"{type(module).__name__}: {got}")
        if not _expands_as_expected(module):
            wanted = "expand_kv that gives, per head, kv_b_proj's key part, the shared rotated key, and kv_b_proj's value part"
            raise Unsupported("expand_kv", "model", wanted, f"{type(module).__name__}: another expansion")


Reason = Callable[[MLAAttention], "tuple[str, str, str] | None"]


def _no_expansion(module: MLAAttention) -> tuple[str, str, str] | None:
    if callable(getattr(type(module), "expand_kv", None)):
        return None
    wanted = "attentions of transformers >= 5.15's own, which have expand_kv (load without trust_remote_code)"
    return "remote_code", wanted, "no expand_kv"


def _replaced_expansion(module: MLAAttention) -> tuple[str, str, str] | None:
    if "expand_kv" not in vars(module):
        return None
    return "expand_kv", "expand_kv as the class defines it", "one replaced on the module by somebody else"


def _sparse(module: MLAAttention) -> tuple[str, str, str] | None:
    if not hasattr(module, "indexer") and getattr(module.config, "index_topk", None) is None:
        return None
    return "sparse_attention", "dense attention", "sparse attention chosen by an indexer, which is not built"


def _sinks(module: MLAAttention) -> tuple[str, str, str] | None:
    if getattr(module, "sinks", None) is None:
        return None
    return "attention_sinks", "attention without sinks", "learned attention sinks, which are not built"


def _window(module: MLAAttention) -> tuple[str, str, str] | None:
    window = getattr(module, "sliding_window", None)
    return (
        None
        if window is None
        else ("sliding_window", "attention to all earlier tokens", f"a window of {window}")
    )


def _not_causal(module: MLAAttention) -> tuple[str, str, str] | None:
    return None if getattr(module, "is_causal", True) else ("causal", "causal attention", "is_causal=False")


def _bias(module: MLAAttention) -> tuple[str, str, str] | None:
    if getattr(module.kv_b_proj, "bias", None) is None:
        return None
    return "kv_b_proj_bias", "kv_b_proj without a bias", "one with a bias"


def _returns_weights(module: MLAAttention) -> tuple[str, str, str] | None:
    if not getattr(module.config, "output_attentions", False):
        return None
    return "output_attentions", "output_attentions=False", "a configuration that asks for attention weights"


_REASONS: tuple[Reason, ...] = (
    _no_expansion,
    _replaced_expansion,
    _sparse,
    _sinks,
    _window,
    _not_causal,
    _bias,
    _returns_weights,
)


@torch.no_grad()
def _expands_as_expected(module: MLAAttention) -> bool:
    """Whether ``expand_kv`` is the map that absorption undoes, tried on two made-up tokens.

    Families found by structure alone could order heads or parts another way; this notices.
    """
    # what the projection's input is like: its dtype may be a quantised weight's, not the latent's
    like: torch.Tensor = getattr(module, "kv_a_layernorm", module.kv_b_proj).weight  # type: ignore[assignment]
    if like.is_meta:
        # no numbers to try with
        return True
    rank, rope_dim, nope = module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim
    made_up = torch.sin(torch.arange(2 * (rank + rope_dim), device=like.device).float()).to(like.dtype)
    latent, rope = made_up.view(1, 1, 2, -1).split([rank, rope_dim], dim=-1)
    # in the weights' own dtype, also when the caller enables under autocast
    with torch.autocast(like.device.type, enabled=False):
        key, value = module.expand_kv(latent, rope)
        heads = module.kv_b_proj(latent).view(1, 2, -1, nope + module.v_head_dim).transpose(1, 2)
    expected_key = torch.cat([heads[..., :nope], rope.expand(-1, heads.shape[1], -1, -1)], dim=-1)
    pairs = ((key, expected_key), (value, heads[..., nope:]))
    return all(found.shape == expected.shape and _close(found, expected) for found, expected in pairs)


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    # the same product twice: another order of heads or parts is off by as much as the numbers are large
    scale = float(expected.abs().max())
    return bool(torch.allclose(found, expected, rtol=0, atol=1e-2 * scale))
