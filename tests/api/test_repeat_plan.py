"""A plan's step that was made before: its own addresses, and every check of the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stand_in_backend import (
    HEADS,
    PAGE,
    RANK,
    ROPE,
    TOKENS,
    WORKSPACE_BYTES,
    StandIn,
    addresses,
    decode,
    make_call,
)
from stand_in_backend import make_backend as make_backend

from pagedmla import BatchBounds, DecodePlan, DecodeProblem, InvalidArgument, PlanMismatch


def plan_of(call: dict[str, Any], max_q_len: int = 1) -> DecodePlan:
    problem = DecodeProblem(HEADS, 0.1, RANK, ROPE, PAGE, torch.float32, "fp32", max_q_len=max_q_len)
    plan = DecodePlan(problem, BatchBounds(TOKENS, 6))
    plan.update(call["block_table"], call["seq_lens"])
    return plan


@pytest.mark.parametrize("given", [("out", "lse"), ("out",), ()])
def test_a_plan_s_step_is_launched_with_its_own_addresses(backend: StandIn, given: tuple[str, ...]) -> None:
    first = make_call()
    plan = plan_of(first)
    for call in (first, make_call()):
        outputs = {name: call[name] for name in given}
        out, lse = plan.run(call["q"], call["kv_cache"], **outputs)
    metadata = plan.metadata
    assert backend.decoded == 1
    assert backend.launched == [
        addresses(
            {
                "q": call["q"], "kv_cache": call["kv_cache"], "out": out, "lse": lse,
                "block_table": metadata.block_table, "seq_lens": metadata.seq_lens,
                "cu_seqlens_q": metadata.cu_seqlens_q, "workspace": plan.workspace,
            }
        )
    ]  # fmt: skip


def test_a_plan_refuses_a_step_that_does_not_fit_its_last_update(backend: StandIn) -> None:
    call = make_call()
    plan = plan_of(call)
    plan.update(call["block_table"][:2], call["seq_lens"][:2])
    fewer = (call["q"][:3], call["kv_cache"])
    for _ in range(2):
        plan.run(*fewer)
    plan.update(call["block_table"], call["seq_lens"])
    for _ in range(2):
        with pytest.raises(PlanMismatch, match="num_tokens"):
            plan.run(*fewer)
    assert (backend.decoded, len(backend.launched)) == (1, 1)


def test_plans_are_not_taken_for_each_other(backend: StandIn) -> None:
    call = make_call()
    plans = [plan_of(call), plan_of(call)]
    for plan in plans * 2:
        plan.run(call["q"], call["kv_cache"])
    workspaces = [bound[-1] for bound in backend.launched]
    # the second plan's first run is known to decode() by its shapes
    assert workspaces == [plan.workspace.data_ptr() for plan in (plans[1], *plans)]


def test_a_plan_may_be_given_another_workspace(backend: StandIn) -> None:
    call = make_call()
    plan = plan_of(call)
    for _ in range(2):
        plan.run(call["q"], call["kv_cache"])
    plan.workspace = torch.empty_like(plan.workspace)
    plan.run(call["q"], call["kv_cache"])
    assert backend.launched[-1][-1] == plan.workspace.data_ptr()
    plan.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="workspace"):
        plan.run(call["q"], call["kv_cache"])


MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "resize_": lambda buffer: buffer.resize_(4 * buffer.numel()),
    "data": lambda buffer: setattr(buffer, "data", torch.empty(4 * buffer.numel(), dtype=buffer.dtype)),
    "set_": lambda buffer: buffer.set_(torch.zeros_like(buffer)),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_buffer_whose_memory_moved_is_used_where_it_is(backend: StandIn, name: str) -> None:
    call = make_call()
    plan = plan_of(call)
    for _ in range(2):
        plan.run(call["q"], call["kv_cache"])
    MOVES[name](plan.workspace)
    known = len(backend.launched)
    # of another size, the first goes the whole way
    for _ in range(2):
        plan.run(call["q"], call["kv_cache"])
    assert {bound[-1] for bound in backend.launched[known:]} == {plan.workspace.data_ptr()}


def test_a_plan_with_another_problem_runs_that_one(backend: StandIn) -> None:
    call = make_call()
    plan = plan_of(call)
    for _ in range(2):
        plan.run(call["q"], call["kv_cache"])
    before = backend.decoded
    plan.problem = replace(plan.problem, softmax_scale=9.0)
    plan.run(call["q"], call["kv_cache"])
    assert backend.decoded == before + 1
    plan.problem = replace(plan.problem, num_heads=HEADS + 1)
    with pytest.raises(PlanMismatch):
        plan.run(call["q"], call["kv_cache"])


@pytest.mark.parametrize("scale", [1, 1.0])
@pytest.mark.parametrize("given", [("out",), ()])
def test_a_scale_may_be_a_whole_number(backend: StandIn, scale: float, given: tuple[str, ...]) -> None:
    call = make_call()
    problem = DecodeProblem(HEADS, scale, RANK, ROPE, PAGE, torch.float32, "fp32")
    plan = DecodePlan(problem, BatchBounds(TOKENS, 6))
    outputs = {name: call[name] for name in given}
    for _ in range(3):
        plan.run(call["q"], call["kv_cache"], **outputs)
        decode(call, softmax_scale=scale)
    assert backend.decoded <= 2
    assert len(backend.launched) == 6 - backend.decoded
