"""FlashInfer's paged MLA wrapper, with its Hopper (fa3) or its older (fa2) kernel."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedmla.bench.batch import SOFTMAX_SCALE, DecodeBatch
from pagedmla.bench.peers.peer import PEER_ERRORS, first_line, needs_16_bits, needs_hopper
from pagedmla.bench.shapes import KV_LORA_RANK, QK_ROPE_HEAD_DIM

_PACKAGE = "flashinfer"
_WORKSPACE_BYTES = 256 << 20
"""Its documentation asks for 128 MiB; twice that leaves room for many heads."""


class FlashInfer:
    """Separate latent and rope tensors, any page; base-2 lse unless asked otherwise."""

    def __init__(self, kernel: str) -> None:
        self.name = f"flashinfer_{kernel}"
        self.version = ""
        self._kernel = kernel
        self._module: Any = None

    def load(self, folder: Path | None) -> str | None:
        """Imports flashinfer; ``folder`` goes to the end of the module path for good, for its own later imports."""
        if folder is not None and str(folder) not in sys.path:
            sys.path.append(str(folder))
        try:
            self._module = importlib.import_module(f"{_PACKAGE}.mla")
        except ModuleNotFoundError as error:
            if error.name != _PACKAGE:
                return f"{_PACKAGE} needs {error.name}, which is not installed"
            return f"{_PACKAGE} is not installed, and not in a folder of peers"
        except PEER_ERRORS as error:
            return f"{_PACKAGE} does not load: {first_line(error)}"
        self.version = f"{_PACKAGE} {getattr(sys.modules[_PACKAGE], '__version__', 'of an unknown version')}"
        return None

    def supports(self, batch: DecodeBatch) -> str | None:
        """16 bits; fa3 on sm_90 only."""
        return needs_hopper(batch) if self._kernel == "fa3" else needs_16_bits(batch)

    def prepare(self, batch: DecodeBatch) -> Callable[[], Tensor]:
        """Its plan() works on the host and copies lengths there; it is made here, outside of the time."""
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=batch.device)
        wrapper = self._module.BatchMLAPagedAttentionWrapper(workspace, backend=self._kernel)
        shape = batch.shape
        wrapper.plan(
            batch.starts([shape.q_len] * shape.num_seqs),
            batch.starts(batch.num_pages_of),
            batch.live_pages(),
            batch.seq_lens,
            shape.num_heads,
            KV_LORA_RANK,
            QK_ROPE_HEAD_DIM,
            batch.page_size,
            True,  # causal
            SOFTMAX_SCALE,
            batch.q.dtype,
            batch.kv_cache.dtype,
        )
        q_latent = batch.q[..., :KV_LORA_RANK].contiguous()
        q_rope = batch.q[..., KV_LORA_RANK:].contiguous()
        latent, rope = batch.kv_cache[..., :KV_LORA_RANK], batch.kv_cache[..., KV_LORA_RANK:]
        out = torch.empty_like(q_latent)
        return lambda: wrapper.run(q_latent, q_rope, latent, rope, out=out)
