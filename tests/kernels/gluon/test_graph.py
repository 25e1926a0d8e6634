"""GRAPH: one capture of the Gluon backend, replayed over a random walk of steps; no wait, no allocation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import batches
import pytest
import torch
from gluon_backend import DEVICE, check, is_zero, make_batch, needs_hopper, rows_of
from torch import Tensor

import pagedmla
from pagedmla import BatchBounds, DecodePlan, DecodeProblem

pytestmark = needs_hopper

PAGE, WIDTH, SEQS, STEPS = 64, 20, 8, 45
# heads and query tokens: of the kernel for few rows, and of that for many with one lane, two and three
SHAPES = ((16, 1), (5, 3), (32, 1), (32, 3), (128, 1), (64, 3))
CAPACITY = PAGE * WIDTH
POOL = SEQS * WIDTH + 5
SCALE = 0.13


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """``step`` as a graph, after one run outside of it, which compiles."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Engine:
    """Tensors at fixed addresses: what an engine fills in place before it replays."""

    def __init__(self, num_heads: int, max_q_len: int, copied: bool = False) -> None:
        """``copied``: the query's rows do not lie at multiples of 16 bytes; the launch copies it, within the workspace."""
        self.num_heads = num_heads
        problem = DecodeProblem(num_heads, SCALE, max_q_len=max_q_len)
        self.plan = DecodePlan(problem, BatchBounds(SEQS, WIDTH), DEVICE, backend="gluon")
        rows = SEQS * max_q_len
        self.q = torch.full((rows, num_heads, 576), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        if copied:
            self.q = torch.cat([self.q, self.q[..., :3]], -1)[..., :576]
        self.cache = torch.full((POOL, PAGE, 576), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.empty(rows, num_heads, 512, dtype=torch.bfloat16, device=DEVICE)
        self.lse = torch.empty(rows, num_heads, device=DEVICE)
        self.table = torch.full((SEQS, WIDTH), -1, dtype=torch.int32, device=DEVICE)
        self.lens = torch.ones(SEQS, dtype=torch.int32, device=DEVICE)
        self.starts = torch.arange(SEQS + 1, dtype=torch.int32, device=DEVICE)

    def fill(self, lens: list[int], q_lens: list[int], seed: int) -> dict[str, Any]:
        """Lays a fresh batch into the tensors, nan everywhere else; returns the call that says the same."""
        batch = make_batch(lens, q_lens, num_heads=self.num_heads, seed=seed)
        call = batches.arguments(batch, PAGE, layout_seed=seed, spare_pages=1, spare_columns=0)
        count, width = len(call["q"]), call["block_table"].shape[1]
        for tensor in (self.q, self.cache, self.out, self.lse):
            tensor.fill_(torch.nan)
        first = random.Random(seed).randrange(POOL - len(call["kv_cache"]) + 1)
        self.cache[first : first + len(call["kv_cache"])] = call["kv_cache"].to(DEVICE)
        self.q[:count] = call["q"].to(DEVICE)
        table = call["block_table"] + first
        self.table.fill_(2**31 - 1)[:, :width] = table.to(DEVICE)
        self.lens.copy_(call["seq_lens"])
        self.starts.copy_(call["cu_seqlens_q"])
        self.plan.workspace.fill_(0xFF)
        return call

    def update(self, num_seqs: int = SEQS) -> None:
        self.plan.update(self.table[:num_seqs], self.lens[:num_seqs], self.starts[: num_seqs + 1])

    def run(self) -> tuple[Tensor, Tensor]:
        return self.plan.run(self.q, self.cache, out=self.out, lse=self.lse)

    def update_and_run(self) -> None:
        self.update()
        self.run()

    def check(self, call: dict[str, Any]) -> None:
        count = len(call["q"])
        check((self.out[:count], self.lse[:count]), call)
        assert is_zero(rows_of((self.out, self.lse), slice(count, None))), "padding rows are not (0, -inf)"


def walk(max_q_len: int) -> Iterator[tuple[list[int], list[int]]]:
    """Lengths that grow by the tokens of a step, shrink, jump, die, come back and reach the capacity."""
    choice = random.Random(max_q_len)
    lens = [1] * SEQS
    for step in range(STEPS):
        q_lens = [1] * SEQS if max_q_len == 1 else [choice.randint(0, max_q_len) for _ in range(SEQS)]
        for sequence in range(SEQS):
            kind = choice.random()
            if kind < 0.5:
                lens[sequence] = min(CAPACITY, lens[sequence] + q_lens[sequence])
            elif kind < 0.65:
                lens[sequence] = 0
            else:
                lens[sequence] = choice.choice((1, PAGE, PAGE + 1, CAPACITY, choice.randint(0, CAPACITY)))
        if step % 11 == 2:
            lens = [CAPACITY] * SEQS
        if step % 11 == 3:
            lens = [0] * SEQS
        yield list(lens), q_lens


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("num_heads", "max_q_len"), SHAPES)
def test_a_replay_is_right_at_every_step(num_heads: int, max_q_len: int, inside: bool) -> None:
    """``inside``: the metadata step is captured too."""
    engine = Engine(num_heads, max_q_len, copied=max_q_len == 1)
    engine.update()
    replay = captured(engine.update_and_run if inside else engine.run)
    for step, (lens, q_lens) in enumerate(walk(max_q_len)):
        num_seqs = SEQS
        if not inside and step % 3 == 1:
            # a smaller batch than the graph was captured with
            num_seqs = 1 + step % SEQS
            lens[num_seqs:], q_lens[num_seqs:] = [0] * (SEQS - num_seqs), [0] * (SEQS - num_seqs)
        call = engine.fill(lens, q_lens, step)
        if not inside:
            engine.update(num_seqs)
        replay()
        engine.check(call)


@contextmanager
def no_sync() -> Iterator[None]:
    """Any wait for the device in here is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("num_heads", [5, 32, 128])
def test_a_step_neither_waits_nor_allocates(num_heads: int, copied: bool) -> None:
    engine = Engine(num_heads, 3, copied)
    call = engine.fill([127, 0, 131, 1, CAPACITY, 64, 65, 7], [1, 2, 3, 0, 1, 1, 3, 2], 0)
    engine.update_and_run()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_sync():
        for _ in range(10):
            engine.update_and_run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    engine.check(call)


@pytest.mark.parametrize("num_heads", [16, 32])
def test_a_call_with_outputs_and_workspace_neither_waits_nor_allocates(num_heads: int) -> None:
    engine = Engine(num_heads, 1)
    call = engine.fill([127, 0, 131, 1, CAPACITY, 64, 65, 7], [1] * SEQS, 0)
    given = (engine.q, engine.cache, engine.table, engine.lens)
    options = {
        "softmax_scale": SCALE, "backend": "gluon",
        "out": engine.out, "lse": engine.lse, "workspace": engine.plan.workspace,
    }  # fmt: skip
    pagedmla.decode(*given, **options)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_sync():
        for _ in range(10):
            pagedmla.decode(*given, **options)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    engine.check(call)
