"""FlashAttention 3 with its latent operand (qv), as vLLM's fork builds it for Hopper.

Conventions, read in vllm-project/flash-attention (hopper/flash_api.cpp, softmax.h, epilogue_fwd.hpp) and vLLM 0.21.0
(vllm_flash_attn/flash_attn_interface.py, v1/attention/backends/mla/flashattn_mla.py):

- qv: "q_v is only supported for head_size <= 64", "for fp16 and bf16", "for Hopper GPUs", with values of 256 or more; the tests
  of hopper/test_flash_attn.py have it for 64 rotated numbers with 256 or 512 latent ones.
- Any page size (its tests: 1, 4, 128); ragged queries by cu_seqlens_q; causal masks aligned at the bottom right.
- softmax_lse f32 [H, T] with cu_seqlens_q; natural: ``row_max * (softmax_scale_log2 * M_LN2) + __logf(sum)``.
- "If the row of the mask is all zero, the output will be zero" (flash_attn_varlen_func).  Of its lse nothing is promised:
  the kernel writes -inf, and who merges in vLLM takes +inf too (v1/attention/ops/triton_merge_attn_states.py).
- max_seqlen_k left out is pages times their size (flash_api.cpp); the same is given here, so that it holds for later lengths.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from pagedmla.conformance.adapters import limits
from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.answers import answer, wants_lse
from pagedmla.conformance.adapters.layouts import query_starts
from pagedmla.conformance.adapters.software import find_software, load_library
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec

_FILE = "_vllm_fa3_C.abi3.so"


class FlashAttention3(Adapter):
    """Rope as the key, latent as the value and as a second key; natural-log lse."""

    name = "fa3"
    conventions = Conventions(empty_lse=math.nan)
    # "graph": vLLM captures it (UNIFORM_BATCH); the operation shares its work out on the device in every call
    features = frozenset({"graph"})

    def __init__(self) -> None:
        self.version = ""
        self._path = Path(_FILE)

    def load(self, folder: Path | None = None) -> str | None:
        """Loads vLLM's ``_vllm_fa3_C``."""
        found = find_software("vllm", (f"vllm_flash_attn/{_FILE}",), folder)
        if isinstance(found, str):
            return found
        reason = load_library(found.path)
        if reason is None and not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            reason = f"{found.version} has no fwd"
        self.version, self._path = found.version, found.path
        return reason

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        """sm_90, 16 bits; any page, ragged queries."""
        return (
            limits.no_queries(spec)
            or limits.rows_before(spec)
            or limits.other_dims(spec, ((512, 64), (256, 64)))
            or limits.not_arch(device, "sm_90")
            or limits.not_cuda(device)
            or limits.other_dtypes(spec)
        )

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        """Silent about rows of no sequence."""
        return answer(self.conventions, spec, options)

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        """Split counts are left to its own heuristic; it has no metadata to make beforehand unless asked.

        Args:
            options: ``return_lse=False``: its lse is not looked at.
            call, out, lse: see ``Adapter``.
        """
        decode = torch.ops._vllm_fa3_C.fwd
        latent = call.kv_cache[..., : call.kv_lora_rank].unsqueeze(2)  # one KV head
        rope = call.kv_cache[..., call.kv_lora_rank :].unsqueeze(2)
        most_queries = max(1, *call.spec.query_counts)
        arguments = (
            (call.q_rope, rope, latent),
            (None, None),  # new keys and values to append
            (call.q_latent, None),  # qv, out
            (query_starts(call), None, None),  # starts of queries; of keys and new keys, which are paged
            (None, call.seq_lens),  # used queries, used keys
            (most_queries, call.block_table.shape[1] * call.page_size, call.block_table),
            (None, None),  # batch index, left padding
            (None, None, None),  # rotary cosines, sines, positions
            (None, None, None),  # scales of fp8 queries, keys, values
            (call.softmax_scale, call.causal, -1, -1, 0.0),  # no window, no soft cap
            (True, None),  # rotary interleaved, scheduler metadata
            (0, None, 0),  # splits (0: its choice), pack_gqa, SM margin
            (None, 1, 0, None),  # sinks; context parallel: one rank
        )
        flat = [argument for group in arguments for argument in group]
        with_lse = wants_lse(options)

        def run() -> tuple[Tensor, Tensor | None]:
            found, found_lse, *_ = decode(*flat)
            return found, found_lse.t() if with_lse else None

        return PreparedCall(run)

    def lines(self, options: Options) -> str:
        """The operation itself."""
        return f"""\
torch.ops.load_library({str(self._path)!r})  # of vLLM's wheel
rank, starts = call.kv_lora_rank, call.cu_seqlens_q
if starts is None:
    count = len(call.seq_lens)
    starts = torch.arange(count + 1, dtype=torch.int32, device=call.q.device) * (len(call.q) // count)
latent, rope = call.kv_cache[..., :rank].unsqueeze(2), call.kv_cache[..., rank:].unsqueeze(2)
out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
    call.q[..., rank:], rope, latent, None, None, call.q[..., :rank], None, starts, None, None, None, call.seq_lens,
    int(starts.diff().max()), call.block_table.shape[1] * call.page_size, call.block_table, None, None, None, None, None,
    None, None, None, call.softmax_scale, call.causal, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
)
lse = lse.t()"""
