"""Which compilations of the Gluon backend the support table asks for: its decode kernel, plan and merge in its tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import AXES, refusals
from pagedmla.contract.target import Target
from pagedmla.kernels.gluon.launch import decode_constants
from pagedmla.kernels.policy import GLUON_DECODE_CONFIG
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
    **dict.fromkeys(("shares", "segments", "block_table", "seq_lens", "cu_seqlens_q"), "i32"),
    **dict.fromkeys(("lse", "partial_out", "partial_lse"), "fp32"),
}
DESCRIPTORS = {"q_desc": 256, "q_rope_desc": 64, "latent_desc": 256, "rope_desc": 64}
"""Arguments that are descriptors of the element type of ``out``, and the columns of what is copied with each at once."""


def all_variants(target: Target) -> tuple[Variant, ...]:
    """Every distinct compilation that accepted calls on ``target`` may ask for, over all sampled values of the table."""
    return _distinct(target, _samples("num_heads"), _samples("page_size"))


def representative_variants(target: Target) -> tuple[Variant, ...]:
    """A small part of ``all_variants`` that holds every pair of what they differ in.

    Numbers of heads and page sizes count by the code that they choose: a division is a shift, or a multiplication and more.
    """
    return pairwise(_distinct(target, (20, 128), (64, 192)))


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
    yield from plan_variants(GLUON_DECODE_CONFIG)
    yield from _decode_variants(problem)
    yield from merge_variants(problem, GLUON_DECODE_CONFIG, target)


def _decode_variants(problem: DecodeProblem) -> Iterator[Variant]:
    masks = (False, True) if problem.causal and problem.max_q_len > 1 else (False,)
    dtype = TRITON_DTYPES[problem.q_dtype]
    for causal, ragged, aligned in itertools.product(masks, (False, True), (True, False)):
        constants = decode_constants(problem, ragged, causal)
        if aligned:
            # a launch makes a constant of a stride of 1, which the block table's columns have unless somebody slices them
            constants |= {"block_table_column_stride": 1}
        yield make_variant(
            "many_heads",
            constants,
            _POINTERS | {"out": dtype},
            {"num_warps": GLUON_DECODE_CONFIG.num_warps},
            aligned,
            (divisor(problem.num_heads), divisor(problem.page_size), dtype, causal, ragged),
        )


def _samples(field: str) -> tuple[Any, ...]:
    """The sampled values of the axis with one ``field``."""
    return tuple(sample[field] for axis in AXES if axis.field == field for sample in axis.samples)
