"""The Triton backend for value tests: interpreted on the CPU, or compiled where there is a card; one source for both.

The interpreter truncates to bfloat16 where hardware rounds, so on the CPU everything is fp16.  It takes milliseconds for a
program and tile: shapes are small, and the policy's numbers are made small with them (``small_policy``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import batches
import pytest
import torch
from batches import Batch
from hypothesis import settings
from torch import Tensor

from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.target import Target
from pagedmla.kernels import policy

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
DTYPES = (torch.float16, torch.bfloat16) if ON_CARD else (torch.float16,)
FAMILY = policy.triton_family(Target.detect(DEVICE))
KV_TILE = policy.TRITON_DECODE_CONFIGS[FAMILY][0][1].block_n
"""Tokens of a KV tile for few heads."""

PERSISTENT: dict[str, Any] = {}
SPLIT: dict[str, Any] = {"schedule": "split"}
SPLITS: dict[str, Any] = {"num_kv_splits": 3}
INVARIANT: dict[str, Any] = {"batch_invariant": True}
MODES = [PERSISTENT, SPLITS, INVARIANT, *([SPLIT] if ON_CARD else [])]
"""Every way that keys are cut; interpreted, the automatic number of splits is left to the tests of splits."""


def small_policy(monkeypatch: pytest.MonkeyPatch, workers: int = 3, tiles_per_split: int = 2) -> None:
    """Cuts short sequences as the policy would cut long ones; a card keeps its own number of workers."""
    smaller = tuple(
        (
            most_rows,
            replace(
                config,
                programs_per_compute_unit=config.programs_per_compute_unit if ON_CARD else workers,
                invariant_split=tiles_per_split * config.block_n,
            ),
        )
        for most_rows, config in policy.TRITON_DECODE_CONFIGS[FAMILY]
    )
    monkeypatch.setitem(policy.TRITON_DECODE_CONFIGS, FAMILY, smaller)


def make_batch(*arguments: Any, **options: Any) -> Batch:
    """``batches.make_batch`` in a dtype that is right on this device."""
    return batches.make_batch(*arguments, **{"q_dtype": torch.float16} | options)


def arguments(batch: Batch, page_size: int = 16, **layout: Any) -> dict[str, Any]:
    """``batches.arguments`` on this device."""
    return batches.arguments(batch, page_size, device=DEVICE, **layout)


def run(call: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """``batches.run`` by the Triton backend."""
    return batches.run(call, **{"backend": "triton"} | options)


def decode(batch: Batch, page_size: int = 16, **options: Any) -> tuple[Tensor, Tensor]:
    """One layout of ``batch`` by the Triton backend."""
    return run(arguments(batch, page_size), **options)


def check(result: tuple[Tensor, Tensor], call: dict[str, Any]) -> None:
    """Asserts that a result is within the derived bound of the oracle: weights are rounded to the cache's dtype."""
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in call.items()}
    if isinstance(call["q"], tuple):
        on_cpu["q"] = tuple(part.cpu() for part in call["q"])
    batches.check(result, on_cpu, p_dtype=call["kv_cache"].dtype)


def checked(call: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """Runs a call and checks its values; ``options`` that change what is computed belong into ``call``."""
    result = run(call, **options)
    check(result, call)
    return result


def rows_of(result: tuple[Tensor, Tensor], rows: Any) -> tuple[Tensor, ...]:
    """Some rows of (out, lse)."""
    return tuple(part[rows] for part in result)


def is_zero(result: tuple[Tensor, ...]) -> bool:
    """Whether rows are exactly what a row without keys gets: plus zeros and -inf."""
    out, lse = result
    return bool((out == 0).all() & ~torch.signbit(out).any() & (lse == -torch.inf).all())


def problem_of(call: dict[str, Any], max_q_len: int, **mode: Any) -> tuple[DecodeProblem, BatchBounds]:
    """The static half of a call, and bounds that it just fits."""
    q, cache = call["q"], call["kv_cache"]
    problem = DecodeProblem(
        num_heads=q.shape[1],
        softmax_scale=call["softmax_scale"],
        kv_lora_rank=call["kv_lora_rank"],
        qk_rope_head_dim=q.shape[2] - call["kv_lora_rank"],
        page_size=cache.shape[1],
        q_dtype=q.dtype,
        kv_layout=layout_of_dtype(cache.dtype).name,
        max_q_len=max_q_len,
        **mode,
    )
    return problem, BatchBounds(call["seq_lens"].shape[0], call["block_table"].shape[1], q.shape[0])


def few(examples: int) -> settings:
    """Fewer hypothesis examples where kernels are interpreted; the profile's own number when searching or on a card."""
    profile = settings().max_examples
    return settings(max_examples=profile if ON_CARD or profile > 100 else min(profile, examples))
