"""A Transformers cache whose attention layers hold latents in pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.integrations.transformers.compressed_kv import CompressedKV
from pagedmla.integrations.transformers.latent_store import LatentStore
from pagedmla.integrations.transformers.versions import CROP_KEEPS, CROP_REFUSES, meaning_of_positive_crop

# state of a fixed size, or none at all: not ours to page
_KEPT_LAYERS = ("LinearAttentionLayer", "DummyLayer")


class PagedLatentLayer(CacheLayerMixin):
    """One attention layer of a ``PagedLatentCache``: answers for the shared table, and keeps nothing itself.

    ``update`` does not write.  It hands the new latents on, and the attention function writes them, since it
    knows which of them are padding.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    # it is told its sizes by the first latents, not ahead by key and value heads
    supports_early_init = False

    def __init__(self, store: LatentStore, layer: int) -> None:
        super().__init__()
        self.store, self.layer = store, layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is made by the first write."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[CompressedKV, torch.Tensor]:
        """Takes the new tokens' latents [num_rows, 1, num_new, kv_lora_rank] and rotated keys [..,
        qk_rope_head_dim].

        Raises:
            InvalidArgument: keys and values of several heads, which a latent cache cannot hold.
        """
        if key_states.dim() != 4 or key_states.shape[1] != 1:
            wanted = "latents [num_rows, 1, num_new, kv_lora_rank] of an MLA attention"
            raise InvalidArgument("latent", "key_states", wanted, str(list(key_states.shape)))
        self.is_initialized = True
        return CompressedKV(key_states, value_states, self.store, self.layer), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Shown tokens including ``query_length`` new ones, and the offset of the first, which is 0."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens shown so far, padding included: the positions that Transformers counts in."""
        return self.store.table.shown_length

    def get_max_length(self) -> int:
        """-1: pages are added as they are needed."""
        return -1

    def offload(self) -> NoReturn:
        """Refused: pages stay on the device."""
        raise Unsupported(
            "offloading", "cache", "a cache that is not offloaded", "an offloaded paged latent cache"
        )

    prefetch = offload


