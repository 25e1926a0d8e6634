"""Which compilations of the Gluon backend the support table asks for: those of its two decode kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.rules_gluon import FEW_ROWS
from pagedmla.contract.support import AXES, refusals
from pagedmla.contract.target import Target
from pagedmla.kernels.gluon.choice import Choice, choose_for
from pagedmla.kernels.gluon.launch import OPTIONS, constants
from pagedmla.kernels.gluon.tensors import BLOCK_ROWS
from pagedmla.kernels.policy import GLUON_MANY_HEADS_CONFIG
from pagedmla.kernels.split_kv.variants import TRITON_DTYPES, Variant, divisor, make_variant, pairwise

_POINTERS = {
    **dict.fromkeys(("block_table", "seq_lens", "cu_seqlens_q"), "i32"),
    **dict.fromkeys(("lse", "partial_out", "partial_lse"), "fp32"),
    "flags": "i64",
}
ALIGNED = ("q", "q_rope", "kv_cache")
"""Arguments whose addresses are multiples of 16 in every launch: others are copied, or refused (tensors.py)."""


def descriptors(variant: Variant) -> dict[str, tuple[int, int]]:
    """A variant's arguments that are descriptors of the element type of ``out``: rows and columns of what is copied with each
    at once.
    """
    if variant.kernel == "few_heads":
        return {}
    columns = {"q_desc": 256, "q_rope_desc": 64, "latent_desc": 256, "rope_desc": 64}
    return {name: (BLOCK_ROWS, count) for name, count in columns.items()}


def all_variants(target: Target) -> tuple[Variant, ...]:
    """Every distinct compilation that accepted calls on ``target`` may ask for, over all sampled values of the table."""
    return _distinct(target, _samples("num_heads"), _samples("page_size"))


def representative_variants(target: Target) -> tuple[Variant, ...]:
    """A small part of ``all_variants`` that holds every pair of what they differ in.

    Numbers that are divided by count by the code that they choose: a shift, or a multiplication and more; page sizes count by
    who copies keys, too.
    """
    return pairwise(_distinct(target, (1, 5, 8, 12, 16, 20, 128), (1, 16, 64, 192, 480)))


def _distinct(target: Target, heads: Iterable[int], pages: Iterable[int]) -> tuple[Variant, ...]:
    found: dict[Variant, None] = {}
    dtypes = (torch.bfloat16, torch.float16)
    for num_heads, page_size, dtype, causal in itertools.product(heads, pages, dtypes, (True, False)):
        # as many query tokens as the kernel for few rows takes alone, and so many that all is launched
        for max_q_len in (max(1, FEW_ROWS // num_heads), _enough_tokens(num_heads)):
            problem = DecodeProblem(
                num_heads,
                0.07,
                page_size=page_size,
                q_dtype=dtype,
                kv_layout=TRITON_DTYPES[dtype],
                max_q_len=max_q_len,
                causal=causal,
            )
            if not refusals(problem, target, "gluon"):
                found.update(dict.fromkeys(variants(problem, target)))
    return tuple(found)


def _enough_tokens(num_heads: int) -> int:
    """Query tokens of a sequence up to which every choice has been made: numbers of lanes repeat themselves, and behind the
    first ones a sequence has several groups of row tiles.
    """
    config = GLUON_MANY_HEADS_CONFIG
    rows = config.block_rows * math.lcm(*range(1, config.most_lanes + 1))
    return config.block_rows * config.most_lanes // num_heads + rows // math.gcd(rows, num_heads)


def variants(problem: DecodeProblem, target: Target) -> Iterator[Variant]:
    """Every kernel that a decode of ``problem`` on ``target`` may launch, with everything that makes another compilation."""
    launched: dict[tuple[Choice, bool, bool, bool], None] = {}
    for q_len in range(1, problem.max_q_len + 1):
        rows = q_len * problem.num_heads
        choice = choose_for(rows, target.compute_units)
        # of even sequences the host knows all; of ragged ones it may know the average, and not that some have more tokens
        launched[choice, False, problem.causal and q_len > 1, rows <= choice.group_rows] = None
        for causal in {False, problem.causal and problem.max_q_len > 1}:
            launched[choice, True, causal, False] = None
    for (choice, ragged, causal, one_row_tile), aligned in itertools.product(launched, (True, False)):
        for scan in (choice.config.small_scan, choice.config.large_scan):
            values = constants(
                problem, choice, ragged=ragged, causal=causal, scan=scan, one_row_tile=one_row_tile
            )
            yield _variant(problem, choice, values, aligned)


def _variant(problem: DecodeProblem, choice: Choice, values: dict[str, Any], aligned: bool) -> Variant:
    dtype = TRITON_DTYPES[problem.q_dtype]
    factors: tuple[Hashable, ...] = (
        divisor(problem.num_heads),
        divisor(problem.page_size),
        divisor(choice.lanes),
        dtype,
        # warps that copy tokens one by one have other registers
        *(values[name] for name in ("LOADER_REGISTERS", "RAGGED", "CAUSAL", "SCAN", "ONE_ROW_TILE")),
    )
    if aligned:
        # a launch makes a constant of a stride of 1, which the block table's columns have unless somebody slices them
        values = values | {"block_table_column_stride": 1}
    own = ("out", "kv_cache") if choice.kernel == "many_heads" else ("out", "kv_cache", "q", "q_rope")
    pointers = _POINTERS | dict.fromkeys(own, dtype)
    return make_variant(choice.kernel, values, pointers, OPTIONS, aligned, factors)


def _samples(field: str) -> tuple[Any, ...]:
    """The sampled values of the axis with one ``field``."""
    return tuple(sample[field] for axis in AXES if axis.field == field for sample in axis.samples)
