"""What the Triton backend takes: its rows of the support table."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

import torch

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.rules import Answer, Rule, equal_shares, invariant_splits, most_splits
from pagedmla.contract.target import Target


def _importable(problem: DecodeProblem, target: Target) -> Answer | None:
    if _has_triton():
        return None
    return "import", "backend", "a machine with the triton package", "none is installed"


def _target(problem: DecodeProblem, target: Target) -> Answer | None:
    interpreted = "the CPU when TRITON_INTERPRET=1 was set before the first import"
    wanted = f"an NVIDIA GPU from sm_80 on, an AMD CDNA GPU (gfx9), or {interpreted}"
    if (target.vendor == "amd" and target.arch.startswith("gfx9")) or (
        target.vendor == "nvidia" and _compute_capability(target.arch) >= 80
    ):
        return None
    if target.vendor == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "target", "device", wanted, f"{target.vendor} {target.arch}"


def _compute_capability(arch: str) -> int:
    digits = arch.removeprefix("sm_")
    return int(digits) if digits.isdigit() else 0


_DTYPE_PAIRS = ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))


def _dtypes(problem: DecodeProblem, target: Target) -> Answer | None:
    got = f"{problem.q_dtype} with a {problem.kv_layout} cache"
    if (problem.q_dtype, problem.kv_layout) not in _DTYPE_PAIRS:
        return "dtype_pair", "kv_cache", "q and cache both bf16, or both fp16", got
    if target.vendor == "cpu" and problem.q_dtype == torch.bfloat16:
        return "dtype_pair", "kv_cache", "fp16 on the CPU: Triton's interpreter truncates to bf16", got
    return None


_MOST_LATENT, _MOST_ROPE = 512, 64
# the smallest tiles of any config, which targets without a row of their own run with: 16 rows and 16 tokens
_LEAST_TOKENS = 16


def _head_dims(problem: DecodeProblem, target: Target) -> Answer | None:
    rank, rope = problem.kv_lora_rank, problem.qk_rope_head_dim
    if rank <= _MOST_LATENT and rope <= _MOST_ROPE:
        return None
    limits = f"kv_lora_rank <= {_MOST_LATENT} and qk_rope_head_dim <= {_MOST_ROPE}"
    wanted = f"{limits}: accumulators live in registers"
    return "head_dim", "q", wanted, f"{rank} + {rope}"


def _shared_memory(problem: DecodeProblem, target: Target) -> Answer | None:
    if target.vendor == "cpu":
        return None
    # what Triton's compiler says of the smallest tiles, at most (tests/kernels/triton/test_offline.py): three blocks of 16
    # latent rows (queries, keys, and keys once more as values) and one of rotated keys, two bytes a number
    latent = padded(problem.kv_lora_rank)
    rope = padded(problem.qk_rope_head_dim) if problem.qk_rope_head_dim else 0
    needed = 2 * _LEAST_TOKENS * (3 * latent + rope)
    if needed <= target.shared_memory_bytes:
        return None
    wanted = (
        f"a device with {needed} bytes of shared memory a workgroup for {problem.head_dim_qk} numbers a token"
    )
    return "shared_memory", "device", wanted, f"{target.shared_memory_bytes} bytes on {target.arch}"


def padded(columns: int) -> int:
    """Numbers that a row of ``columns`` numbers takes in a kernel: a power of two, and 16, the matrix unit's step, at least."""
    return max(16, 1 << (columns - 1).bit_length())


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


RULES: tuple[Rule, ...] = (
    _importable,
    _target,
    _dtypes,
    _head_dims,
    _shared_memory,
    equal_shares,
    most_splits,
    invariant_splits,
)
