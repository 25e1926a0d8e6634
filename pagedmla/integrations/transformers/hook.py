"""Switching a model to absorbed latent attention, and back."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.support import check_backend_name
from pagedmla.integrations.transformers.attention import (
    SETTINGS_ATTRIBUTE,
    AttentionSettings,
    latent_attention,
    settings_of,
)
from pagedmla.integrations.transformers.compressed_kv import keep_compressed
from pagedmla.integrations.transformers.generation import (
    generating_models,
    prepare_paged_caches,
    prepare_stock_caches,
)
from pagedmla.integrations.transformers.modules import (
    ATTENTION_NAME,
    MLAAttention,
    check_modules,
    find_mla_modules,
    owners_of,
)
from pagedmla.integrations.transformers.step import latent_mask

# At import, not in enable(): a pickled model brings this module along, and must find its attention.  Both
# under one name: without a mask function of that name Transformers passes None, and padding would be attended
# to.
AttentionInterface.register(ATTENTION_NAME, latent_attention)
AttentionMaskInterface.register(ATTENTION_NAME, latent_mask)

Model = TypeVar("Model", bound=nn.Module)

_PREVIOUS = "_pagedmla_previous_attention"


def enable(model: Model, *, backend: str | None = None, absorb_below: int | None = None) -> Model:
    """Runs ``model``'s latent attention absorbed, in place.

    Weights, forwards and user code stay as they are: each MLA module's ``expand_kv`` hands the latents on
    unexpanded, and the model's attention implementation becomes a registered one.  ``generate`` makes a
    ``PagedLatentCache`` unless it is given a cache or a ``cache_implementation``; with stock caches
    attention is absorbed all the same, but not paged.

    Calling it again is harmless, and changes the settings.

    Args:
        model: a Transformers model (or a wrapper that holds one) with Multi-head Latent Attention.
        backend: backend of ``pagedmla.decode``; None: the best that takes the call.
        absorb_below: absorb when a forward has fewer new tokens than this, else expand keys and values as
            stock does; None: whichever takes fewer multiplications.

    Returns:
        ``model``.

    Raises:
        InvalidArgument: not such a model, or a setting out of range.
        Unsupported: sparse attention, sinks, windows, remote code; the message says which.  The model is
            unchanged then.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument("model", "model", "a Transformers model", type(model).__name__)
    check_backend_name(backend)
    if absorb_below is not None and (
        isinstance(absorb_below, bool) or not isinstance(absorb_below, int) or absorb_below < 0
    ):
        raise InvalidArgument(
            "absorb_below", "absorb_below", "None or a whole number >= 0", repr(absorb_below)
        )
    modules = find_mla_modules(model)
    new = [module for module in modules if settings_of(module) is None]
    if new or not modules:
        check_modules(model, new)
    _set_attention(model, modules)
    for module in modules:
        settings = AttentionSettings(backend, absorb_below)
        vars(module).update({SETTINGS_ATTRIBUTE: settings, "expand_kv": keep_compressed})
    for generating in generating_models(model):
        prepare_paged_caches(generating)
    return model


def disable(model: Model) -> Model:
    """Undoes ``enable``: the model runs as it did before, with the attention implementation that it had.

    A model that is not enabled is left as it is.

    Returns:
        ``model``.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument("model", "model", "a Transformers model", type(model).__name__)
    modules = [module for module in find_mla_modules(model) if settings_of(module) is not None]
    for owner in owners_of(model, modules):
        _restore_attention(owner)
    for module in modules:
        for name in (SETTINGS_ATTRIBUTE, "expand_kv"):
            vars(module).pop(name)
    for generating in generating_models(model):
        prepare_stock_caches(generating)
    return model


def is_enabled(model: nn.Module) -> bool:
    """Whether ``model`` has MLA attentions and all of them are enabled."""
    modules = find_mla_modules(model)
    enabled = bool(modules) and all(settings_of(module) is not None for module in modules)
    return enabled and all(module.config._attn_implementation == ATTENTION_NAME for module in modules)


def _set_attention(model: nn.Module, modules: list[MLAAttention]) -> None:
    changed: list[PreTrainedModel] = []
    for owner in owners_of(model, modules):
        previous = owner.config._attn_implementation
        if previous == ATTENTION_NAME and not hasattr(owner, _PREVIOUS):
            for earlier in changed:
                _restore_attention(earlier)
            wanted = "a model with a configuration of its own (copy.deepcopy(config) before the model is made)"
            raise Unsupported("shared_config", "model", wanted, "one that another enabled model holds too")
        owner.set_attn_implementation(ATTENTION_NAME)
        if owner.config._attn_implementation != ATTENTION_NAME:
            for earlier in changed:
                _restore_attention(earlier)
            wanted = "a model that takes its attention from transformers.AttentionInterface"
            raise Unsupported("attention_interface", "model", wanted, type(owner).__name__)
        if previous != ATTENTION_NAME:
            setattr(owner, _PREVIOUS, previous)
            changed.append(owner)


def _restore_attention(owner: PreTrainedModel) -> None:
    # somebody may have chosen another implementation since; then that one stays
    if owner.config._attn_implementation == ATTENTION_NAME:
        owner.set_attn_implementation(getattr(owner, _PREVIOUS))
    delattr(owner, _PREVIOUS)
