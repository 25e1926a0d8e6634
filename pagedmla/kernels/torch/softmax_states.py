"""Softmax states of successive key blocks, and their union.

Each block leaves (highest, total, weighted): the row's largest score, the sum of exp(score - highest), and the sum of
exp(score - highest) * value.  Blocks are taken in one by one and united several at a time, which is the online softmax of
FlashAttention-2 (algorithm 1) with its correction put off: a block costs two products and one exponential, and no pass over
what came before.
"""

from __future__ import annotations

import torch

from pagedmla.kernels.torch.scratch import Scratch

_LOWEST = torch.finfo(torch.float32).min


class SoftmaxStates:
    """The states of up to ``capacity`` blocks, the first place holding the union of earlier ones.

    Args:
        capacity: places, at least 2 unless there is a single block.
        num_items, num_rows, width: a state's ``weighted`` is f32 [num_items, num_rows, width].
        scratch: memory for ``weighted``.
    """

    def __init__(
        self, capacity: int, num_items: int, num_rows: int, width: int, scratch: Scratch, device: torch.device
    ) -> None:
        self._weighted = scratch.take((capacity, num_items, num_rows, width))
        self._highest = torch.empty((capacity, num_items, num_rows), dtype=torch.float32, device=device)
        self._total = torch.empty_like(self._highest)
        self._taken = 0

    def take_in(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Adds a block's state.

        Args:
            scores: f32 [items, rows, n], -inf where a row does not see a key; overwritten.
            values: f32 [items, n, width].
        """
        if self._taken == self._weighted.shape[0]:
            self._unite()
        place = self._taken
        highest = torch.amax(scores, -1, out=self._highest[place])
        # a row that sees nothing keeps -inf as its maximum; -inf - -inf would be NaN
        probabilities = scores.sub_(highest.clamp(min=_LOWEST)[..., None]).exp_()
        torch.sum(probabilities, -1, out=self._total[place])
        torch.bmm(probabilities, values, out=self._weighted[place])
        self._taken += 1

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised union: out f32 [items, rows, width] in the scratch memory, lse f32 [items, rows]; (0, -inf) for
        rows that saw no key."""
        if self._taken > 1:
            self._unite()
        total = self._total[0]
        lse = self._highest[0].clamp(min=_LOWEST) + total.log()
        return self._weighted[0].div_(total.masked_fill_(total == 0, 1.0)[..., None]), lse

    def _unite(self) -> None:
        """Makes the first place the union of all taken ones."""
        taken = self._highest[: self._taken]
        highest = taken.amax(0)
        factors = (taken - highest.clamp(min=_LOWEST)).exp_()
        self._total[0] = self._total[: self._taken].mul_(factors).sum(0)
        self._highest[0] = highest
        factors.unsqueeze_(-1)
        self._weighted[0].mul_(factors[0])
        for place in range(1, self._taken):
            self._weighted[0].addcmul_(self._weighted[place], factors[place])
        self._taken = 1
