"""Compiles kernels for a target without having it, and reads what they need of it.

What a target refuses (shared memory, registers spilled to memory) shows here, on any machine with the triton package: nothing
is launched.  A kernel that compiles is compiled, not tested.
"""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from pagedmla.contract.target import Target
from pagedmla.kernels.triton.append import append_kernel
from pagedmla.kernels.triton.csr import compact_kernel, index_pages_kernel
from pagedmla.kernels.triton.decode import decode_kernel
from pagedmla.kernels.triton.interpreted import INTERPRETED
from pagedmla.kernels.triton.merge import merge_partials_kernel
from pagedmla.kernels.triton.merge_states import merge_states_kernel
from pagedmla.kernels.triton.resources import Resources, resources_of
from pagedmla.kernels.triton.schedule import plan_persistent_kernel, plan_split_kernel
from pagedmla.kernels.triton.variants import Variant

KERNELS: dict[str, Any] = {
    "decode": decode_kernel,
    "merge_partials": merge_partials_kernel,
    "plan_persistent": plan_persistent_kernel,
    "plan_split": plan_split_kernel,
    "append": append_kernel,
    "index_pages": index_pages_kernel,
    "compact": compact_kernel,
    "merge_states": merge_states_kernel,
}
_ALIGNED = [["tt.divisibility", 16]]
# columns of a Blackwell multiprocessor's tensor memory (PTX ISA, tcgen05.alloc)
_TENSOR_MEMORY_COLUMNS = 512


def gpu_target(target: Target) -> GPUTarget:
    """Triton's name for ``target``; a wavefront of AMD's CDNA has 64 lanes, a warp of NVIDIA's 32."""
    if target.vendor == "nvidia":
        return GPUTarget("cuda", int(target.arch.removeprefix("sm_")), 32)
    return GPUTarget("hip", target.arch, 64)


def compile_variant(variant: Variant, target: Target) -> tuple[Resources, Any]:
    """Compiles one variant; returns what it needs, and Triton's compiled kernel.

    Raises:
        RuntimeError: this process interprets kernels (TRITON_INTERPRET=1), so there is nothing to compile.
        Exception: whatever Triton's compiler raises.
    """
    if INTERPRETED:
        raise RuntimeError("kernels are interpreted in this process: TRITON_INTERPRET must not be 1")
    compiled = compile(_source(variant), target=gpu_target(target), options=dict(variant.options))
    return resources_of(compiled), compiled


def _source(variant: Variant) -> ASTSource:
    """The kernel with the types that a launch would find, specialised as a launch would."""
    kernel, constants, pointers = KERNELS[variant.kernel], dict(variant.constants), dict(variant.pointers)
    signature, attributes = {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in pointers:
            signature[name] = "*" + pointers[name]
        else:
            signature[name] = parameter.annotation_type or ("fp32" if name == "scale_log2" else "i32")
        if variant.aligned and not parameter.do_not_specialize and signature[name] != "fp32":
            attributes[(place,)] = _ALIGNED
    return ASTSource(kernel, signature, constexprs=constants, attrs=attributes)


def over_limit(needed: Resources, target: Target) -> str:
    """What of ``needed`` does not fit ``target``, with both numbers; empty where all fits."""
    if needed.shared_bytes > target.shared_memory_bytes:
        return f"{needed.shared_bytes} bytes of shared memory, and {target.arch} has {target.shared_memory_bytes}"
    if needed.tensor_memory_columns > _TENSOR_MEMORY_COLUMNS:
        return f"{needed.tensor_memory_columns} columns of tensor memory, and {target.arch} has {_TENSOR_MEMORY_COLUMNS}"
    return ""
