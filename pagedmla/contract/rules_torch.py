"""What the torch backend takes: its rows of the support table."""

from __future__ import annotations

import torch

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.rules import Answer, Rule, invariant_splits
from pagedmla.contract.target import Target

# (q dtype, cache layout) pairs whose product the torch kernel forms exactly in float32
_TORCH_DTYPE_PAIRS: tuple[tuple[torch.dtype, str], ...] = (
    (torch.bfloat16, "bf16"),
    (torch.float16, "fp16"),
    (torch.float32, "fp32"),
    (torch.bfloat16, "fp8_per_tensor"),
    (torch.float16, "fp8_per_tensor"),
    (torch.float32, "fp8_per_tensor"),
    (torch.float8_e4m3fn, "fp8_per_tensor"),
    (torch.bfloat16, "fp8_fnuz_per_tensor"),
    (torch.float16, "fp8_fnuz_per_tensor"),
    (torch.float32, "fp8_fnuz_per_tensor"),
    (torch.float8_e4m3fnuz, "fp8_fnuz_per_tensor"),
)


def _dtypes(problem: DecodeProblem, target: Target) -> Answer | None:
    if (problem.q_dtype, problem.kv_layout) in _TORCH_DTYPE_PAIRS:
        return None
    for_query = [layout for dtype, layout in _TORCH_DTYPE_PAIRS if dtype == problem.q_dtype]
    return (
        "dtype_pair",
        "kv_cache",
        f"for q of {problem.q_dtype}: " + " or ".join(for_query),
        problem.kv_layout,
    )


def _schedule(problem: DecodeProblem, target: Target) -> Answer | None:
    if problem.schedule in (None, "split"):
        return None
    return "schedule", "schedule", "None or 'split'", repr(problem.schedule)


RULES: tuple[Rule, ...] = (_dtypes, _schedule, invariant_splits)
