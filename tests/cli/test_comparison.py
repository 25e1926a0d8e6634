"""The first difference is found, and probabilities are compared only where the preceding text is the same."""

from __future__ import annotations

import math

import pytest
import torch

from pagedmla.cli.comparison import compare_runs
from pagedmla.cli.generation import Run


def run(ids: list[int], logits: list[list[float]] | None = None) -> Run:
    rows = logits if logits is not None else [[0.0, 0.0, 0.0] for _ in ids]
    return Run(ids, torch.tensor(rows), first_token_s=0.1, tokens_per_s=1.0)


def test_equal_runs_agree() -> None:
    compared = compare_runs(run([1, 2, 0]), run([1, 2, 0]))
    assert compared.agree
    assert (compared.num_tokens, compared.max_log_prob_difference) == (3, 0.0)


def test_the_first_difference_is_named() -> None:
    compared = compare_runs(run([1, 2, 0, 1]), run([1, 1, 2, 1]))
    assert not compared.agree
    assert (compared.first_difference, compared.ours, compared.stock) == (1, 2, 1)


@pytest.mark.parametrize(("ours", "stock", "where"), [([1, 2], [1], (1, 2, None)), ([], [2], (0, None, 2))])
def test_a_shorter_run_differs_at_its_end(ours: list[int], stock: list[int], where: tuple) -> None:
    compared = compare_runs(
        Run(ours, torch.zeros(len(ours), 3), 0.0, 0.0), Run(stock, torch.zeros(len(stock), 3), 0.0, 0.0)
    )
    assert (compared.first_difference, compared.ours, compared.stock) == where


def test_log_probabilities_are_compared_and_not_logits() -> None:
    # a constant added to every logit changes no probability
    shifted = compare_runs(run([1], [[1.0, 2.0, 3.0]]), run([1], [[6.0, 7.0, 8.0]]))
    assert shifted.max_log_prob_difference < 1e-12
    # ln(1/2) against ln(1/3): two equal logits of two, and three equal ones
    ours, stock = run([1], [[0.0, 0.0, -1e9]]), run([1], [[0.0, 0.0, 0.0]])
    assert compare_runs(ours, stock).max_log_prob_difference >= math.log(3 / 2)


def test_steps_after_the_first_difference_do_not_count() -> None:
    ours = run([1, 2, 0], [[0, 0, 0], [0, 0, 1e-3], [0, 0, 9]])
    stock = run([1, 1, 0], [[0, 0, 0], [0, 0, 0], [9, 0, 0]])
    difference = compare_runs(ours, stock).max_log_prob_difference
    # at the step that differs itself: ln of softmax([0, 0, 1e-3]) against -ln 3, largest at the raised logit
    assert difference == pytest.approx(1e-3 - math.log((2 + math.exp(1e-3)) / 3), rel=1e-3)


def test_tokens_masked_on_both_sides_are_equal() -> None:
    masked = [[0.0, 1.0, -math.inf]]
    assert compare_runs(run([1], masked), run([1], masked)).max_log_prob_difference == 0.0
    one_side = compare_runs(run([1], masked), run([1], [[0.0, 1.0, 0.0]]))
    assert one_side.max_log_prob_difference == math.inf


def test_runs_without_logits_are_refused() -> None:
    bare = Run([1], None, 0.0, 0.0)
    with pytest.raises(ValueError, match="kept their logits"):
        compare_runs(bare, bare)
