"""Transformers models with Multi-head Latent Attention, absorbed and paged.

    from pagedmla.integrations.transformers import PagedLatentCache, disable, enable

    enable(model)
    model.generate(**inputs)                                    # makes a PagedLatentCache of its own

    cache = PagedLatentCache(model.config, page_size=16)        # or choose, and keep it for the next turn
    model.generate(**inputs, past_key_values=cache)

Transformers (5.15 and later) caches the latent, but expands the whole context through ``kv_b_proj`` in every
layer at every step.  Here decode steps attend to the latents themselves, in pages.
"""

from pagedmla.integrations.transformers.versions import require_transformers

# before anything is imported that an older release lacks
require_transformers()

from pagedmla.integrations.transformers.hook import disable, enable, is_enabled  # noqa: E402
from pagedmla.integrations.transformers.latent_cache import PagedLatentCache  # noqa: E402

__all__ = ["PagedLatentCache", "disable", "enable", "is_enabled"]
