"""What the mask function returns: made once per forward by Transformers' own mask machinery, and handed to every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.integrations.transformers.latent_store import LatentStore, PagedStep


class AttentionStep:
    """One forward's mask, in whichever form its readers need; each form is made at most once.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset: as Transformers gives them to a mask function.
        mask_function: which keys a query may see, padding aside.
        attention_mask: bool [batch_size, kv_length], False for padding; None: no padding.
        others: the rest of what a mask function receives.

    Attributes:
        ndim: 4, as a finished mask has: ``generate`` passes what it made ahead through the model, which must
            not take it for a padding mask.
    """

    ndim = 4

    def __init__(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int,
        kv_offset: int,
        mask_function: Callable,
        attention_mask: torch.Tensor | None,
        others: dict[str, Any],
    ) -> None:
        self.batch_size, self.q_length, self.q_offset = batch_size, q_length, q_offset
        self.attention_mask = attention_mask
        self.is_plain = mask_function is causal_mask_function
        self._arguments = others | {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
        }
        self._dense: torch.Tensor | None = None
        self._dense_is_made = False
        self._paged: tuple[LatentStore, PagedStep] | None = None

    def dense(self) -> torch.Tensor | None:
        """The mask as stock SDPA attention gets it: bool [batch_size, 1, q_length, kv_length], or None where
        causality says it all.
        """
        if not self._dense_is_made:
            self._dense = sdpa_mask(**self._arguments)
            self._dense_is_made = True
        return self._dense

    def paged(self, store: LatentStore) -> PagedStep:
        """The new tokens' slots in ``store``; the first layer that asks begins the step, the others share it.

        Raises:
            Unsupported: queries that do not follow the cached tokens.
        """
        if self._paged is None or self._paged[0] is not store:
            if self.q_offset != store.table.shown_length:
                wanted = f"queries that follow the {store.table.shown_length} tokens in the cache"
                raise Unsupported("query_offset", "cache", wanted, f"queries at {self.q_offset}")
            self._paged = store, store.begin_step(self.batch_size, self.q_length, self.attention_mask)
        return self._paged[1]


def latent_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | AttentionStep | None = None,
    **others: Any,
) -> AttentionStep | torch.Tensor:
    """The registered mask function.

    Returns:
        An ``AttentionStep``; for caches of fixed size, whose masks ``generate`` makes ahead and passes
        through the model as tensors, a real mask, bool [batch_size, 1, q_length, kv_length].
    """
    if isinstance(attention_mask, AttentionStep):
        return attention_mask
    if isinstance(q_offset, torch.Tensor) or kv_offset != 0 or kv_length != q_offset + q_length:
        arguments = others | {"allow_is_causal_skip": False}
        sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
        offsets = {"q_offset": q_offset, "kv_offset": kv_offset}
        return sdpa_mask(
            **sizes, **offsets, mask_function=mask_function, attention_mask=attention_mask, **arguments
        )
    return AttentionStep(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, others
    )


def paged_step(
    mask: AttentionStep | torch.Tensor | None, store: LatentStore, layer: int, num_rows: int, num_new: int
) -> PagedStep:
    """This forward's step in ``store``, whatever the mask is.

    Raises:
        InvalidArgument: a mask of another shape than the queries and the cached keys have.
    """
    if isinstance(mask, AttentionStep):
        return mask.paged(store)
    if mask is not None and (mask.dim() != 4 or mask.shape[-2] != num_new):
        wanted = f"a mask [batch, heads or 1, {num_new} queries, keys]"
        raise InvalidArgument("attention_mask", "attention_mask", wanted, str(list(mask.shape)))
    return store.open_step(layer, num_rows, num_new, None if mask is None else mask.shape[-1])


def custom_mask(
    mask: AttentionStep | torch.Tensor | None, step: PagedStep, device: torch.device
) -> torch.Tensor | None:
    """A mask over the STORED tokens, for forwards that are not plainly causal.

    Args:
        mask: what the attention function received.
        step: this forward's step.
        device: where the mask is wanted.

    Returns:
        [num_rows, heads or 1, num_new, max_length], bool or additive, its columns reordered from shown to
        stored positions; None when the forward is plainly causal, which the step's lengths express.
    """
    if isinstance(mask, AttentionStep):
        if mask.is_plain:
            return None
        mask = mask.dense()
    if mask is None:
        return None
    columns = step.stored_positions(device)[:, None, None, :].expand(-1, mask.shape[1], step.num_new, -1)
    chosen = mask.expand(step.num_rows, -1, -1, -1).gather(-1, columns)
    beyond = torch.arange(step.max_length, device=device) >= step.on(device).row_lens[:, None, None, None]
    return chosen.masked_fill(beyond, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
