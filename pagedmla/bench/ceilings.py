"""What the machine can do, measured in the run that measures the decode: its matmul rate and its rates of reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedmla.bench.batch import DecodeBatch
from pagedmla.bench.graph_timing import CapturedStep, time_cold
from pagedmla.bench.peers.peer import first_line, peer_errors
from pagedmla.bench.shapes import HEAD_DIM_QK
from pagedmla.bench.timing import StepTime, time_step
from pagedmla.contract.target import Target

_GPU_MATMUL, _CPU_MATMUL = 8192, 512
"""Rows, columns and depth of the product.  Data is random: zeros draw less power, and the clock rises."""
_GPU_READ_BYTES, _CPU_READ_BYTES = 2 << 30, 64 << 20
"""Far more than any cache holds."""


@dataclass(frozen=True)
class Ceilings:
    """Rates of this machine.

    Attributes:
        matmul_dtype: of the product that was timed.
        matmul_flops_per_s: dense product of two square matrices of random numbers.
        sum_bytes_per_s: ``torch.sum`` over far more than the caches hold.
        pages_unread: why a batch's pages cannot be read by the copy engine here; empty when they can, and then that time is
            each shape's memory limit instead of ``sum_bytes_per_s``.
    """

    matmul_dtype: torch.dtype
    matmul_flops_per_s: float
    sum_bytes_per_s: float
    pages_unread: str


@dataclass(frozen=True)
class Floor:
    """The least time of a shape.

    Attributes:
        read_us: reading its pages once.
        arithmetic_us: its operations at the matmul rate.
        cold_read_us: as ``read_us``, with nothing of it in the L2 cache; None where that was not measured.
    """

    read_us: float
    arithmetic_us: float
    cold_read_us: float | None = None

    @property
    def us(self) -> float:
        """The larger of the two, microseconds."""
        return max(self.read_us, self.arithmetic_us)

    @property
    def cold_us(self) -> float | None:
        """The larger of the two with a cold L2 cache, microseconds; None where that was not measured."""
        return None if self.cold_read_us is None else max(self.cold_read_us, self.arithmetic_us)

    @property
    def bound(self) -> str:
        """Which one it is."""
        return "memory" if self.read_us >= self.arithmetic_us else "flops"


def time_repeated(step: Callable[[], Tensor], device: torch.device, rounds: int = 7) -> StepTime:
    """Graph replays on a GPU, a wall clock elsewhere."""
    if device.type == "cuda":
        return CapturedStep(step, device).time(rounds)
    return time_step(step, device, steps=wall_clock_steps(step), rounds=rounds)


def wall_clock_steps(step: Callable[[], object]) -> int:
    """How many calls make a round of about 20 ms: a clock's resolution then does not matter, and no round takes long."""
    once = time_step(step, "cpu", steps=1, rounds=1).median_us
    return max(1, min(1000, int(20e3 / max(once, 1.0))))


def measure_ceilings(device: torch.device, dtype: torch.dtype, rounds: int = 7) -> Ceilings:
    """Takes the rates of ``device`` for products and sums of ``dtype``; 2 GiB are read on a GPU.

    Args:
        device: what is measured.
        dtype: of the decode's queries and cache.
        rounds: of which the median counts.
    """
    on_gpu = device.type == "cuda"
    # a CPU without 16-bit arithmetic multiplies in float32, as our torch backend does there
    matmul_dtype = dtype if on_gpu else torch.float32
    return Ceilings(
        matmul_dtype=matmul_dtype,
        matmul_flops_per_s=_matmul_rate(_GPU_MATMUL if on_gpu else _CPU_MATMUL, device, matmul_dtype, rounds),
        sum_bytes_per_s=_sum_rate(_GPU_READ_BYTES if on_gpu else _CPU_READ_BYTES, device, dtype, rounds),
        pages_unread=why_pages_unread(Target.detect(device), dtype) or _try_page_reader(device),
    )


def _matmul_rate(size: int, device: torch.device, dtype: torch.dtype, rounds: int) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / time_repeated(lambda: torch.mm(a, b), device, rounds).median_us * 1e6


def _sum_rate(num_bytes: int, device: torch.device, dtype: torch.dtype, rounds: int) -> float:
    read = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device).normal_()
    step_us = time_repeated(lambda: torch.sum(read, dtype=torch.float32), device, rounds).median_us
    return num_bytes / step_us * 1e6


def why_pages_unread(target: Target, dtype: torch.dtype) -> str:
    """Why ``read_limit`` cannot read pages of ``dtype`` on ``target``; empty when it can."""
    if target.arch != "sm_90":
        return f"the page reader is for sm_90, this is {target.arch}"
    if dtype.itemsize != 2:
        return f"the page reader takes numbers of 16 bits, not of {8 * dtype.itemsize}"
    return ""


def _try_page_reader(device: torch.device) -> str:
    """Why the page reader does not run on ``device``, or an empty string: Gluon is experimental and moves between versions."""
    cache = torch.zeros(2, 64, HEAD_DIM_QK, dtype=torch.bfloat16, device=device)
    pages = torch.tensor([1, 0], dtype=torch.int32, device=device)
    try:
        from pagedmla.bench.read_limit import page_reader

        pages_read = int(page_reader(cache, pages)().sum())
    except peer_errors() as error:
        return f"the page reader does not run: {first_line(error)}"
    return "" if pages_read == 2 else f"the page reader read {pages_read} pages of 2"


def floor_of(batch: DecodeBatch, ceilings: Ceilings, rounds: int = 7, cold: bool = False) -> Floor:
    """The floor of ``batch``: its own bytes read on this device as pages, or their number at the rate of ``torch.sum``.

    Args:
        batch: what is decoded.
        ceilings: of the same run.
        rounds: of which the median counts.
        cold: also read them with nothing in the L2 cache; on a GPU whose pages can be read.
    """
    arithmetic_us = batch.shape.flops() / ceilings.matmul_flops_per_s * 1e6
    pool, pages = batch.read_pages()
    if ceilings.pages_unread or not pages.numel():
        num_bytes = batch.shape.bytes_moved(batch.q.dtype.itemsize)
        return Floor(num_bytes / ceilings.sum_bytes_per_s * 1e6, arithmetic_us)
    from pagedmla.bench.read_limit import page_reader

    reader = page_reader(pool, pages)
    cold_us = time_cold(reader, batch.device, rounds).median_us if cold else None
    return Floor(time_repeated(reader, batch.device, rounds).median_us, arithmetic_us, cold_us)
