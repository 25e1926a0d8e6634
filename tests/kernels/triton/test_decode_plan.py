"""``DecodePlan`` over the Triton backend: fixed buffers, any later step, and refusals of what was not planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import Batch
from triton_backend import (
    DEVICE,
    INVARIANT,
    PERSISTENT,
    SPLITS,
    arguments,
    check,
    is_zero,
    make_batch,
    rows_of,
)

from pagedmla import BatchBounds, DecodePlan, DecodeProblem, PlanMismatch

pytestmark = pytest.mark.usefixtures("short_cuts")

HEADS, PAGE, WIDTH, SEQS = 4, 16, 6, 4
CAPACITY = PAGE * WIDTH


def _plan(max_q_len: int = 1, **mode: Any) -> DecodePlan:
    problem = DecodeProblem(
        HEADS, 0.13, 32, 8, PAGE, torch.float16, "fp16", max_q_len=max_q_len, **mode
    )  # fmt: skip
    return DecodePlan(problem, BatchBounds(SEQS, WIDTH), DEVICE, backend="triton")


def _step(plan: DecodePlan, batch: Batch) -> None:
    """Plans and runs a step with padding rows behind it, over a workspace of 0xFF, and checks all of it."""
    call = arguments(batch, PAGE, spare_columns=0)
    padding = torch.full_like(call["q"][:1], torch.nan)
    q = torch.cat([call["q"], padding])[: plan.bounds.num_tokens(plan.problem)]
    plan.update(call["block_table"], call["seq_lens"], call["cu_seqlens_q"])
    plan.workspace.fill_(0xFF)
    result = plan.run(q, call["kv_cache"])
    count = len(call["q"])
    check((result[0][:count], result[1][:count]), call)
    assert is_zero(rows_of(result, slice(count, None)))


@pytest.mark.parametrize("mode", [PERSISTENT, SPLITS, INVARIANT], ids=str)
def test_a_plan_is_right_for_lengths_that_shrink_grow_and_die(mode: dict[str, Any]) -> None:
    plan = _plan(**mode)
    for lengths in ([70, 0, 1], [3], [CAPACITY] * SEQS, [0, 0]):
        _step(plan, make_batch(lengths))


@pytest.mark.parametrize("mode", [PERSISTENT, INVARIANT], ids=str)
def test_a_plan_for_several_query_tokens(mode: dict[str, Any]) -> None:
    plan = _plan(max_q_len=3, **mode)
    for lengths, q_lens in (([70, 0, 2], [3, 1, 3]), ([5], [0]), ([CAPACITY, 33], [1, 2])):
        _step(plan, make_batch(lengths, q_lens))


def test_what_was_not_planned_is_refused() -> None:
    plan = _plan()
    call = arguments(make_batch([9, 5]), PAGE, spare_columns=0)
    plan.update(call["block_table"], call["seq_lens"])
    q, cache = call["q"], call["kv_cache"]
    for given, argument in (
        ((torch.cat([q, q], 1), cache), "q"),
        ((q[..., :36], cache), "q"),
        ((q.bfloat16(), cache), "q"),
        ((q, cache.float()), "kv_cache"),
        ((q, cache[:, :8]), "kv_cache"),
        ((torch.cat([q] * 3), cache), "q"),
    ):
        with pytest.raises(PlanMismatch) as caught:
            plan.run(*given)
        assert caught.value.argument == argument
    with pytest.raises(PlanMismatch):
        plan.update(call["block_table"].repeat(3, 1), call["seq_lens"].repeat(3))
