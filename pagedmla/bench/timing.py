"""How long a step takes, launch overhead included: a wall clock over many steps, the device waited for at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepTime:
    """Microseconds a step over several rounds: the fastest round, the median one and the slowest one."""

    fastest_us: float
    median_us: float
    slowest_us: float


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
    ordered = sorted(found[1:])
    return StepTime(ordered[0], ordered[len(ordered) // 2], ordered[-1])
