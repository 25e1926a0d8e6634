"""What a compilation is, few of many that hold every pair of what they differ in, and those of the plan and the merge.

A compilation is told apart by its constexpr arguments, its element types, its warps and stages, and whether addresses and
strides are multiples of 16, which decides how wide loads may be.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.target import Target
from pagedmla.kernels.policy import TileConfig, triton_merge_config
from pagedmla.kernels.split_kv.launch import (
    PLAN_WARPS,
    merge_constants,
    overlapped_launch,
    plan_constants,
)

TRITON_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""Triton's words for element types."""

_PLAN_POINTERS = dict.fromkeys(("segments", "shares", "row_pieces", "seq_lens", "cu_seqlens_q"), "i32")
_MERGE_POINTERS = {"partial_out": "fp32", "partial_lse": "fp32", "row_pieces": "i32", "lse": "fp32"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One compilation.

    Attributes:
        kernel: its name in its backend's ``offline.KERNELS``.
        constants: constexpr arguments.
        pointers: element type of each pointer argument, in Triton's words.
        options: of the launch: num_warps, num_stages, ...; the rest is the compiler's default, as in a launch.
        aligned: pointers and strides are multiples of 16 (bytes, numbers), as in packed tensors of the usual sizes.
        factors: what the combinations are made of; ``pairwise`` covers pairs of these.
    """

    kernel: str
    constants: tuple[tuple[str, Any], ...]
    pointers: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, int], ...]
    aligned: bool
    factors: tuple[Hashable, ...] = dataclasses.field(compare=False)

    def __str__(self) -> str:
        constants = " ".join(f"{name}={value}" for name, value in (*self.constants, *self.options))
        types = "/".join(sorted({kind for _, kind in self.pointers}))
        unaligned = "" if self.aligned else " unaligned"
        return f"{self.kernel} {constants} {types}{unaligned}"


def make_variant(
    kernel: str,
    constants: Mapping[str, Any],
    pointers: Mapping[str, str],
    options: Mapping[str, int],
    aligned: bool,
    factors: tuple[Hashable, ...],
) -> Variant:
    """A variant whose alignment is one of its factors."""
    return Variant(
        kernel,
        tuple(constants.items()),
        tuple(pointers.items()),
        tuple(options.items()),
        aligned,
        (*factors, aligned),
    )


def pairwise(whole: Iterable[Variant]) -> tuple[Variant, ...]:
    """Few of ``whole`` that hold, for each kernel, every pair of factor values that some variant of it holds.

    So each tile size meets each head dimension, each way to read pages, each mask, dtype, stride and alignment.
    """
    alike = {(variant.kernel, variant.factors): variant for variant in whole}
    chosen: list[Variant] = []
    for kernel in dict.fromkeys(kernel for kernel, _ in alike):
        left = [(variant, _pairs(variant)) for variant in alike.values() if variant.kernel == kernel]
        missing = set().union(*(pairs for _, pairs in left))
        while missing:
            best, covered = max(left, key=lambda item: len(item[1] & missing))
            chosen.append(best)
            missing -= covered
    return tuple(chosen)


def _pairs(variant: Variant) -> set[tuple[tuple[int, Hashable], ...]]:
    # a single factor is a pair with itself
    return set(itertools.combinations_with_replacement(enumerate(variant.factors), 2))


def divisor(number: int) -> str:
    """How a division by a constant is compiled: not at all, as a shift, or as a multiplication and more."""
    if number == 1:
        return "one"
    return "power of two" if number & (number - 1) == 0 else "other"


def plan_variants(config: TileConfig) -> Iterator[Variant]:
    """The planning kernels of a config."""
    for kernel, ragged, aligned in itertools.product(
        ("plan_persistent", "plan_split"), (False, True), (True, False)
    ):
        yield make_variant(
            kernel,
            plan_constants(config, ragged),
            _PLAN_POINTERS,
            {"num_warps": PLAN_WARPS},
            aligned,
            (ragged, config),
        )


def merge_variants(problem: DecodeProblem, config: TileConfig, target: Target) -> Iterator[Variant]:
    """The merge kernels that a decode of ``problem`` may launch."""
    dtype = TRITON_DTYPES[problem.q_dtype]
    # the policy looks at the number of rows on a scale of powers of two
    merges = dict.fromkeys(triton_merge_config(problem, target, 1 << power) for power in range(22))
    for merge, persistent, aligned in itertools.product(merges, (False, True), (True, False)):
        yield make_variant(
            "merge_partials",
            merge_constants(problem, config, merge, persistent),
            _MERGE_POINTERS | {"out": dtype},
            {"num_warps": merge.num_warps, **overlapped_launch(config)},
            aligned,
            (merge, persistent, config.block_m, problem.kv_lora_rank, dtype),
        )
