"""Compiles the Gluon backend's kernels for Hopper without having one."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon._runtime import GluonASTSource

from pagedmla.contract.target import Target
from pagedmla.kernels.gluon.few_heads.kernel import decode_few_heads
from pagedmla.kernels.gluon.layouts import TILE
from pagedmla.kernels.gluon.many_heads.kernel import decode_many_heads
from pagedmla.kernels.gluon.variants import ALIGNED, descriptors
from pagedmla.kernels.split_kv import offline
from pagedmla.kernels.split_kv.resources import Resources
from pagedmla.kernels.split_kv.variants import Variant

KERNELS: dict[str, Any] = {
    "few_heads": decode_few_heads,
    "many_heads": decode_many_heads,
}

MOST_SPILLED_BYTES = 544
"""Of a thread of a decode kernel.  Of the variants that were compiled, those for many heads keep up to 280 bytes in memory, and
up to 528 where strides of ``out`` are no multiples of 16, so that each number is stored by itself; those for few heads up to
144.  Few of them are touched in the loop over KV tiles; a compiler that spills much more has lost the accumulators there."""


def compile_variant(variant: Variant, target: Target) -> tuple[Resources, Any]:
    """Compiles one variant; returns what it needs, and Triton's compiled kernel.

    Raises:
        RuntimeError: this process interprets kernels (TRITON_INTERPRET=1), so there is nothing to compile.
        Exception: whatever Triton's compiler raises.
    """
    kernel = KERNELS[variant.kernel]
    dtype = dict(variant.pointers)["out"]
    types = {
        name: f"tensordesc<{dtype}[{rows}, {columns}],{TILE!r}>"
        for name, (rows, columns) in descriptors(variant).items()
    }
    source = offline.source_of(kernel, variant, types, GluonASTSource)
    for name in set(ALIGNED) & set(kernel.arg_names):
        # as Triton says it of what a launch finds to be a multiple of 16
        source.attrs[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    return offline.compile_source(source, variant, target)


def over_limit(needed: Resources, target: Target) -> str:
    """What of ``needed`` does not fit ``target`` or spills, with both numbers; empty where all fits."""
    if needed.spilled_bytes > MOST_SPILLED_BYTES:
        return f"{needed.spilled_bytes} bytes spilled a thread, and {MOST_SPILLED_BYTES} are allowed"
    return offline.over_limit(needed, target)
