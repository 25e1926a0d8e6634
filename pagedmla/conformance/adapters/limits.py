"""What several implementations do not take, in words: each function gives the reason, or None."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedmla.conformance.spec import BatchSpec
from pagedmla.contract.target import Target

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def no_queries(spec: BatchSpec) -> str | None:
    """A batch without sequences, or without a query token: others launch grids of that size."""
    return None if sum(spec.query_counts) else "takes batches with a query token"


def uneven_queries(spec: BatchSpec) -> str | None:
    """Sequences that differ in query tokens, or rows of no sequence."""
    return "takes the same number of query tokens for every sequence" if spec.ragged else None


def rows_before(spec: BatchSpec) -> str | None:
    """Query rows of no sequence before the first: prefix sums begin at 0."""
    return "takes query starts that begin at 0" if spec.rows_before else None


def rows_of_nobody(spec: BatchSpec) -> str | None:
    """Query rows of no sequence, before or after the others."""
    return "takes query rows of its sequences alone" if spec.rows_before or spec.rows_after else None


def other_dims(spec: BatchSpec, taken: Sequence[tuple[int, int]]) -> str | None:
    """Head sizes (latent, rotated) that are not among ``taken``."""
    dims = (spec.kv_lora_rank, spec.qk_rope_head_dim)
    if dims in taken:
        return None
    words = " or ".join(f"{latent} + {rope}" for latent, rope in taken)
    return f"takes {words} numbers a token, not {dims[0]} + {dims[1]}"


def other_pages(spec: BatchSpec, taken: int) -> str | None:
    """Pages of another size than ``taken`` tokens."""
    return None if spec.page_size == taken else f"takes pages of {taken} tokens, not {spec.page_size}"


def other_dtypes(spec: BatchSpec, taken: Sequence[torch.dtype] = SIXTEEN_BITS) -> str | None:
    """Queries whose dtype is not among ``taken``, or a cache of another one."""
    words = " and ".join(str(dtype).removeprefix("torch.") for dtype in taken)
    if spec.q_dtype not in taken:
        return f"takes {words}, not {spec.q_dtype}"
    if spec.cache_dtype != spec.q_dtype:
        return f"takes a cache of the queries' dtype, not {spec.cache_dtype}"
    return None


def not_cuda(device: torch.device) -> str | None:
    """A device that is not CUDA's, ROCm's included."""
    return None if device.type == "cuda" else f"takes CUDA devices, not {device.type}"


def not_arch(device: torch.device, *taken: str) -> str | None:
    """A device of another architecture than those ``taken``."""
    arch = Target.detect(device).arch
    return None if arch in taken else f"takes {' and '.join(taken)}, not {arch}"