class PagedLatentCache(DynamicCache):
    """A cache for ``generate`` and ``forward`` of a model that ``enable`` was called on.

    A token takes ``kv_lora_rank + qk_rope_head_dim`` numbers a layer, in pages shared by reference count:
    beams and repeated prompts hold the same pages until they write different tokens.  Padding is never
    stored.  Linear-attention layers of hybrid models keep Transformers' own state of fixed size.

    It can be reused for the next turn, deep-copied (to branch from a prefix), cropped, reordered and reset,
    as Transformers' own caches can.  It is not compileable, and holds no tensors for iteration.

    Args:
        config: the model's configuration (``model.config``).
        page_size: tokens in a page.
        num_pages: pages to begin with; more are added as they are needed, by half of the pool each time.

    Raises:
        InvalidArgument: no configuration, one without a latent (not an MLA model), or a size out of range.
        Unsupported: layers that are neither full nor linear attention: sparse attention with an indexer,
            sliding windows.
    """

    def __init__(self, config: PretrainedConfig, page_size: int = 64, num_pages: int = 0) -> None:
        text_config = _check_config(config)
        for name, value, least in (("page_size", page_size, 1), ("num_pages", num_pages, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgument(name, name, f"a whole number >= {least}", repr(value))
        super().__init__(config=config)
        self.store = LatentStore(page_size, num_pages)
        self._token_bytes_by_config = _token_bytes(text_config)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[index] = PagedLatentLayer(self.store, index)
            elif type(layer).__name__ not in _KEPT_LAYERS:
                wanted = "layers of full attention (paged) or linear attention (kept as they are)"
                raise Unsupported(
                    "layer_type", "config", wanted, f"layer {index}, cached by {type(layer).__name__}"
                )

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.store.table.page_size

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first token."""
        return self.store.table.num_rows or -1

    @property
    def is_initialized(self) -> bool:
        """Whether it holds a token."""
        return self.store.table.num_rows > 0

    def bytes_per_token(self) -> int:
        """Bytes that one stored token takes in all paged layers together.

        Before the first token, in the configuration's dtype (float32 when it names none).
        """
        return self.store.bytes_per_token() or self._token_bytes_by_config * len(self._paged_layers())

    def bytes_used(self) -> int:
        """Bytes of the stored tokens in all paged layers; padding is not stored, and what rows share counts once."""
        return self.store.bytes_used()

    def bytes_allocated(self) -> int:
        """Bytes of the pages held in memory, used or free, in all paged layers."""
        return self.store.bytes_allocated()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens of every row (0: none), padding counted as tokens.

        A positive number means what it means to the installed Transformers' own caches: the length to keep up
        to 5.17 (deprecated there), refused later.
        """
        count = -tokens_to_remove
        if tokens_to_remove > 0:
            meaning = meaning_of_positive_crop()
            if meaning == CROP_REFUSES:
                wanted = "a number <= 0: minus the tokens to remove"
                raise InvalidArgument("tokens_to_remove", "tokens_to_remove", wanted, str(tokens_to_remove))
            shown = self.store.table.shown_length
            count = max(shown - tokens_to_remove, 0) if meaning == CROP_KEEPS else tokens_to_remove
        self._tell_other_layers("crop", tokens_to_remove)
        self.store.table.crop(count)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Makes row i what row ``beam_idx[i]`` was; rows that came from one share its pages.  Reads
        ``beam_idx`` on the host.
        """
        self._tell_other_layers("reorder_cache", beam_idx)
        if self.is_initialized:
            self.store.table.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row ``repeats`` times, without copying a page."""
        self._tell_other_layers("batch_repeat_interleave", repeats)
        self.store.table.select([row for row in range(self.store.table.num_rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows ``indices`` (numbers, or a bool mask over rows), in their order."""
        self._tell_other_layers("batch_select_indices", indices)
        if self.is_initialized:
            self.store.table.select(torch.arange(self.store.table.num_rows)[indices.cpu()].tolist())

    def reset(self) -> None:
        """Forgets every token and the batch size.  Pages stay allocated for the next text."""
        self._tell_other_layers("reset")
        self.store.reset()

    def __iter__(self) -> Iterator[Any]:
        """Refused: there are no key and value tensors to go through."""
        raise Unsupported("iteration", "cache", "a cache of key and value tensors", "a paged latent cache")

    def _paged_layers(self) -> list[PagedLatentLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLatentLayer)]

    def _tell_other_layers(self, method: str, *args: Any) -> None:
        """Calls ``method`` of the layers that Transformers keeps, before anything of ours changes: they may refuse."""
        others = [layer for layer in self.layers if not isinstance(layer, PagedLatentLayer)]
        for layer in others:
            if not hasattr(layer, method):
                raise Unsupported(method, "cache", f"layers that have {method}", type(layer).__name__)
        for layer in others:
            getattr(layer, method)(*args)


def _check_config(config: object) -> PretrainedConfig:
    if not isinstance(config, PretrainedConfig):
        raise InvalidArgument(
            "config", "config", "a model's configuration (model.config)", type(config).__name__
        )
    text_config = config.get_text_config(decoder=True)
    if not isinstance(getattr(text_config, "kv_lora_rank", None), int):
        wanted = "the configuration of a model with Multi-head Latent Attention (kv_lora_rank)"
        raise InvalidArgument("config", "config", wanted, f"model_type {text_config.model_type!r}")
    return text_config


def _token_bytes(text_config: PretrainedConfig) -> int:
    dtype = getattr(text_config, "dtype", None)
    itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else torch.float32.itemsize
    return (text_config.kv_lora_rank + text_config.qk_rope_head_dim) * itemsize
