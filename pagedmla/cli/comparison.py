"""Compares two runs of one prompt: tokens, and log-probabilities as far as they are comparable."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedmla.cli.generation import Run


@dataclass(frozen=True)
class Comparison:
    """How two runs differ.

    Attributes:
        num_tokens: tokens of the longer run.
        first_difference: position of the first token that is not the same in both, or None.
        ours: the token there of the first run, None past its end.
        stock: the token there of the second run, None past its end.
        max_log_prob_difference: largest ``|difference|`` of natural-log probabilities over the whole
            vocabulary, at every position whose preceding tokens agree.
    """

    num_tokens: int
    first_difference: int | None
    ours: int | None
    stock: int | None
    max_log_prob_difference: float

    @property
    def agree(self) -> bool:
        """Whether every token is the same."""
        return self.first_difference is None


def compare_runs(ours: Run, stock: Run) -> Comparison:
    """Compares ``ours`` with ``stock``, both made with their logits kept."""
    longest = max(len(ours.token_ids), len(stock.token_ids))
    pairs = [(_at(ours.token_ids, i), _at(stock.token_ids, i)) for i in range(longest)]
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    # the step that first differs still follows a common text, so its probabilities are comparable; later
    # ones are not
    comparable = longest if first is None else first + 1
    where = (None, None) if first is None else pairs[first]
    return Comparison(longest, first, *where, _log_prob_difference(ours.logits, stock.logits, comparable))


def _log_prob_difference(ours: torch.Tensor | None, stock: torch.Tensor | None, count: int) -> float:
    if ours is None or stock is None:
        raise ValueError("compare_runs needs runs that kept their logits")
    worst = 0.0
    for a, b in zip(ours[:count], stock[:count], strict=False):
        difference = torch.log_softmax(a.double(), -1) - torch.log_softmax(b.double(), -1)
        # a token masked out on both sides is -inf - -inf; on one side it is inf, and stays
        worst = max(worst, difference[~difference.isnan()].abs().max().item())
    return worst


def _at(ids: list[int], index: int) -> int | None:
    return ids[index] if index < len(ids) else None
