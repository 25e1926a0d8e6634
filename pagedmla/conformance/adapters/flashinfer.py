"""FlashInfer's paged MLA wrapper, with its Hopper (fa3) or its older (fa2) kernel, and any module that has such a wrapper.

Conventions, read in flashinfer-python 0.6.8 (flashinfer/mla/_core.py, data/include/flashinfer/attention/mla.cuh and
mla_hopper.cuh):

- lse f32 [T, H], base 2 unless ``return_lse_base_on_e``: ``math::ptx_log2(d) + m``.
- fa2's lse is the logarithm of the sum of weights rounded to 16 bits: the tensor core sums the p that it multiplies values by
  (``mma::m16k16_rowsum_f16f16f32`` of the cast ``s_frag``), so that out is a mean by the very weights whose sum d is.  fa3 sums
  them in float32, before they are cast.
- Of rows that see no key nothing is promised (one has code for lengths of 0, and 0/0 where a causal mask hides a whole tile).
- 512 + 64 numbers a token, bf16 or fp16: what its documentation and its tests have; other sizes compile or not.  Its fp8 caches
  are recent, and left out.
- Any page size, ragged queries by qo_indptr, causal masks aligned at the bottom right.
- Partial results of cut keys are kept in 16 bits (``DTypeO* partial_o``), one rounding more than the bound here has room for in
  the worst case; in practice the roundings of the softmax weights, which it also allows for, are far from theirs.
- ``use_cuda_graph``: "the auxiliary data structures will be stored in provided buffers.  The batch_size cannot change": planned
  again, by ``plan``, what was captured stays right.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedmla.conformance.adapters import limits
from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.answers import answer, wants_lse
from pagedmla.conformance.adapters.layouts import query_starts
from pagedmla.conformance.adapters.modules import OUR_MODULES, our_p_dtype, our_refusal, refusing
from pagedmla.conformance.adapters.software import import_software, version_of
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec

_PACKAGE = "flashinfer"
_WRAPPER = "BatchMLAPagedAttentionWrapper"
_WORKSPACE_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
"""Its documentation asks for 128 MiB; twice that leaves room for many heads.  A CPU has no kernel of theirs."""


class FlashInfer(Adapter):
    """Separate latent and rope tensors, any page; base-2 lse."""

    conventions = Conventions(lse_base=2.0, empty_lse=math.nan, empty_out=math.nan)
    features = frozenset({"out", "graph"})

    def __init__(self, kernel: str = "auto", module: str = f"{_PACKAGE}.mla") -> None:
        """Args:
        kernel: what the wrapper calls its backend: "fa2", "fa3", or "auto".
        module: that has ``BatchMLAPagedAttentionWrapper``.
        """
        package = module.split(".")[0]
        self.name = f"flashinfer:{module}" if kernel == "auto" else f"flashinfer_{kernel}"
        self.version = ""
        self._kernel, self._module_name = kernel, module
        self._ours, self._theirs = package in OUR_MODULES, package == _PACKAGE
        self._wrapper: Any = None
        if self._theirs and kernel == "fa2":
            self.conventions = replace(self.conventions, lse_of_rounded_weights=True)

    def load(self, folder: Path | None = None) -> str | None:
        """Imports the module."""
        found = import_software(self._module_name, folder)
        if isinstance(found, str):
            return found
        self._wrapper = getattr(found, _WRAPPER, None)
        self.version = version_of(self._module_name)
        return None if self._wrapper is not None else f"{self._module_name} has no {_WRAPPER}"

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        """FlashInfer: 16 bits, 512 + 64; fa3 on sm_90 only.  Ours: what the support table says.  Others: what a wrapper cannot
        be asked."""
        cannot = limits.no_queries(spec) or limits.rows_of_nobody(spec)
        if cannot is not None:
            return cannot
        if self._ours:
            if spec.q_dtype.itemsize == 1:
                return "takes an fp8 cache, not fp8 queries"
            return our_refusal(spec, device)
        if not self._theirs:
            return limits.other_dtypes(spec, (*limits.SIXTEEN_BITS, torch.float32))
        hopper = limits.not_arch(device, "sm_90") if self._kernel == "fa3" else None
        return (
            hopper
            or limits.not_cuda(device)
            or limits.other_dims(spec, ((512, 64),))
            or limits.other_dtypes(spec)
        )

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        """Ours also says what a row without keys is."""
        conventions = self.conventions
        if self._ours:
            p_dtype = our_p_dtype(spec, device)
            conventions = replace(conventions, empty_lse=-math.inf, empty_out=0.0, p_dtype=p_dtype)
        return answer(conventions, spec, options)

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        """Its plan() works on the host and copies lengths there; it is made here, and again in ``refresh``.

        Args:
            options: ``return_lse=False``: no lse is asked for.
            call, out, lse: see ``Adapter``.
        """
        if self._wrapper is None:
            raise RuntimeError(f"{self.name} is not loaded")
        wrapper = self._wrapper(
            _workspace(call.q.device),
            use_cuda_graph=True,
            backend=self._kernel,
            **_plan_buffers(call),
        )
        q_latent, q_rope = call.q_latent.contiguous(), call.q_rope.contiguous()
        rows, rank = call.q.shape[:2], call.kv_lora_rank
        latent, rope = call.kv_cache[..., :rank], call.kv_cache[..., rank:]
        out = torch.empty_like(q_latent) if out is None else out
        keywords: dict[str, Any] = {"out": out}
        if wants_lse(options):
            lse = torch.empty(rows, dtype=torch.float32, device=call.q.device) if lse is None else lse
            keywords |= {"lse": lse, "return_lse": True}
        if call.kv_scale is not None:
            keywords |= {"ckv_scale": call.kv_scale, "kpe_scale": call.kv_scale}
        returned = (out, lse if wants_lse(options) else None)

        def plan() -> None:
            wrapper.plan(*_plan_arguments(call))

        def run() -> tuple[Tensor, Tensor | None]:
            wrapper.run(q_latent, q_rope, latent, rope, **keywords)
            return returned

        def refresh() -> None:
            # an engine's projections write both parts where the wrapper reads them
            q_latent.copy_(call.q_latent)
            q_rope.copy_(call.q_rope)
            plan()

        if self._theirs:
            plan()
            return PreparedCall(run, refresh)
        refusing(plan)()
        return PreparedCall(refusing(run), refresh)

    def lines(self, options: Options) -> str:
        """Plan and run."""
        return f"""\
