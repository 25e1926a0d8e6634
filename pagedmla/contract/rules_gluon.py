"""What the Gluon backend takes: its rows of the support table."""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata

import torch

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.rules import Answer, Rule
from pagedmla.contract.target import Target

_TRITON_VERSIONS = ("3.6",)
"""Versions of Triton that the kernels were run with: Gluon is experimental there, and its words change from one to the next."""

_DTYPE_PAIRS = ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))
_RANK, _ROPE = 512, 64
FEW_ROWS = 16
"""Rows (heads times query tokens) of a sequence up to which nothing runs but the kernel for few rows."""

# 226.3 KiB: what the compiler says of any variant, at most (tests/kernels/gluon/test_offline.py); of the 227 KiB of all Hoppers
_SHARED_BYTES = 231_764


def _importable(problem: DecodeProblem, target: Target) -> Answer | None:
    version = _triton_version()
    if ".".join(version.split(".")[:2]) in _TRITON_VERSIONS:
        return None
    wanted = f"a machine with triton {' or '.join(_TRITON_VERSIONS)}, which the kernels were run with"
    return "import", "backend", wanted, f"triton {version}" if version else "no triton"


@lru_cache(maxsize=1)
def _triton_version() -> str:
    """The installed version of Triton, read without importing it; empty where there is none."""
    for name in ("triton", "pytorch-triton"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _target(problem: DecodeProblem, target: Target) -> Answer | None:
    if (target.vendor, target.arch) == ("nvidia", "sm_90"):
        return None
    wanted = "an NVIDIA Hopper GPU (sm_90): no other has its warpgroup instructions"
    return "target", "device", wanted, f"{target.vendor} {target.arch}"


def _shared_memory(problem: DecodeProblem, target: Target) -> Answer | None:
    if target.vendor != "nvidia" or target.shared_memory_bytes >= _SHARED_BYTES:
        return None
    wanted = f"a device with {_SHARED_BYTES} bytes of shared memory a workgroup"
    return "shared_memory", "device", wanted, f"{target.shared_memory_bytes} bytes on {target.arch}"


def _dtypes(problem: DecodeProblem, target: Target) -> Answer | None:
    if (problem.q_dtype, problem.kv_layout) in _DTYPE_PAIRS:
        return None
    got = f"{problem.q_dtype} with a {problem.kv_layout} cache"
    return "dtype_pair", "kv_cache", "q and cache both bf16, or both fp16", got


def _head_dims(problem: DecodeProblem, target: Target) -> Answer | None:
    if (problem.kv_lora_rank, problem.qk_rope_head_dim) == (_RANK, _ROPE):
        return None
    wanted = f"kv_lora_rank {_RANK} and qk_rope_head_dim {_ROPE}"
    return "head_dim", "q", wanted, f"{problem.kv_lora_rank} + {problem.qk_rope_head_dim}"


def _splits(problem: DecodeProblem, target: Target) -> Answer | None:
    # a number of splits is refused whatever the schedule is called, 'persistent' too
    why = "this backend's kernels cut keys into equal shares"
    if problem.num_kv_splits is not None:
        return "num_kv_splits", "num_kv_splits", f"None: {why}", str(problem.num_kv_splits)
    if problem.schedule == "split":
        return "schedule", "schedule", f"None or 'persistent': {why}", "'split'"
    return None


def _batch_invariant(problem: DecodeProblem, target: Target) -> Answer | None:
    if not problem.batch_invariant:
        return None
    wanted = "False: equal shares depend on the whole batch"
    return "batch_invariant", "batch_invariant", wanted, "True"


RULES: tuple[Rule, ...] = (
    _importable,
    _target,
    _shared_memory,
    _dtypes,
    _head_dims,
    _splits,
    _batch_invariant,
)
