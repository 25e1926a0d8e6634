"""Our own decode as a contender: a backend and a schedule, with every buffer given."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import pagedmla
from pagedmla.bench.batch import SOFTMAX_SCALE, DecodeBatch
from pagedmla.bench.shapes import KV_LORA_RANK
from pagedmla.contract.support import refusals

AUTO = "auto"
"""The schedule that the backend chooses."""


@dataclass(frozen=True)
class OurStep:
    """One decode call with fixed arguments, fit for capture; calling it returns ``out`` [num_tokens, num_heads, 512].

    Attributes:
        batch, backend, schedule: what is called.
        out, lse: what it writes.
        workspace: uint8, intermediates.
    """

    batch: DecodeBatch
    backend: str
    schedule: str | None
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
    """``pagedmla.decode`` with one backend and one schedule.

    Attributes:
        backend: a name out of the support table.
        schedule: ``split``, ``persistent``, or ``auto`` for the backend's choice.
    """

    backend: str
    schedule: str

    @property
    def name(self) -> str:
        """Such as ``triton/split``."""
        return f"{self.backend}/{self.schedule}"

    @property
    def version(self) -> str:
        """The package's own."""
        return f"pagedmla {pagedmla.__version__}"

    @property
    def _schedule(self) -> str | None:
        return None if self.schedule == AUTO else self.schedule

    def supports(self, batch: DecodeBatch) -> str | None:
        """Every reason why the support table refuses the batch, or None."""
        found = refusals(batch.problem(self._schedule), batch.target, self.backend)
        return "; ".join(str(refusal) for refusal in found) or None

    def prepare(self, batch: DecodeBatch) -> OurStep:
        """Makes the buffers; out and lse start as nan, so that a row that is not written cannot pass.

        Raises:
            Unsupported: the backend refuses the batch, or cannot be imported here.
        """
        shape = (batch.shape.num_tokens, batch.shape.num_heads)
        num_bytes = pagedmla.workspace_size(
            batch.problem(self._schedule), batch.bounds(), batch.device, self.backend
        )
        return OurStep(
            batch=batch,
            backend=self.backend,
            schedule=self._schedule,
            out=torch.full((*shape, KV_LORA_RANK), math.nan, dtype=batch.q.dtype, device=batch.device),
            lse=torch.full(shape, math.nan, dtype=torch.float32, device=batch.device),
            workspace=torch.empty(num_bytes, dtype=torch.uint8, device=batch.device),
        )
