"""Compiles the Triton backend's kernels, plan and merge among them, for a target without having it."""

from __future__ import annotations

from typing import Any

from pagedmla.contract.target import Target
from pagedmla.kernels.split_kv.offline import PLAN_KERNELS, compile_source, over_limit, source_of
from pagedmla.kernels.split_kv.resources import Resources
from pagedmla.kernels.split_kv.variants import Variant
from pagedmla.kernels.triton.append import append_kernel
from pagedmla.kernels.triton.csr import compact_kernel, index_pages_kernel
from pagedmla.kernels.triton.decode import decode_kernel
from pagedmla.kernels.triton.merge_states import merge_states_kernel

__all__ = ["KERNELS", "compile_variant", "over_limit"]

KERNELS: dict[str, Any] = {
    "decode": decode_kernel,
    **PLAN_KERNELS,
    "append": append_kernel,
    "index_pages": index_pages_kernel,
    "compact": compact_kernel,
    "merge_states": merge_states_kernel,
}


def compile_variant(variant: Variant, target: Target) -> tuple[Resources, Any]:
    """Compiles one variant; returns what it needs, and Triton's compiled kernel.

    Raises:
        RuntimeError: this process interprets kernels (TRITON_INTERPRET=1), so there is nothing to compile.
        Exception: whatever Triton's compiler raises.
    """
    return compile_source(source_of(KERNELS[variant.kernel], variant), variant, target)
