"""vLLM's Triton decode (its TRITON_MLA backend), out of an installed vLLM or as its one file alone.

Conventions, read in vLLM 0.21.0, v1/attention/ops/triton_decode_attention.py, and who calls it, v1/attention/backends/mla/
triton_mla.py:

- lse is ``e_max + tl.log(e_sum)`` (``_fwd_kernel_stage2``): natural, stored in whatever dtype the given tensor has.  The
  backend hands one of q's dtype; here it is float32, so that the kernel itself is examined and not that choice.
- Nothing is promised for a sequence of length 0: the kernel divides 0 by 0.
- ``p.to(v.dtype)`` before the values: softmax weights are rounded to the dtype of the cache, which is q's.
- "It supports page size >= 1" (the file's docstring); one query token a sequence, since there is no mask among queries.
- One head alone takes a path of its own (``decode_attention_fwd_normal``), whose products of query and key are made in 16 bits;
  nothing says that less is asked of it, and it is held to the same bound.
- k_scale dequantises an fp8 cache to q's dtype before the product, which no error bound here has: fp8 caches are left out.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pagedmla.conformance.adapters import limits
from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.software import PEER_ERRORS, Software, find_software, first_line
from pagedmla.conformance.adapters.vllm_lone_file import run_lone_file
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec
from pagedmla.contract.target import Target

_FILES = (
    "v1/attention/ops/triton_decode_attention.py",
    "attention/ops/triton_decode_attention.py",  # older versions
    "vllm_triton_decode.py",  # as one saves it beside other files
)
_DIMS = tuple((latent, rope) for latent in (256, 512) for rope in (0, 32, 64))
"""Its tiles are powers of two of the latent and of the rest; these are models' (``_decode_grouped_att_m_fwd`` names two)."""
_TOKENS_PER_SPLIT = 512
"""vLLM 0.21: one split for so many tokens of the longest sequence, rounded up to a power of two."""


class VLLMTriton(Adapter):
    """One query token a sequence; one number of splits for all sequences; a merge kernel after."""

    name = "vllm_triton"
    conventions = Conventions(empty_lse=float("nan"), empty_out=float("nan"))
    # "graph": the backend is captured; lengths and pages are read on the device, and any number of splits is right for them
    features = frozenset({"out", "graph", "no_sync"})
    options: tuple[Options, ...] = ({}, {"num_kv_splits": 3})

    def __init__(self) -> None:
        self.version = ""
        self._decode: Callable[..., Any] | None = None

    def load(self, folder: Path | None = None) -> str | None:
        """Imports the module from vLLM, or runs the lone file with stand-ins for the two vLLM modules that it names."""
        found = find_software("vllm", _FILES, folder)
        if isinstance(found, str):
            return found
        try:
            module = _import_installed(found) if found.installed else run_lone_file(found.path)
            self._decode = module.decode_attention_fwd
        except PEER_ERRORS as error:
            return f"{found.path.name} of {found.version} does not load: {first_line(error)}"
        self.version = found.version
        return None

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        """16 bits, one query token."""
        if spec.ragged or set(spec.query_counts) != {1}:
            return "takes one query token a sequence, and no other rows"
        return limits.other_dims(spec, _DIMS) or limits.not_cuda(device) or limits.other_dtypes(spec)

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        """Buffers as vLLM makes them, but for lse, which is float32; f32 partial results.

        Args:
            options: ``num_kv_splits``, splits of every sequence; left out: vLLM's own rule.
            call, out, lse: see ``Adapter``; lse of any dtype.
        """
        if self._decode is None:
            raise RuntimeError("vllm_triton is not loaded")
        decode, device, rank = self._decode, call.q.device, call.kv_lora_rank
        num_splits: Any = options.get("num_kv_splits")
        num_splits = _num_splits(call.spec, device) if num_splits is None else num_splits
        rows = call.q.shape[:2]
        out = torch.empty(*rows, rank, dtype=call.q.dtype, device=device) if out is None else out
        lse = torch.empty(rows, dtype=torch.float32, device=device) if lse is None else lse
        partial = torch.empty(*rows, num_splits, rank + 1, dtype=torch.float32, device=device)
        cache = call.kv_cache.unsqueeze(2)  # one KV head
        arguments = (
            call.q,
            cache,
            cache[..., :rank],
            out,
            lse,
            call.block_table,
            call.seq_lens,
            partial,
            num_splits,
            call.softmax_scale,
            call.page_size,
        )
        newer = _newer_arguments(decode, device)

        def run() -> tuple[Tensor, Tensor]:
            decode(*arguments, **newer)
            return out, lse

        return PreparedCall(run)

    def lines(self, options: Options) -> str:
        """As vLLM's backend calls it."""
        return f"""\
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
# without vLLM: the file alone, with modules vllm.platforms and vllm.triton_utils that hold what it imports
batch, heads, _ = call.q.shape
rank, splits, cache = call.kv_lora_rank, {options.get("num_kv_splits", 1)}, call.kv_cache.unsqueeze(2)
out = torch.empty(batch, heads, rank, dtype=call.q.dtype, device=call.q.device)
lse = torch.empty(batch, heads, device=call.q.device)
partial = torch.empty(batch, heads, splits, rank + 1, device=call.q.device)
one = torch.ones((), device=call.q.device)
decode_attention_fwd(
    call.q, cache, cache[..., :rank], out, lse, call.block_table, call.seq_lens, partial, splits, call.softmax_scale,
    call.page_size, k_scale=one, v_scale=one, is_mla=True,
)"""


def _num_splits(spec: BatchSpec, device: torch.device) -> int:
    """vLLM 0.21's rule, for the longest sequence."""
    wanted = max(1, max(spec.seq_lens) // _TOKENS_PER_SPLIT)
    return min(1 << (wanted - 1).bit_length(), 2 * Target.detect(device).compute_units)


def _newer_arguments(decode: Callable[..., Any], device: torch.device) -> dict[str, object]:
    """What newer versions take besides: is_mla, which reads a latent once, and scales, which they else make at each call.

    Where there is no v_scale, a k_scale would turn the fp8 path on, so none is given.
    """
    takes = inspect.signature(decode).parameters
    found: dict[str, object] = {"is_mla": True} if "is_mla" in takes else {}
    if "v_scale" in takes:
        one = torch.ones((), dtype=torch.float32, device=device)
        found |= {"k_scale": one, "v_scale": one}
    return found


def _import_installed(found: Software) -> ModuleType:
    parts = found.path.with_suffix("").parts
    return importlib.import_module(".".join(parts[len(parts) - 1 - parts[::-1].index("vllm") :]))
