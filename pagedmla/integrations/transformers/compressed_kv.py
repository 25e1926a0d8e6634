"""What flows through an enabled model where stock Transformers has keys and values."""

from __future__ import annotations

from typing import NoReturn

import torch

from pagedmla.contract.errors import InvalidArgument
from pagedmla.integrations.transformers.latent_store import LatentStore


class CompressedKV:
    """Latents on their way from the cache to the attention function.

    It is not a tensor on purpose: whoever treats it as one (an attention that this plug-in does not run) is
    told so, where a tensor of the wrong meaning could give plausible numbers.

    Attributes:
        latent: [num_rows, 1, num_keys, kv_lora_rank].
        rope: [num_rows, 1, num_keys, qk_rope_head_dim].
        store: where the tokens belong; None for a stock cache or none, when latent and rope hold ALL keys.
            With a store they hold the new tokens only, which are not stored yet.
        layer: index of the layer in the store.
    """

    __slots__ = ("latent", "layer", "rope", "store")

    def __init__(
        self, latent: torch.Tensor, rope: torch.Tensor, store: LatentStore | None = None, layer: int = -1
    ) -> None:
        self.latent, self.rope, self.store, self.layer = latent, rope, store, layer

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        wanted = "a model enabled by pagedmla.integrations.transformers.enable, its attention implementation left as set"
        got = f"an attention that reads .{name} of latents"
        raise InvalidArgument("not_enabled", "model", wanted, got)


def keep_compressed(
    kv_nope: torch.Tensor | CompressedKV, k_rot: torch.Tensor
) -> tuple[CompressedKV, CompressedKV]:
    """Stands in for ``expand_kv`` on an enabled module: nothing is expanded.

    A plain function without ``self``, so that deep copies and pickles of the module need no rebinding.
    """
    kept = kv_nope if isinstance(kv_nope, CompressedKV) else CompressedKV(kv_nope, k_rot)
    return kept, kept