from {self._module_name} import {_WRAPPER}
device, rank, lens = call.q.device, call.kv_lora_rank, call.seq_lens
count, pages = len(lens), (lens + call.page_size - 1) // call.page_size
starts, page_starts = call.cu_seqlens_q, torch.zeros(count + 1, dtype=torch.int32, device=device)
if starts is None:
    starts = torch.arange(count + 1, dtype=torch.int32, device=device) * (len(call.q) // count)
page_starts[1:] = pages.cumsum(0)
indices = torch.cat([row[:live] for row, live in zip(call.block_table, pages.tolist())])
workspace = torch.empty({_WORKSPACE_BYTES["cuda"]}, dtype=torch.int8, device=device)
wrapper = {_WRAPPER}(workspace, backend={self._kernel!r})
wrapper.plan(
    starts, page_starts, indices, lens, call.q.shape[1], rank, call.q.shape[2] - rank, call.page_size, call.causal,
    call.softmax_scale, call.q.dtype, call.kv_cache.dtype,
)
q_latent, q_rope = call.q[..., :rank].contiguous(), call.q[..., rank:].contiguous()
scales = {{}} if call.kv_scale is None else dict(ckv_scale=call.kv_scale, kpe_scale=call.kv_scale)
out, lse = wrapper.run(q_latent, q_rope, call.kv_cache[..., :rank], call.kv_cache[..., rank:], return_lse=True, **scales)
# lse is base 2"""


def _workspace(device: torch.device) -> Tensor:
    num_bytes = _WORKSPACE_BYTES.get(device.type, _WORKSPACE_BYTES["cuda"])
    return torch.empty(num_bytes, dtype=torch.int8, device=device)


def _plan_buffers(call: Call) -> dict[str, Tensor]:
    """What plan() writes, of fixed addresses; as many pages as the block table has cells for."""
    num_seqs = call.seq_lens.shape[0]
    sizes = {
        "qo_indptr": num_seqs + 1,
        "kv_indptr": num_seqs + 1,
        "kv_indices": max(1, call.block_table.numel()),
        "kv_len_arr": num_seqs,
    }
    device = call.seq_lens.device
    return {name: torch.empty(size, dtype=torch.int32, device=device) for name, size in sizes.items()}


def _plan_arguments(call: Call) -> tuple[object, ...]:
    """plan()'s, in its order."""
    page_starts, pages, _ = call.csr()
    return (
        query_starts(call),
        page_starts,
        pages,
        call.seq_lens,
        call.q.shape[1],
        call.kv_lora_rank,
        call.q.shape[2] - call.kv_lora_rank,
        call.page_size,
        call.causal,
        call.softmax_scale,
        call.q.dtype,
        call.kv_cache.dtype,
    )
