"""Which compilations of the Gluon backend the support table asks for: its decode kernels, plan and merge in its tiles."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.rules_gluon import FEW_ROWS
from pagedmla.contract.support import AXES, refusals
from pagedmla.contract.target import Target
from pagedmla.kernels.gluon.choice import possible_rows
from pagedmla.kernels.gluon.few_heads import launch as few_heads
from pagedmla.kernels.gluon.launch import decode_constants
from pagedmla.kernels.gluon.tensors import BLOCK_ROWS
from pagedmla.kernels.policy import GLUON_DECODE_CONFIG, GLUON_FEW_HEADS_CONFIG
from pagedmla.kernels.split_kv.variants import (
    TRITON_DTYPES,
    Variant,
    divisor,
    make_variant,
    merge_variants,
    pairwise,
    plan_variants,
)

_POINTERS = {
    "many_heads": {
        **dict.fromkeys(("shares", "segments", "block_table", "seq_lens", "cu_seqlens_q"), "i32"),
        **dict.fromkeys(("lse", "partial_out", "partial_lse"), "fp32"),
    },
    "few_heads": {
        **dict.fromkeys(("block_table", "seq_lens", "cu_seqlens_q"), "i32"),
        **dict.fromkeys(("lse", "partial_out", "partial_lse"), "fp32"),
        "flags": "i64",
    },
}


def descriptors(variant: Variant) -> dict[str, tuple[int, int]]:
    """A decode variant's arguments that are descriptors of the element type of ``out``: rows and columns of what is copied with
    each at once.
    """
    if variant.kernel == "many_heads":
        columns = {"q_desc": 256, "q_rope_desc": 64, "latent_desc": 256, "rope_desc": 64}
        return {name: (BLOCK_ROWS, count) for name, count in columns.items()}
    rows = dict(variant.constants)["ROWS"]
    return {
        "q_desc": (rows, 512),
        "q_rope_desc": (rows, 64),
        "latent_desc": (BLOCK_ROWS, 512),
        "rope_desc": (BLOCK_ROWS, 64),
    }


def all_variants(target: Target) -> tuple[Variant, ...]:
    """Every distinct compilation that accepted calls on ``target`` may ask for, over all sampled values of the table."""
    return _distinct(target, _samples("num_heads"), _samples("page_size"))


def representative_variants(target: Target) -> tuple[Variant, ...]:
    """A small part of ``all_variants`` that holds every pair of what they differ in.

    Numbers of heads and page sizes count by the code that they choose: a division is a shift, or a multiplication and more.
    """
    return pairwise(_distinct(target, (1, 12, 16, 20, 32, 128), (64, 192)))


def _distinct(target: Target, heads: Iterable[int], pages: Iterable[int]) -> tuple[Variant, ...]:
    found: dict[Variant, None] = {}
    for num_heads, page_size, dtype in itertools.product(heads, pages, (torch.bfloat16, torch.float16)):
        # of several causal query tokens: it launches whatever one does, and more
        problem = DecodeProblem(
            num_heads, 0.07, page_size=page_size, q_dtype=dtype, kv_layout=TRITON_DTYPES[dtype], max_q_len=32
        )
        if not refusals(problem, target, "gluon"):
            found.update(dict.fromkeys(variants(problem, target)))
    return tuple(found)


def variants(problem: DecodeProblem, target: Target) -> Iterator[Variant]:
    """Every kernel that a decode of ``problem`` on ``target`` may launch, with everything that makes another compilation."""
    yield from _few_heads_variants(problem)
    if problem.num_heads * problem.max_q_len <= FEW_ROWS:
        # nothing else is launched
        return
    yield from plan_variants(GLUON_DECODE_CONFIG)
    yield from _many_heads_variants(problem)
    yield from merge_variants(problem, GLUON_DECODE_CONFIG, target)


def _many_heads_variants(problem: DecodeProblem) -> Iterator[Variant]:
    for causal, ragged, aligned in itertools.product(_masks(problem), (False, True), (True, False)):
        constants = decode_constants(problem, ragged, causal)
        options = {"num_warps": GLUON_DECODE_CONFIG.num_warps}
        yield _decode_variant("many_heads", problem, constants, options, aligned, (causal, ragged))


def _few_heads_variants(problem: DecodeProblem) -> Iterator[Variant]:
    config = GLUON_FEW_HEADS_CONFIG
    scans = (config.small_scan, config.large_scan)
    smaller = 0
    for rows in possible_rows(problem):
        if problem.num_heads * problem.max_q_len <= smaller:
            return
        for causal, ragged, scan, aligned in itertools.product(
            _masks(problem), (False, True), scans, (True, False)
        ):
            if causal and not ragged and 2 * problem.num_heads > rows:
                # even sequences have all their query tokens in one row tile, and causal ones have several
                continue
            constants = few_heads.constants(
                problem, ragged=ragged, causal=causal, block_rows=rows, scan=scan, one_row_tile=not ragged
            )
            factors = (causal, ragged, rows, scan)
            yield _decode_variant("few_heads", problem, constants, few_heads.OPTIONS, aligned, factors)
        smaller = rows


def _masks(problem: DecodeProblem) -> tuple[bool, ...]:
    return (False, True) if problem.causal and problem.max_q_len > 1 else (False,)


def _decode_variant(
    kernel: str,
    problem: DecodeProblem,
    constants: dict[str, Any],
    options: Mapping[str, int],
    aligned: bool,
    factors: tuple[Hashable, ...],
) -> Variant:
    dtype = TRITON_DTYPES[problem.q_dtype]
    if aligned:
        # a launch makes a constant of a stride of 1, which the block table's columns have unless somebody slices them
        constants = constants | {"block_table_column_stride": 1}
    return make_variant(
        kernel,
        constants,
        _POINTERS[kernel] | {"out": dtype},
        options,
        aligned,
        (divisor(problem.num_heads), divisor(problem.page_size), dtype, *factors),
    )


def _samples(field: str) -> tuple[Any, ...]:
    """The sampled values of the axis with one ``field``."""
    return tuple(sample[field] for axis in AXES if axis.field == field for sample in axis.samples)
