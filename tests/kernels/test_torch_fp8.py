"""FP8: every code of both formats is read as its definition says, and scales multiply on reading, exactly once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import arguments, check, make_batch, run, same_bits
from torch import Tensor

from pagedmla import reference
from pagedmla.contract.errors import InvalidArgument

FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
MODES: list[dict[str, Any]] = [{}, {"batch_invariant": True}]


def _one_token(codes: Tensor, dtype: torch.dtype, rank: int) -> dict[str, Any]:
    """One key that is its own output: the softmax of one score is 1."""
    cache = torch.zeros(2, 4, len(codes), dtype=torch.uint8)
    cache[1, 0] = codes
    return {
        "q": torch.zeros(1, 1, len(codes)),
        "kv_cache": cache.view(dtype),
        "block_table": torch.tensor([[1]], dtype=torch.int32),
        "seq_lens": torch.tensor([1], dtype=torch.int32),
        "cu_seqlens_q": None,
        "softmax_scale": 0.5,
        "kv_lora_rank": rank,
    }


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 2.0**7])
@pytest.mark.parametrize("dtype", FORMATS)
def test_all_codes(dtype: torch.dtype, scale: float, mode: dict[str, Any]) -> None:
    table = reference.float8_table(dtype)
    codes = torch.arange(256)[~table.isnan()].to(torch.uint8)
    out, _ = run(_one_token(codes, dtype, len(codes)), kv_scale=scale, **mode)
    assert torch.equal(out[0, 0].double(), table[codes.long()] * scale)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_live_nan_code_stays_visible(dtype: torch.dtype) -> None:
    for code in reference.float8_table(dtype).isnan().nonzero().flatten().tolist():
        out, lse = run(_one_token(torch.tensor([code, 8, 16, 24], dtype=torch.uint8), dtype, 4))
        assert bool(out[0, 0, 0].isnan())
        assert bool(lse.isnan().all())


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_all_codes_of_a_query(dtype: torch.dtype, mode: dict[str, Any]) -> None:
    """The score of query code c against a key of one 1 is the code's value: read off lse."""
    table = reference.float8_table(dtype)
    codes = torch.arange(256)[~table.isnan()].to(torch.uint8)
    one = int((table == 1.0).nonzero())
    cache = torch.zeros(1, 1, 2, dtype=torch.uint8)
    cache[0, 0, 0] = one
    q = torch.zeros(1, len(codes), 2, dtype=torch.uint8)
    q[0, :, 0] = codes
    _, lse = run(
        {
            "q": q.view(dtype),
            "kv_cache": cache.view(dtype),
            "block_table": torch.zeros(1, 1, dtype=torch.int32),
            "seq_lens": torch.ones(1, dtype=torch.int32),
            "softmax_scale": 0.5,
            "kv_lora_rank": 2,
            "q_scale": 0.25,
        },
        **mode,
    )
    torch.testing.assert_close(lse[0].double(), table[codes.long()] * 0.125, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32, "same"])
@pytest.mark.parametrize("kv_scale", [2.0**-7, 0.06, 1.0, 2.0, 2.0**7])
@pytest.mark.parametrize("dtype", FORMATS)
def test_scales_against_the_oracle(
    dtype: torch.dtype, kv_scale: float, q_dtype: Any, mode: dict[str, Any]
) -> None:
    q_dtype = dtype if q_dtype == "same" else q_dtype
    batch = make_batch([131, 0, 17, 1], num_heads=4, q_dtype=q_dtype, kv_dtype=dtype)
    # the batch's own scale is 0.0371: its scores would grow with the scale, so the softmax scale shrinks
    call = arguments(batch) | {"kv_scale": kv_scale, "softmax_scale": batch.softmax_scale * 0.0371 / kv_scale}
    check(run(call, **mode), call)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0])
def test_scale_and_bytes_are_one_product(factor: float, mode: dict[str, Any]) -> None:
    """Halving the scale and doubling every stored number is the same cache, to the bit: both are powers of two."""
    batch = make_batch([131, 5], num_heads=4, q_dtype=torch.float32, kv_dtype=torch.float8_e4m3fn)
    # keep clear of the smallest and largest codes, where doubling is not exact
    tokens = tuple(
        torch.where(keys.float().abs() < 1, torch.ones_like(keys.float()), keys.float().clamp(-100, 100)).to(
            keys.dtype
        )
        for keys in batch.tokens
    )
    call = arguments(type(batch)(batch.queries, tokens, batch.softmax_scale, 32, kv_scale=0.0625))
    scaled = tuple((keys.float() * factor).to(keys.dtype) for keys in tokens)
    other = arguments(type(batch)(batch.queries, scaled, batch.softmax_scale, 32, kv_scale=0.0625 / factor))
    result = run(call, **mode)
    check(result, call)
    assert same_bits(result, run(other, **mode))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_scale_is_a_number_or_a_tensor_of_one(shape: tuple[int, ...]) -> None:
    call = arguments(make_batch([40, 3], q_dtype=torch.float8_e4m3fn))
    tensors = {name: torch.full(shape, call[name]) for name in ("q_scale", "kv_scale")}
    check(run(call | tensors), call)
    # powers of two multiply exactly, in whatever order: the same bits
    numbers = {"q_scale": 0.0625, "kv_scale": 0.03125}
    exact = {name: torch.full(shape, number) for name, number in numbers.items()}
    assert same_bits(run(call | numbers), run(call | exact))


def test_a_scale_left_out_is_one() -> None:
    call = arguments(make_batch([40, 3], q_dtype=torch.float8_e4m3fn)) | {"softmax_scale": 1e-4}
    unscaled = call | {"q_scale": None, "kv_scale": None}
    assert same_bits(run(unscaled), run(call | {"q_scale": 1.0, "kv_scale": 1.0}))
    check(run(unscaled), unscaled)


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
@pytest.mark.parametrize(
    "scale",
    [
        0.0,
        -1.0,
        float("nan"),
        float("inf"),
        1e-50,
        1e300,
        "1",
        True,
        torch.ones(2),
        torch.ones(1, dtype=torch.float64),
    ],
    ids=str,
)
def test_scales_that_are_none_are_refused(name: str, scale: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(arguments(make_batch([4], q_dtype=torch.float8_e4m3fn)), **{name: scale})
    assert caught.value.argument == name


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
@pytest.mark.parametrize("scale", [1.0, 0.06, torch.ones(1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_scale_for_numbers_that_are_not_scaled_is_refused(
    name: str, scale: Any, dtype: torch.dtype
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(arguments(make_batch([4], q_dtype=dtype)), **{name: scale})
    assert caught.value.argument == name
