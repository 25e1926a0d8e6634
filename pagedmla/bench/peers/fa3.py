"""FlashAttention 3 with its latent operand (qv), as vLLM's fork builds it for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pagedmla.bench.batch import SOFTMAX_SCALE, DecodeBatch
from pagedmla.bench.peers.peer import find_software, load_library, needs_hopper
from pagedmla.bench.shapes import KV_LORA_RANK

_FILE = "_vllm_fa3_C.abi3.so"


class FlashAttention3:
    """Rope as the key, latent as the value and as a second key; natural-log lse."""

    name = "fa3"

    def __init__(self) -> None:
        self.version = ""

    def load(self, folder: Path | None) -> str | None:
        """Loads vLLM's ``_vllm_fa3_C``."""
        found = find_software("vllm", (f"vllm_flash_attn/{_FILE}",), folder)
        if isinstance(found, str):
            return found
        reason = load_library(found.path)
        if reason is None and not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            reason = f"{found.version} has no fwd"
        self.version = found.version
        return reason

    def supports(self, batch: DecodeBatch) -> str | None:
        """sm_90, 16 bits; any page."""
        return needs_hopper(batch)

    def prepare(self, batch: DecodeBatch) -> Callable[[], Tensor]:
        """Split counts are left to its own heuristic; it has no metadata to make beforehand unless asked."""
        decode = torch.ops._vllm_fa3_C.fwd
        q_latent, q_rope = batch.q[..., :KV_LORA_RANK], batch.q[..., KV_LORA_RANK:]
        latent = batch.kv_cache[..., :KV_LORA_RANK].unsqueeze(2)  # one KV head
        rope = batch.kv_cache[..., KV_LORA_RANK:].unsqueeze(2)
        cu_seqlens_q = batch.starts([batch.shape.q_len] * batch.shape.num_seqs)
        arguments = (
            (q_rope, rope, latent),
            (None, None),  # new keys and values to append
            (q_latent, None),  # qv, out
            (cu_seqlens_q, None, None),  # starts of queries; of keys and new keys, which are paged
            (None, batch.seq_lens),  # used queries, used keys
            (batch.shape.q_len, max(batch.shape.seq_lens), batch.block_table),
            (None, None),  # batch index, left padding
            (None, None, None),  # rotary cosines, sines, positions
            (None, None, None),  # scales of fp8 queries, keys, values
            (SOFTMAX_SCALE, True, -1, -1, 0.0),  # causal, no window, no soft cap
            (
                True,
                None,
                0,
                None,
                0,
            ),  # rotary interleaved, scheduler metadata, splits (0: its choice), pack_gqa, SM margin
            (None, 1, 0, None),  # sinks; context parallel: one rank
        )
        flat = [argument for group in arguments for argument in group]
        return lambda: decode(*flat)[0]
