"""One pass over a group of work items: keys stream through an online softmax (FlashAttention-2, algorithm 1), block by block.

Every block is read once for all the rows of its item, which are heads x query tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedmla.kernels.torch.pages import PageReader
from pagedmla.kernels.torch.scratch import Scratch
from pagedmla.kernels.torch.work_items import ItemGroup

_LOWEST = torch.finfo(torch.float32).min


@dataclass
class SoftmaxState:
    """Running state of an online softmax.

    Attributes:
        highest: f32 [items, rows], the largest score so far; -inf before the first visible key.
        total: f32 [items, rows], sum of exp(score - highest).
        weighted: f32 [items, rows, dv], sum of exp(score - highest) * value.
    """

    highest: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor

    @classmethod
    def empty(cls, weighted: torch.Tensor) -> SoftmaxState:
        """The state before any key, kept in ``weighted``'s memory."""
        rows = weighted.shape[:2]
        highest = torch.full(rows, -torch.inf, dtype=torch.float32, device=weighted.device)
        return cls(highest, torch.zeros(rows, dtype=torch.float32, device=weighted.device), weighted.zero_())

    def narrow(self, num_items: int) -> SoftmaxState:
        """The first items' part, sharing memory."""
        return SoftmaxState(self.highest[:num_items], self.total[:num_items], self.weighted[:num_items])

    def update(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Takes in a block of keys.

        Args:
            scores: f32 [items, rows, n], -inf where a row does not see a key; overwritten.
            values: f32 [items, n, dv].
        """
        highest = torch.maximum(self.highest, scores.amax(-1))
        # a row that has seen nothing keeps -inf as its maximum; -inf - -inf would be NaN
        shift = highest.clamp(min=_LOWEST)
        probabilities = scores.sub_(shift[..., None]).exp_()
        correction = (self.highest - shift).exp_()
        self.total.mul_(correction).add_(probabilities.sum(-1))
        self.weighted.mul_(correction[..., None]).baddbmm_(probabilities, values)
        self.highest.copy_(highest)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised state: out f32 [items, rows, dv] in ``weighted``'s memory, lse f32 [items, rows]; (0, -inf) for
        rows that saw no key."""
        out = self.weighted.div_(torch.where(self.total == 0, 1.0, self.total)[..., None])
        return out, self.highest.clamp(min=_LOWEST) + self.total.log()


@dataclass(frozen=True)
class Scores:
    """How scores are made: f32 queries, and the number (or f32 scalar tensor) that multiplies them."""

    queries: torch.Tensor
    scale: float | torch.Tensor
    value_width: int


def attend(
    group: ItemGroup, scores: Scores, reader: PageReader, scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends each item of ``group`` to its key range.

    Args:
        group: the items, those with the longest range first.
        scores: queries f32 [items, tokens * heads, head_dim_qk], and the scale.
        reader: of the cache.
        scratch: memory for the pass.

    Returns:
        out f32 [items, tokens * heads, kv_lora_rank] and lse f32 [items, tokens * heads].
    """
    num_items, num_rows, _ = scores.queries.shape
    block = group.kv_block
    buffers = reader.buffers(scratch, num_items * block)
    score_memory = scratch.take((num_items * num_rows * block,))
    state = SoftmaxState.empty(scratch.take((num_items, num_rows, scores.value_width)))
    offsets = torch.arange(block, device=scores.queries.device)
    for first in range(0, group.longest, block):
        length = min(block, group.longest - first)
        active = group.active_items(first)
        positions = group.kv_start[:active, None] + (first + offsets[:length])
        live = None if group.all_live(active, first + length) else positions < group.kv_stop[:active, None]
        keys = reader.read(group.sequences[:active], positions, live, buffers)
        rows = scores.queries[:active]
        products = score_memory[: active * num_rows * length].view(active, num_rows, length)
        torch.bmm(rows, keys.transpose(1, 2), out=products)
        products.mul_(scores.scale)
        values = keys[..., : scores.value_width]
        if group.hides_keys(active, first + length):
            hidden = positions[:, None, None, :] >= group.visible[:active, :, None, None]
            if group.rows_differ:
                values = _silence_non_finite(products, values)
            products.view(active, group.visible.shape[1], -1, length).masked_fill_(hidden, -torch.inf)
        state.narrow(active).update(products, values)
    return state.finish()


def _silence_non_finite(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Keeps a NaN or Inf value from the rows that do not see its key, whose weight for it is 0: 0 * NaN is NaN.

    The value becomes 0 and its key's scores NaN, which masking then takes from the rows that do not see it; those that do
    become NaN, as they must.  Neither changes a bit of any other number, so what is done here may depend on the values.
    """
    if bool(torch.isfinite(values.sum())):
        return values
    spoilt = ~torch.isfinite(values).all(-1)
    scores.masked_fill_(spoilt[:, None, :], torch.nan)
    return torch.where(spoilt[..., None], 0.0, values)
