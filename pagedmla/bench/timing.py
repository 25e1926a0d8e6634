"""How long a step takes, launch overhead included: a wall clock over many steps, the device waited for at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepTime:
    """Microseconds a step over several rounds: the fastest round, the median one and the slowest one."""

    fastest_us: float
    median_us: float
    slowest_us: float

    @classmethod
    def of(cls, rounds_us: Sequence[float]) -> StepTime:
        """From the microseconds a step of each round."""
        ordered = sorted(rounds_us)
        return cls(ordered[0], ordered[len(ordered) // 2], ordered[-1])


def time_step(
    step: Callable[[], object], device: torch.device | str, *, steps: int = 1000, rounds: int = 7
) -> StepTime:
    """Times ``steps`` calls a round after one round of warm-up.

    Args:
        step: the work of one step.
        device: a CUDA device is waited for before and after each round, so its work counts.
        steps: calls a round; enough that a clock's resolution does not matter.
        rounds: how often.
    """
    on_gpu = torch.device(device).type == "cuda"
    found = []
    for _ in range(rounds + 1):
        if on_gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - start) / steps * 1e6)
    return StepTime.of(found[1:])


def time_host(
    step: Callable[[], object], device: torch.device | str, *, calls: int = 20, rounds: int = 7
) -> StepTime:
    """Times what a call costs the host: the clock stops when the last call returns, before the device is waited for.

    Args:
        step: one call.
        device: a CUDA device is waited for between the rounds, so that its queue is never full.
        calls: calls a round; few enough that all of them fit in the device's queue.
        rounds: how often, after one that does not count.
    """
    on_gpu = torch.device(device).type == "cuda"
    found = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            step()
        found.append((time.perf_counter() - start) / calls * 1e6)
        if on_gpu:
            torch.cuda.synchronize(device)
    return StepTime.of(found[1:])
