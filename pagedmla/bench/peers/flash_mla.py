"""DeepSeek's FlashMLA, dense decode for Hopper, as vLLM's wheel builds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pagedmla.bench.batch import SOFTMAX_SCALE, DecodeBatch
from pagedmla.bench.peers.peer import find_software, load_library, needs_hopper
from pagedmla.bench.shapes import KV_LORA_RANK

_FILE = "_flashmla_C.abi3.so"


class FlashMLA:
    """Pages of 64 tokens, the same number of query tokens for every sequence; natural-log lse, +inf for an empty row."""

    name = "flash_mla"

    def __init__(self) -> None:
        self.version = ""

    def load(self, folder: Path | None) -> str | None:
        """Loads vLLM's ``_flashmla_C``."""
        found = find_software("vllm", (_FILE,), folder)
        if isinstance(found, str):
            return found
        reason = load_library(found.path)
        if reason is None and not hasattr(torch.ops._flashmla_C, "dense_decode_fwd"):
            reason = f"{found.version} has no dense_decode_fwd"
        self.version = found.version
        return reason

    def supports(self, batch: DecodeBatch) -> str | None:
        """sm_90, 16 bits, page 64."""
        if batch.page_size != 64:
            return f"takes pages of 64 tokens, not {batch.page_size}"
        return needs_hopper(batch)

    def prepare(self, batch: DecodeBatch) -> Callable[[], Tensor]:
        """The first call makes the tile schedule that later calls are given: an engine makes it once a step for all layers."""
        decode = torch.ops._flashmla_C.dense_decode_fwd
        cache = batch.kv_cache.unsqueeze(2)  # one KV head

        def call(tile_schedule: Tensor | None, num_splits: Tensor | None, out: Tensor | None) -> tuple:
            return decode(
                batch.q_by_sequence,
                cache,
                KV_LORA_RANK,
                batch.seq_lens,
                batch.block_table,
                SOFTMAX_SCALE,
                True,  # causal
                tile_schedule,
                num_splits,
                out,
            )

        first, _, tile_schedule, num_splits = call(None, None, None)
        # with several query tokens the operator takes no buffer in the shape that it returns: it makes one each time
        out = torch.empty_like(first) if batch.shape.q_len == 1 else None
        return lambda: call(tile_schedule, num_splits, out)[0].flatten(0, 1)
