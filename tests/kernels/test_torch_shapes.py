"""SHAPE: any number of heads, any latent and rope size, all dtype pairs of the table; the rest is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import arguments, check, make_batch, run, same_bits

from pagedmla.contract.errors import InvalidArgument, PagedMLAError, Unsupported
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import AXES

HEADS = [sample["num_heads"] for axis in AXES if axis.field == "num_heads" for sample in axis.samples]
DIMS = [
    tuple(sample.values())
    for axis in AXES
    if axis.field.startswith("kv_lora_rank")
    for sample in axis.samples
]
ODD_DIMS = [(1, 0), (1, 2), (7, 2), (33, 0), (100, 6), (513, 62)]
MODES: list[dict[str, Any]] = [{}, {"num_kv_splits": 3}, {"batch_invariant": True}]


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_head_slicing(num_heads: int, mode: dict[str, Any]) -> None:
    """Heads do not know of each other: a slice of the queries gives the slice of the results."""
    call = arguments(make_batch([131, 5, 0, 16], [1, 2, 1, 3], num_heads=num_heads))
    out, lse = run(call, **mode)
    assert out.shape == (7, num_heads, 32)
    assert lse.shape == (7, num_heads)
    check((out, lse), call)
    for heads in (slice(0, 1), slice(num_heads // 2, num_heads), slice(0, num_heads, 3)):
        part = call | {"q": call["q"][:, heads]}
        sliced = run(part, **mode)
        check(sliced, part)
        if "batch_invariant" in mode:
            assert same_bits((out[:, heads], lse[:, heads]), sliced)


@pytest.mark.parametrize("num_heads", [3, 7, 15, 17, 31, 33, 63, 65, 100, 127, 129, 130, 257])
def test_head_counts_next_to_tiles(num_heads: int) -> None:
    call = arguments(make_batch([33, 1], [2, 1], num_heads=num_heads, q_dtype=torch.float32))
    check(run(call), call)
    check(run(call, batch_invariant=True), call)


@pytest.mark.parametrize("dims", [*DIMS, *ODD_DIMS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latent_and_rope_sizes(dims: tuple[int, int], dtype: torch.dtype) -> None:
    call = arguments(make_batch([131, 0, 17, 1], num_heads=5, dims=dims, q_dtype=dtype))
    out, lse = run(call)
    assert out.shape == (4, 5, dims[0])
    check((out, lse), call)


def test_every_row_and_head_has_its_own_answer() -> None:
    call = arguments(make_batch([20, 30, 40], [2, 1, 2], num_heads=6))
    out, _ = run(call)
    assert len({tuple(row.tolist()) for row in out.flatten(0, 1)}) == 30


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 0),
        ("num_heads", True),
        ("kv_lora_rank", 0),
        ("qk_rope_head_dim", 7),
        ("qk_rope_head_dim", -2),
        ("page_size", 0),
        ("max_q_len", 0),
        ("num_kv_splits", 0),
        ("softmax_scale", 0.0),
        ("softmax_scale", float("nan")),
    ],
)
def test_problems_that_cannot_be_are_refused(field: str, value: object) -> None:
    fields: dict[str, Any] = {"num_heads": 4, "softmax_scale": 0.1} | {field: value}
    with pytest.raises(InvalidArgument) as caught:
        DecodeProblem(**fields)
    assert caught.value.argument == field


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"kv_lora_rank": 41}, None),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"kv_lora_rank": 33}, None),
        ({"q": torch.zeros(2, 4, 39, dtype=torch.bfloat16)}, None),
        ({"q": torch.zeros(2, 0, 40, dtype=torch.bfloat16)}, None),
        ({"q": torch.zeros(2, 40, dtype=torch.bfloat16)}, "q"),
        ({"kv_cache": torch.zeros(4, 16, 1, 40, dtype=torch.bfloat16)}, "kv_cache"),
        ({"kv_cache": torch.zeros(4, 0, 40, dtype=torch.bfloat16)}, None),
        ({"kv_cache": torch.zeros(4, 16, 41, dtype=torch.bfloat16)}, "kv_cache"),
        ({"kv_cache": torch.zeros(4, 16, 40, dtype=torch.int32)}, "kv_cache"),
        ({"kv_cache": torch.zeros(4, 16, 40, dtype=torch.float64)}, "kv_cache"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, None),
        ({"block_table": torch.zeros(8, dtype=torch.int32)}, "block_table"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any], argument: str | None) -> None:
    call = arguments(make_batch([9, 5]))
    with pytest.raises(InvalidArgument) as caught:
        run(call | change)
    if argument is not None:
        assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    ],
)
def test_dtype_pairs_that_are_not_built_are_unsupported(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    call = arguments(make_batch([9, 5], q_dtype=q_dtype, kv_dtype=kv_dtype))
    with pytest.raises(Unsupported) as caught:
        run(call)
    assert caught.value.code == "dtype_pair"
    assert caught.value.refusals


@pytest.mark.parametrize(
    "options", [{"schedule": "persistent"}, {"batch_invariant": True, "num_kv_splits": 2}]
)
def test_modes_that_are_not_built_are_unsupported(options: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        run(arguments(make_batch([9])), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "cuda"},
        {"backend": ""},
        {"schedule": "fast"},
        {"num_kv_splits": 0},
        {"num_kv_splits": 1.5},
    ],
)
def test_words_and_numbers_that_mean_nothing_are_invalid(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(arguments(make_batch([9])), **options)
    assert caught.value.argument == next(iter(options))
    assert isinstance(caught.value, PagedMLAError)
