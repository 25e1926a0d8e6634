"""DeepSeek's FlashMLA, dense decode for Hopper, as vLLM's wheel builds it.

Conventions, read in FlashMLA (deepseek-ai/FlashMLA, csrc/api/dense_decode.h, flash_mla/flash_mla_interface.py) and in vLLM's
fork of it (vllm-project/FlashMLA, the same files; vLLM 0.21.0's third_party/flashmla):

- sm_90a, bf16 or fp16 with a cache of the same dtype, pages of 64 tokens; any number of query heads over one KV head;
  "head_dim should be 576 while head_dim_v should be 512" (512 + 0 passes its checks and is not documented).
- q [B, s_q, H, 576]: one number of query tokens for the whole batch.
- lse f32 [B, H, s_q], natural: "softmax_lse: (batch_size, num_heads_q, seq_len_q)".
- A row that sees no key: out 0, lse +inf, held by its own tests (tests/test_flash_mla_dense_decoding.py: ``lonely_q_mask``).
- "You may reuse the same sched_meta ... only when the tensor shapes and the values of cache_seqlens ... remain the same": the
  schedule is made anew in ``refresh``.

Its fp8 variants have another interface and are left out.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from pagedmla.conformance.adapters import limits
from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.answers import answer, wants_lse
from pagedmla.conformance.adapters.layouts import by_sequence
from pagedmla.conformance.adapters.software import find_software, load_library
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec

_FILE = "_flashmla_C.abi3.so"

CONVENTIONS = Conventions(empty_lse=math.inf)
"""FlashMLA's."""


def flash_mla_refuses(spec: BatchSpec, device: torch.device) -> str | None:
    """What no build of DeepSeek's dense decode takes."""
    return (
        limits.no_queries(spec)
        or limits.uneven_queries(spec)
        or limits.other_pages(spec, 64)
        or limits.other_dims(spec, ((512, 64),))
        or limits.not_arch(device, "sm_90")
        or limits.not_cuda(device)
        or limits.other_dtypes(spec)
    )


def by_token(lse: Tensor) -> Tensor:
    """FlashMLA's lse [B, H, s_q] as [T, H]."""
    return lse.transpose(1, 2).flatten(0, 1)


class FlashMLA(Adapter):
    """Pages of 64 tokens, the same number of query tokens for every sequence; natural-log lse, +inf for an empty row."""

    name = "flash_mla"
    conventions = CONVENTIONS
    features = frozenset({"graph"})

    def __init__(self) -> None:
        self.version = ""
        self._path = Path(_FILE)

    def load(self, folder: Path | None = None) -> str | None:
        """Loads vLLM's ``_flashmla_C``."""
        found = find_software("vllm", (_FILE,), folder)
        if isinstance(found, str):
            return found
        reason = load_library(found.path)
        if reason is None and not hasattr(torch.ops._flashmla_C, "dense_decode_fwd"):
            reason = f"{found.version} has no dense_decode_fwd"
        self.version, self._path = found.version, found.path
        return reason

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        """sm_90, 16 bits, page 64, an even batch."""
        return flash_mla_refuses(spec, device)

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        """Without lse where it is not looked at."""
        return answer(self.conventions, spec, options)

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        """The first call makes the tile schedule that later calls are given: an engine makes it once a step for all layers.

        Args:
            options: ``return_lse=False``: its lse is not looked at.
            call, out, lse: see ``Adapter``.
        """
        decode = torch.ops._flashmla_C.dense_decode_fwd
        cache = call.kv_cache.unsqueeze(2)  # one KV head
        q = by_sequence(call)
        with_lse = wants_lse(options)

        def step(tile_schedule: Tensor | None, num_splits: Tensor | None, out: Tensor | None) -> tuple:
            return decode(
                q,
                cache,
                call.kv_lora_rank,
                call.seq_lens,
                call.block_table,
                call.softmax_scale,
                call.causal,
                tile_schedule,
                num_splits,
                out,
            )

        first, _, tile_schedule, num_splits = step(None, None, None)
        # with several query tokens the operator takes no buffer in the shape that it returns: it makes one each time
        buffer = torch.empty_like(first) if q.shape[1] == 1 else None

        def run() -> tuple[Tensor, Tensor | None]:
            found, found_lse, *_ = step(tile_schedule, num_splits, buffer)
            return found.flatten(0, 1), by_token(found_lse) if with_lse else None

        def refresh() -> None:
            *_, newer_schedule, newer_splits = step(None, None, None)
            tile_schedule.copy_(newer_schedule)
            num_splits.copy_(newer_splits)

        return PreparedCall(run, refresh)

    def lines(self, options: Options) -> str:
        """The operation itself."""
        return f"""\
torch.ops.load_library({str(self._path)!r})  # of vLLM's wheel
q = call.q.unflatten(0, (len(call.seq_lens), -1))
out, lse, *_ = torch.ops._flashmla_C.dense_decode_fwd(
    q, call.kv_cache.unsqueeze(2), call.kv_lora_rank, call.seq_lens, call.block_table, call.softmax_scale, call.causal,
    None, None, None,  # tile schedule and splits: made anew; out
)
out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)"""
