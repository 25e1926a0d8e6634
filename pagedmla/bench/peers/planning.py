"""What peers plan once a step for all layers, apart from the decode: it is timed by itself and is no part of a decode's time.

FlashInfer's ``plan()`` works on the host and copies lengths there: its cost is wall clock.  FlashMLA makes its tile schedule in
the first decode of a step, on the device: its cost is that decode less one that is given the schedule, both in graphs.  FA3 and
vLLM's Triton kernel plan nothing ahead, and neither does ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedmla.bench.batch import SOFTMAX_SCALE, DecodeBatch
from pagedmla.bench.graph_timing import time_difference
from pagedmla.bench.shapes import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from pagedmla.bench.timing import StepTime, time_step

_FLASHINFER_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class PlanTime:
    """What planning a step costs.

    Attributes:
        time: microseconds of one plan.
        where: ``host`` (wall clock until the device is done too) or ``device`` (difference of two graphs).
    """

    time: StepTime
    where: str


def time_plan(
    name: str, batch: DecodeBatch, decode: Callable[[], Tensor], rounds: int = 7
) -> PlanTime | None:
    """The cost of planning ``batch`` for the peer called ``name``; None for one that plans nothing.

    Args:
        name: a peer's; it is loaded.
        batch: what is planned for.
        decode: the peer's decode of it, planned.
        rounds: of which the median counts.
    """
    kernel = {"flashinfer_fa3": "fa3", "flashinfer_fa2": "fa2"}.get(name)
    if kernel is not None:
        plan = flashinfer_plan(batch, kernel)
        return PlanTime(time_step(plan, batch.device, steps=3, rounds=rounds), "host")
    # FlashMLA's own package has another interface, and is not asked
    if (
        name == "flash_mla"
        and batch.device.type == "cuda"
        and hasattr(torch.ops._flashmla_C, "dense_decode_fwd")
    ):
        planning = flash_mla_that_plans(batch)
        return PlanTime(time_difference(planning, decode, batch.device, rounds), "device")
    return None


def flashinfer_plan(batch: DecodeBatch, kernel: str) -> Callable[[], object]:
    """One ``plan()`` with its arguments ready on the device; FlashInfer is loaded."""
    module: Any = sys.modules["flashinfer.mla"]
    device, shape = batch.device, batch.shape
    wrapper = module.BatchMLAPagedAttentionWrapper(
        torch.empty(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.int8, device=device), backend=kernel
    )
    arguments = (
        batch.starts([shape.q_len] * shape.num_seqs),
        batch.starts(batch.num_pages_of),
        batch.live_pages(),
        batch.seq_lens,
        shape.num_heads,
        KV_LORA_RANK,
        QK_ROPE_HEAD_DIM,
        batch.page_size,
        True,
        SOFTMAX_SCALE,
        batch.q.dtype,
        batch.kv_cache.dtype,
    )
    return lambda: wrapper.plan(*arguments)


def flash_mla_that_plans(batch: DecodeBatch) -> Callable[[], Tensor]:
    """A decode of FlashMLA that is given no schedule and makes one."""
    decode = torch.ops._flashmla_C.dense_decode_fwd
    cache = batch.kv_cache.unsqueeze(2)  # one KV head

    def step() -> Tensor:
        found: Tensor = decode(
            batch.q_by_sequence,
            cache,
            KV_LORA_RANK,
            batch.seq_lens,
            batch.block_table,
            SOFTMAX_SCALE,
            True,
            None,
            None,
            None,
        )[0]
        return found

    return step
