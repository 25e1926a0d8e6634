"""Our own decode as a contender: a backend and a schedule, with every buffer given."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import pagedmla
from pagedmla.bench.batch import SOFTMAX_SCALE, DecodeBatch
from pagedmla.bench.shapes import KV_LORA_RANK
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import Refusal, backends_to_choose_from, choose_backend, refusals
from pagedmla.contract.target import Target

AUTO = "auto"
"""The backend that the table chooses, or the schedule that the backend does."""


@dataclass(frozen=True)
class OurStep:
    """One decode call with fixed arguments, fit for capture; calling it returns ``out`` [num_tokens, num_heads, 512].

    Attributes:
        batch, backend, schedule: what is called.
        runs_on: the backend that this leads to.
        out, lse: what it writes.
        workspace: uint8, intermediates.
    """

    batch: DecodeBatch
    backend: str | None
    schedule: str | None
    runs_on: str
    out: Tensor
    lse: Tensor
    workspace: Tensor

    def __call__(self) -> Tensor:
        # looked up at each call, so that a test may put a wrong one there
        pagedmla.decode(
            self.batch.q,
            self.batch.kv_cache,
            self.batch.block_table,
            self.batch.seq_lens,
            softmax_scale=SOFTMAX_SCALE,
            kv_lora_rank=KV_LORA_RANK,
            out=self.out,
            lse=self.lse,
            backend=self.backend,
            schedule=self.schedule,
            workspace=self.workspace,
        )
        return self.out


@dataclass(frozen=True)
class OurDecode:
    """``pagedmla.decode`` with a backend and a schedule, each named or left to it.

    Attributes:
        backend: a name out of the support table, or ``auto`` for the best that takes the batch.
        schedule: ``split``, ``persistent``, or ``auto`` for the backend's choice.
    """

    backend: str = AUTO
    schedule: str = AUTO

    @property
    def name(self) -> str:
        """Such as ``triton/split``; ``pagedmla`` where nothing is named, which is what a user gets."""
        if self.backend == AUTO:
            return "pagedmla" if self.schedule == AUTO else f"pagedmla/{self.schedule}"
        return f"{self.backend}/{self.schedule}"

    @property
    def version(self) -> str:
        """The package's own."""
        return f"pagedmla {pagedmla.__version__}"

    @property
    def _schedule(self) -> str | None:
        return None if self.schedule == AUTO else self.schedule

    @property
    def _backend(self) -> str | None:
        return None if self.backend == AUTO else self.backend

    def refused(self, problem: DecodeProblem, target: Target) -> tuple[Refusal, ...]:
        """Every reason why the support table refuses ``problem``; its own schedule is not asked."""
        problem = replace(problem, schedule=self._schedule)
        if self._backend is not None:
            return refusals(problem, target, self._backend)
        names = backends_to_choose_from(target)
        by_backend = [refusals(problem, target, name) for name in names]
        return () if not all(by_backend) else tuple(reason for reasons in by_backend for reason in reasons)

    def supports(self, batch: DecodeBatch) -> str | None:
        """Every reason why the support table refuses the batch, or None."""
        return "; ".join(map(str, self.refused(batch.problem(), batch.target))) or None

    def prepare(self, batch: DecodeBatch) -> OurStep:
        """Makes the buffers; out and lse start as nan, so that a row that is not written cannot pass.

        Raises:
            Unsupported: the backend refuses the batch, or cannot be imported here.
        """
        shape = (batch.shape.num_tokens, batch.shape.num_heads)
        problem = batch.problem(self._schedule)
        num_bytes = pagedmla.workspace_size(problem, batch.bounds(), batch.device, self._backend)
        return OurStep(
            batch=batch,
            backend=self._backend,
            schedule=self._schedule,
            runs_on=choose_backend(problem, batch.target, self._backend),
            out=torch.full((*shape, KV_LORA_RANK), math.nan, dtype=batch.q.dtype, device=batch.device),
            lse=torch.full(shape, math.nan, dtype=torch.float32, device=batch.device),
            workspace=torch.empty(num_bytes, dtype=torch.uint8, device=batch.device),
        )
