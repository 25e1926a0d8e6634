"""The adapter of the plain kernel and of everything that is made from it."""

from __future__ import annotations

import torch
from conformance.mutants.kernel import Kernel
from conformance.mutants.plan_step import Arguments
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options, Prepared
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec


class KernelAdapter(Adapter):
    """A kernel class, and what the unbroken one promises: a mutant makes the same claims."""

    conventions = Conventions(p_dtype=torch.float32)
    features = frozenset(
        {"out", "graph", "strides", "one_kernel", "q_pair", "invariant", "bounded", "validates"}
    )
    options: tuple[Options, ...] = ({}, {"num_kv_splits": 3}, {"batch_invariant": True})

    def __init__(self, kernel: type[Kernel] = Kernel) -> None:
        self.kernel = kernel
        self.name = kernel.__name__

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        """What the unbroken kernel refuses."""
        if device.type != "cpu":
            return "a model of a kernel, for the CPU"
        dims = spec.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
        return Kernel.refusal(*dims, spec.q_dtype, spec.cache_dtype) or Kernel.bad_options(options)

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        """Plans; ``call.q`` may be a pair."""
        q_latent, q_rope = call.q if isinstance(call.q, tuple) else (call.q_latent, call.q_rope)
        arguments = Arguments(
            q_latent, q_rope, call.kv_cache, call.block_table, call.seq_lens, call.cu_seqlens_q,
            call.kv_lora_rank, call.softmax_scale, call.causal, call.kv_scale,
        )  # fmt: skip
        return self.kernel(arguments, options, out, lse)
