"""Which compilations the support table asks for: every kernel with every combination of compile-time arguments of a call."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.rules_triton import padded
from pagedmla.contract.support import AXES, refusals
from pagedmla.contract.target import Target
from pagedmla.kernels.policy import TritonDecodeConfig, triton_decode_configs
from pagedmla.kernels.split_kv.launch import overlapped_launch
from pagedmla.kernels.split_kv.variants import (
    TRITON_DTYPES,
    Variant,
    divisor,
    make_variant,
    merge_variants,
    pairwise,
    plan_variants,
)
from pagedmla.kernels.triton.launch import decode_constants

_DECODE_POINTERS = {
    **dict.fromkeys(("shares", "segments", "block_table", "seq_lens", "cu_seqlens_q"), "i32"),
    **dict.fromkeys(("lse", "partial_out", "partial_lse"), "fp32"),
}


def all_variants(target: Target) -> tuple[Variant, ...]:
    """Every distinct compilation that accepted calls on ``target`` may ask for, over all sampled values of the table."""
    return _distinct(target, _problems(target, _samples("num_heads"), _samples("page_size")))


def representative_variants(target: Target) -> tuple[Variant, ...]:
    """A small part of ``all_variants`` that holds every pair of what they differ in (``pairwise``), and the largest of decode.

    Numbers of heads and page sizes count by the code that they choose: ``divisor`` and ``page_path``.
    """
    # each kind of number on either side of the policy's limits; each kind of page for tiles of 16 to 64 tokens
    some = _distinct(target, _problems(target, (1, 5, 16, 20, 32, 80, 128), (2, 3, 32, 64)))
    return tuple(dict.fromkeys((*pairwise(some), *_largest(some))))


def _largest(some: Iterable[Variant]) -> Iterator[Variant]:
    """For all tiles, the decode variants that need most shared memory: the causal mask, the most columns, wide loads."""
    sizes = (_columns(variant) for variant in some if variant.kernel == "decode")
    most = max(sizes, default=0)
    seen: set[Hashable] = set()
    for variant in some:
        values = dict(variant.constants)
        if variant.kernel != "decode" or not variant.aligned or not values["CAUSAL"] or not values["RAGGED"]:
            continue
        page = page_path(values["PAGE_SIZE"], values["BLOCK_N"])
        tiles = (page, values["BLOCK_M"], values["BLOCK_N"], variant.options)
        # a page size that is a power of two takes the other one's loads, at less cost
        if _columns(variant) < most or page == "page a token, power of two" or tiles in seen:
            continue
        seen.add(tiles)
        yield variant


def _columns(variant: Variant) -> int:
    """Numbers of a cached token in a decode kernel, padded."""
    values = dict(variant.constants)
    return int(values["BLOCK_D"] + values["BLOCK_R"])


def _distinct(target: Target, problems: Iterable[DecodeProblem]) -> tuple[Variant, ...]:
    found: dict[Variant, None] = {}
    for problem in problems:
        found.update(dict.fromkeys(variants(problem, target)))
    found.update(dict.fromkeys(_variants_around()))
    return tuple(found)


def page_path(page_size: int, block_n: int) -> str:
    """How a KV tile of ``block_n`` tokens is read from pages: the code differs between these, and not within one."""
    return "tile in a page" if page_size % block_n == 0 else f"page a token, {divisor(page_size)}"


def variants(problem: DecodeProblem, target: Target) -> Iterator[Variant]:
    """Every kernel that a decode of ``problem`` on ``target`` may launch, with everything that makes another compilation."""
    for config in triton_decode_configs(problem, target):
        yield from plan_variants(config)
        yield from _decode_variants(problem, config)
        yield from merge_variants(problem, config, target)


def _decode_variants(problem: DecodeProblem, config: TritonDecodeConfig) -> Iterator[Variant]:
    masks = (False, True) if problem.causal and problem.max_q_len > 1 else (False,)
    dtype = TRITON_DTYPES[problem.q_dtype]
    for causal, ragged, packed, aligned in itertools.product(
        masks, (False, True), (True, False), (True, False)
    ):
        constants = decode_constants(problem, config, ragged, causal, packed)
        if packed:
            # a launch makes a constant of a stride of 1, which the block table's columns have unless somebody slices them
            constants |= {"block_table_column_stride": 1}
        yield make_variant(
            "decode",
            constants,
            _DECODE_POINTERS | dict.fromkeys(("q_nope", "q_pe", "kv_cache", "out"), dtype),
            {"num_warps": config.num_warps, "num_stages": config.num_stages, **overlapped_launch(config)},
            aligned,
            (
                config,
                # KV tiles at the causal end may be shorter than the others
                page_path(problem.page_size, config.block_n),
                page_path(problem.page_size, constants["END_BLOCK_N"]),
                divisor(problem.num_heads),
                (problem.kv_lora_rank, problem.qk_rope_head_dim),
                dtype,
                causal,
                ragged,
                packed,
                constants["ORDERED"],
            ),
        )


def _variants_around() -> Iterator[Variant]:
    """The kernels around decode: append, block table to CSR, merge_states."""
    dims = [
        _dims(sample) for axis in AXES if axis.field.startswith("kv_lora_rank") for sample in axis.samples
    ]
    dtypes = tuple(TRITON_DTYPES.values())
    for (rank, rope), source, target, slots, aligned in itertools.product(
        dims, dtypes, dtypes, ("i32", "i64"), (True, False)
    ):
        # packed tensors have the inner stride 1, which Triton makes a constant
        inner = {"latent_stride": 1, "k_pe_stride": 1} if aligned else {}
        constants = {"BLOCK_LATENT": min(512, padded(rank)), "BLOCK_ROPE": min(512, padded(rope)), **inner}
        pointers = {"kv_cache": target, "latent": source, "k_pe": source, "slot_mapping": slots}
        yield make_variant(
            "append", constants, pointers, {"num_warps": 2}, aligned, (rank, rope, source, target, slots)
        )
    for writes, aligned in itertools.product((True, False), (True, False)):
        pointers = dict.fromkeys(("seq_lens", "kv_indptr", "kv_last_page_len"), "i32")
        constants = {"WRITE_LAST_PAGE_LEN": writes, "BLOCK": 1024}
        yield make_variant("index_pages", constants, pointers, {}, aligned, (writes,))
    for aligned in (True, False):
        pointers = dict.fromkeys(("block_table", "kv_indptr", "kv_indices"), "i32")
        yield make_variant("compact", {"BLOCK": 1024}, pointers, {}, aligned, ())
    for (rank, _), dtype, aligned in itertools.product(dims, dtypes, (True, False)):
        inner = {"out_stride": 1, "others_out_stride": 1} if aligned else {}
        pointers = {
            **dict.fromkeys(("first_out", "others_out", "out"), dtype),
            **dict.fromkeys(("first_lse", "others_lse", "lse"), "fp32"),
        }
        constants = {"BLOCK": min(512, padded(rank)), **inner}
        yield make_variant("merge_states", constants, pointers, {"num_warps": 2}, aligned, (rank, dtype))


def _dims(sample: Mapping[str, object]) -> tuple[int, int]:
    return int(str(sample["kv_lora_rank"])), int(str(sample["qk_rope_head_dim"]))


def _samples(field: str) -> tuple[Any, ...]:
    """The sampled values of the axis with one ``field``."""
    return tuple(sample[field] for axis in AXES if axis.field == field for sample in axis.samples)


_FIELDS = ("kv_lora_rank, qk_rope_head_dim", "q_dtype, kv_layout", "batch_invariant")


def _problems(target: Target, heads: Iterable[int], pages: Iterable[int]) -> Iterator[DecodeProblem]:
    """The product of the table's axes that reach a compile-time argument, with these numbers of heads and page sizes.

    A causal problem of several query tokens launches whatever one without a mask does, and more.
    """
    axes: list[tuple[dict[str, Any], ...]] = [axis.samples for axis in AXES if axis.field in _FIELDS]
    for num_heads, page_size, *samples in itertools.product(heads, pages, *axes):
        values: dict[str, Any] = {"softmax_scale": 0.07, "causal": True, "max_q_len": 2}
        for sample in samples:
            values |= sample
        problem = DecodeProblem(num_heads=num_heads, page_size=page_size, **values)
        if not refusals(problem, target, "triton"):
            yield problem
