"""``generate`` on an enabled model makes a paged latent cache where it would have made a ``DynamicCache``."""

from __future__ import annotations

import weakref
from typing import Any

from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from pagedmla.integrations.transformers.attention import settings_of
from pagedmla.integrations.transformers.latent_cache import PagedLatentCache
from pagedmla.integrations.transformers.modules import find_mla_modules

_METHOD = "_prepare_cache_for_generation"


class PagedCachePreparation:
    """Stands in for a model's ``_prepare_cache_for_generation``: the stock method runs, then its default
    cache is swapped.

    A cache that the caller passed stays, and so does one chosen by ``cache_implementation``; ``"dynamic"`` asks for stock's.

    An object instead of a closure, so that the model can still be pickled and deep-copied; it refers to the model
    weakly, so that a model's memory is freed when its last user lets go of it.

    Args:
        model: the model whose method this is.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)

    def __reduce__(self) -> tuple:
        # copies of the model come along as what they are being copied to
        return type(self), (self._model(),)

    def __call__(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """As the stock method; see there."""
        model: Any = self._model()
        before = dict(model_kwargs)
        result = getattr(type(model), _METHOD)(model, generation_config, model_kwargs, *args, **kwargs)
        is_default = generation_config.cache_implementation is None
        # the keyword's name changed between releases: whatever the stock method put there is looked for
        made = [
            name
            for name, value in model_kwargs.items()
            if type(value) is DynamicCache and before.get(name) is not value
        ]
        if is_default and all(settings_of(module) is not None for module in find_mla_modules(model)):
            for name in made:
                model_kwargs[name] = PagedLatentCache(model.config)
                if getattr(generation_config, "is_assistant", False):
                    model_kwargs[name].activate_past_recording()
        return result


def generating_models(model: Any) -> list[PreTrainedModel]:
    """The Transformers models in ``model`` (itself included) that can generate and hold MLA attentions."""
    models = [
        m
        for m in model.modules()
        if isinstance(m, PreTrainedModel) and hasattr(m, _METHOD) and m.can_generate()
    ]
    return [m for m in models if find_mla_modules(m)]


def prepare_paged_caches(model: PreTrainedModel) -> None:
    """Makes ``model.generate`` use a paged latent cache by default.  A method that somebody else replaced is left alone."""
    if _METHOD not in vars(model):
        setattr(model, _METHOD, PagedCachePreparation(model))


def prepare_stock_caches(model: PreTrainedModel) -> None:
    """Undoes ``prepare_paged_caches``."""
    if isinstance(vars(model).get(_METHOD), PagedCachePreparation):
        delattr(model, _METHOD)
