"""Compiles the Gluon backend's kernels, plan and merge among them, for Hopper without having one."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from pagedmla.contract.target import Target
from pagedmla.kernels.gluon.few_heads.kernel import decode_few_heads
from pagedmla.kernels.gluon.layouts import TILE
from pagedmla.kernels.gluon.many_heads import decode_many_heads
from pagedmla.kernels.gluon.variants import descriptors
from pagedmla.kernels.split_kv import offline
from pagedmla.kernels.split_kv.resources import Resources
from pagedmla.kernels.split_kv.variants import Variant

KERNELS: dict[str, Any] = {
    "few_heads": decode_few_heads,
    "many_heads": decode_many_heads,
    **offline.PLAN_KERNELS,
}

MOST_SPILLED_BYTES = 384
"""Of a thread of a decode kernel.  Those that were measured keep up to 352 bytes in memory (many heads) and 168 (few), few of
which are touched in the loop over KV tiles; a compiler that spills much more has lost the accumulators."""


def compile_variant(variant: Variant, target: Target) -> tuple[Resources, Any]:
    """Compiles one variant; returns what it needs, and Triton's compiled kernel.

    Raises:
        RuntimeError: this process interprets kernels (TRITON_INTERPRET=1), so there is nothing to compile.
        Exception: whatever Triton's compiler raises.
    """
    kernel = KERNELS[variant.kernel]
    if variant.kernel in offline.PLAN_KERNELS:
        return offline.compile_source(offline.source_of(kernel, variant), variant, target)
    dtype = dict(variant.pointers)["out"]
    types = {
        name: f"tensordesc<{dtype}[{rows}, {columns}],{TILE!r}>"
        for name, (rows, columns) in descriptors(variant).items()
    }
    source = offline.source_of(kernel, variant, types, GluonASTSource)
    return offline.compile_source(source, variant, target)


def over_limit(needed: Resources, target: Target) -> str:
    """What of ``needed`` does not fit ``target`` or spills, with both numbers; empty where all fits."""
    if needed.spilled_bytes > MOST_SPILLED_BYTES:
        return f"{needed.spilled_bytes} bytes spilled a thread, and {MOST_SPILLED_BYTES} are allowed"
    return offline.over_limit(needed, target)
