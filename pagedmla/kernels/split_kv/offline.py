"""Compiles kernels for a target without having it, and reads what they need of it.

What a target refuses (shared memory, registers spilled to memory) shows here, on any machine with the triton package: nothing
is launched.  A kernel that compiles is compiled, not tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pagedmla.contract.target import Target
from pagedmla.kernels.split_kv.interpreted import INTERPRETED
from pagedmla.kernels.split_kv.merge import merge_partials_kernel
from pagedmla.kernels.split_kv.resources import Resources, resources_of
from pagedmla.kernels.split_kv.schedule import plan_persistent_kernel, plan_split_kernel
from pagedmla.kernels.split_kv.variants import Variant

PLAN_KERNELS: dict[str, Any] = {
    "merge_partials": merge_partials_kernel,
    "plan_persistent": plan_persistent_kernel,
    "plan_split": plan_split_kernel,
}
"""The kernels around any backend's own, by name."""

_ALIGNED = [["tt.divisibility", 16]]
# columns of a Blackwell multiprocessor's tensor memory (PTX ISA, tcgen05.alloc)
_TENSOR_MEMORY_COLUMNS = 512


def gpu_target(target: Target) -> GPUTarget:
    """Triton's name for ``target``; a wavefront of AMD's CDNA has 64 lanes, a warp of NVIDIA's 32."""
    if target.vendor == "nvidia":
        return GPUTarget("cuda", int(target.arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", target.arch, 64)


def compile_source(source: ASTSource, variant: Variant, target: Target) -> tuple[Resources, Any]:
    """Compiles one variant; returns what it needs, and Triton's compiled kernel.

    Raises:
        RuntimeError: this process interprets kernels (TRITON_INTERPRET=1), so there is nothing to compile.
        Exception: whatever Triton's compiler raises.
    """
    if INTERPRETED:
        raise RuntimeError("kernels are interpreted in this process: TRITON_INTERPRET must not be 1")
    compiled = compile(source, target=gpu_target(target), options=dict(variant.options))
    return resources_of(compiled), compiled


def source_of(
    kernel: Any,
    variant: Variant,
    types: Mapping[str, str] | None = None,
    kind: type[ASTSource] = ASTSource,
) -> ASTSource:
    """The kernel with the types that a launch would find, specialised as a launch would.

    Args:
        kernel: a kernel of Triton's.
        variant: its compile-time arguments.
        types: the compiler's words for arguments that are neither pointers nor numbers.
        kind: what the kernel's language makes of it.
    """
    constants, pointers, others = dict(variant.constants), dict(variant.pointers), types or {}
    signature, attributes = {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in others:
            signature[name] = others[name]
            continue
        if name in pointers:
            signature[name] = "*" + pointers[name]
        else:
            signature[name] = parameter.annotation_type or ("fp32" if name == "scale_log2" else "i32")
        if variant.aligned and not parameter.do_not_specialize and signature[name] != "fp32":
            attributes[(place,)] = _ALIGNED
    return kind(kernel, signature, constexprs=constants, attrs=attributes)


def over_limit(needed: Resources, target: Target) -> str:
    """What of ``needed`` does not fit ``target``, with both numbers; empty where all fits."""
    if needed.shared_bytes > target.shared_memory_bytes:
        return f"{needed.shared_bytes} bytes of shared memory, and {target.arch} has {target.shared_memory_bytes}"
    if needed.tensor_memory_columns > _TENSOR_MEMORY_COLUMNS:
        return f"{needed.tensor_memory_columns} columns of tensor memory, and {target.arch} has {_TENSOR_MEMORY_COLUMNS}"
    return ""
