"""The tensors of a decode call in one order, for code that takes them by number."""

from __future__ import annotations

from torch import Tensor

from pagedmla.contract.arguments import DecodeArguments

SLOTS = (
    "q", "q_pe", "kv_cache", "out", "lse",
    "block_table", "seq_lens", "cu_seqlens_q", "q_scale", "kv_scale", "workspace",
)  # fmt: skip
"""Those that a plan keeps from step to step come last."""

OUT, LSE, WORKSPACE = (SLOTS.index(name) for name in ("out", "lse", "workspace"))

ALIGNMENT = 16
"""Bytes: a kernel is compiled for addresses that are multiples of it, or for any."""


def tensors_of(
    args: DecodeArguments, out: Tensor, lse: Tensor, workspace: Tensor | None = None
) -> list[Tensor | None]:
    """A call's tensors in the order of ``SLOTS``; ``workspace``: what served as one, where the call had none."""
    own = {"out": out, "lse": lse, "workspace": args.workspace if workspace is None else workspace}
    tensors = [own[name] if name in own else getattr(args, name) for name in SLOTS]
    # a scale may be a number
    return [tensor if isinstance(tensor, Tensor) else None for tensor in tensors]
