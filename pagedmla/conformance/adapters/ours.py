"""pagedmla's own decode, and any function with its signature."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import pagedmla
from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options, Prepared, PreparedCall
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec
from pagedmla.contract.errors import PagedMLAError
from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.support import BACKENDS, check_backend_name, choose_backend
from pagedmla.contract.target import Target

Decode = Callable[..., tuple[Tensor, Tensor]]

ALL_FEATURES = frozenset({"out", "graph", "strides", "q_pair", "invariant", "bounded", "validates"})

WITHOUT_NO_SYNC = (None, "torch")
"""Backends without "no_sync": torch's temporaries come from its allocator (docs/contract.md), and None may choose it."""


def problem_of(spec: BatchSpec, options: Options) -> DecodeProblem:
    """The static half of a call of ``spec``.

    Raises:
        PagedMLAError: there is no such problem.
    """
    return DecodeProblem(
        num_heads=spec.num_heads,
        softmax_scale=spec.softmax_scale,
        kv_lora_rank=spec.kv_lora_rank,
        qk_rope_head_dim=spec.qk_rope_head_dim,
        page_size=spec.page_size,
        q_dtype=spec.q_dtype,
        kv_layout=layout_of_dtype(spec.cache_dtype).name,
        max_q_len=max(1, *spec.query_counts) if spec.query_counts else 1,
        causal=spec.causal,
        **{name: value for name, value in options.items() if name != "backend"},  # type: ignore[arg-type]
    )


class Ours(Adapter):
    """``pagedmla.decode``: one backend of it, or the one that it chooses."""

    features = ALL_FEATURES
    options: tuple[Options, ...] = ({}, {"num_kv_splits": 3}, {"batch_invariant": True})

    def __init__(self, backend: str | None = None) -> None:
        check_backend_name(backend)
        self.backend = backend
        self.name = "pagedmla" if backend is None else f"pagedmla:{backend}"
        if backend is not None:
            self.features |= {"one_kernel"}
        if backend not in WITHOUT_NO_SYNC:
            self.features |= {"no_sync"}
        self.version = pagedmla.__version__

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        """What the support table says."""
        try:
            choose_backend(problem_of(spec, options), Target.detect(device), self.backend)
        except PagedMLAError as error:
            return str(error)
        return None

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        """The chosen backend says what it rounds weights to."""
        problem = problem_of(spec, options)
        chosen = choose_backend(problem, Target.detect(device), self.backend)
        return Conventions(p_dtype=BACKENDS[chosen].p_dtype(problem))

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        """Nothing is planned on the host: a later length needs no refresh.

        With out and lse given, a workspace is made here too, so that a run allocates nothing.
        """
        asked: dict[str, object] = {**options, "backend": self.backend}
        if out is not None and lse is not None:
            asked["workspace"] = workspace_for(call, options, self.backend)
        return prepare_decode(pagedmla.decode, call, asked, out, lse)

    def lines(self, options: Options) -> str:
        """The call itself."""
        extra = "".join(f", {name}={value!r}" for name, value in options.items())
        backend = "" if self.backend is None else f", backend={self.backend!r}"
        return (
            "import pagedmla\n"
            "out, lse = pagedmla.decode(\n"
            f"    call.q, call.kv_cache, call.block_table, call.seq_lens, **call.semantics(){backend}{extra}\n"
            ")"
        )


def workspace_for(call: Call, options: Options, backend: str | None) -> Tensor:
    """uint8: memory for the intermediates of ``call``, whatever its tensors hold later.

    Raises:
        PagedMLAError: the call is refused.
    """
    latent, rope = (call.q, None) if isinstance(call.q, Tensor) else call.q
    num_tokens, num_heads, width = latent.shape
    num_seqs, max_pages = call.block_table.shape
    # of ragged queries the host knows no more than that one sequence may have all of them
    even = call.cu_seqlens_q is None and num_seqs > 0
    problem = DecodeProblem(
        num_heads=num_heads,
        softmax_scale=call.softmax_scale,
        kv_lora_rank=call.kv_lora_rank,
        qk_rope_head_dim=width - call.kv_lora_rank if rope is None else rope.shape[2],
        page_size=call.page_size,
        q_dtype=latent.dtype,
        kv_layout=layout_of_dtype(call.kv_cache.dtype).name,
        max_q_len=max(1, num_tokens // num_seqs if even else num_tokens),
        causal=call.causal,
        **options,  # type: ignore[arg-type]
    )
    bounds = BatchBounds(max(1, num_seqs), max(1, max_pages), max(1, num_tokens))
    num_bytes = pagedmla.workspace_size(problem, bounds, latent.device, backend)
    return torch.empty(num_bytes, dtype=torch.uint8, device=latent.device)


def prepare_decode(
    decode: Decode, call: Call, options: Options, out: Tensor | None, lse: Tensor | None
) -> Prepared:
    """A call of a function with ``pagedmla.decode``'s signature."""
    arguments = {**call.semantics(), **options}
    if out is not None:
        arguments["out"] = out
    if lse is not None:
        arguments["lse"] = lse
    return PreparedCall(lambda: decode(call.q, call.kv_cache, call.block_table, call.seq_lens, **arguments))
