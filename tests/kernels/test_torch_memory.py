"""MEM: memory that a row does not own never changes a bit of it; scratch may hold anything and is exactly as large as said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import arguments, check, make_batch, run, same_bits
from torch import Tensor

import pagedmla
from pagedmla.contract.errors import InvalidArgument
from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.contract.problem import BatchBounds, DecodeProblem

PAIRS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz),
]
MODES: list[dict[str, Any]] = [{}, {"num_kv_splits": 3}, {"batch_invariant": True}]


def _call(q_dtype: torch.dtype, kv_dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    batch = make_batch(
        [1, 3, 0, 127, 16, 17], [1, 2, 1, 3, 1, 1], q_dtype=q_dtype, kv_dtype=kv_dtype, num_heads=5
    )
    return arguments(batch, 16, **options)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), PAIRS, ids=str)
def test_poison_changes_no_bit(q_dtype: torch.dtype, kv_dtype: torch.dtype, mode: dict[str, Any]) -> None:
    clean = run(_call(q_dtype, kv_dtype, poison="finite"), **mode)
    for poison in ("nan", "inf"):
        assert same_bits(clean, run(_call(q_dtype, kv_dtype, poison=poison), **mode))


@pytest.mark.parametrize("code", range(0, 256, 5))
def test_any_byte_around_an_fp8_sequence(code: int) -> None:
    batch = make_batch([21], q_dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    call = arguments(batch, 16, poison="finite")
    owned = torch.zeros(call["kv_cache"].shape, dtype=torch.bool)
    first, second = call["block_table"][0, :2].tolist()
    owned[first], owned[second, :5] = True, True
    filled = torch.where(owned, call["kv_cache"].view(torch.uint8), code).to(torch.uint8)
    assert same_bits(run(call), run(call | {"kv_cache": filled.view(torch.float8_e4m3fn)}))


def _problem(call: dict[str, Any], mode: dict[str, Any]) -> tuple[DecodeProblem, BatchBounds]:
    q, cache = call["q"], call["kv_cache"]
    problem = DecodeProblem(
        num_heads=q.shape[1],
        softmax_scale=call["softmax_scale"],
        kv_lora_rank=call["kv_lora_rank"],
        qk_rope_head_dim=q.shape[2] - call["kv_lora_rank"],
        page_size=cache.shape[1],
        q_dtype=q.dtype,
        kv_layout=layout_of_dtype(cache.dtype).name,
        max_q_len=3,
        **mode,
    )
    return problem, BatchBounds(call["seq_lens"].shape[0], call["block_table"].shape[1], q.shape[0])


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), PAIRS, ids=str)
def test_workspace_of_the_exact_size_may_hold_anything(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, mode: dict[str, Any]
) -> None:
    call = _call(q_dtype, kv_dtype)
    size = pagedmla.workspace_size(*_problem(call, mode))
    assert isinstance(size, int)
    plain = run(call, **mode)
    for byte in (0x00, 0xFF, 0x7F):
        # an odd start: whoever hands out bytes need not know of alignment
        storage = torch.full((size + 130,), 0xA5, dtype=torch.uint8)
        workspace = storage[65 : 65 + size]
        workspace.fill_(byte)
        assert same_bits(plain, run(call, workspace=workspace, **mode))
        guards = torch.cat([storage[:65], storage[65 + size :]])
        assert bool((guards == 0xA5).all()), "bytes around the workspace were written"


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_workspace_that_is_too_small_is_refused(mode: dict[str, Any]) -> None:
    call = _call(torch.bfloat16, torch.bfloat16)
    with pytest.raises(InvalidArgument) as caught:
        run(call, workspace=torch.empty(100, dtype=torch.uint8), **mode)
    assert caught.value.argument == "workspace"
    assert "workspace_size" in caught.value.wanted


def test_a_workspace_is_used_again_for_smaller_and_other_calls() -> None:
    large = arguments(make_batch([300, 127, 64], [3, 3, 3], num_heads=16))
    size = pagedmla.workspace_size(*_problem(large, {}))
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
    first = run(large, workspace=workspace)
    small = arguments(make_batch([5], num_heads=3))
    assert same_bits(run(small), run(small, workspace=workspace))
    assert same_bits(first, run(large, workspace=workspace))


def _banded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    storage = torch.full((shape[0] + 4, *shape[1:]), -768.0, dtype=dtype)
    storage[2:-2] = torch.nan
    return storage, storage[2:-2]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), PAIRS, ids=str)
def test_only_the_given_rows_are_written(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, mode: dict[str, Any]
) -> None:
    call = _call(q_dtype, kv_dtype)
    out_dtype = torch.bfloat16 if q_dtype.itemsize == 1 else q_dtype
    out_storage, out = _banded((9, 5, 32), out_dtype)
    lse_storage, lse = _banded((9, 5), torch.float32)
    result = run(call, out=out, lse=lse, **mode)
    assert result[0].data_ptr() == out.data_ptr()
    assert result[1].data_ptr() == lse.data_ptr()
    check(result, call)
    for storage in (out_storage, lse_storage):
        assert bool((storage[:2] == -768).all() & (storage[-2:] == -768).all())


LIVE_POISON = [float("nan"), float("inf"), 3e38, 1.0]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("value", LIVE_POISON)
def test_a_live_key_changes_no_bit_of_rows_that_do_not_see_it(value: float, mode: dict[str, Any]) -> None:
    """The newest token of one sequence, a nan or an overflow in a broken model: its neighbours in the batch, and the
    earlier queries of its own sequence, which the causal mask keeps from it, have nothing to do with that.
    """
    call = arguments(make_batch([131, 64, 300, 5], [3, 2, 5, 2]), 16)
    changed = call["kv_cache"].clone()
    changed[int(call["block_table"][0, 8]), 130 % 16] = value
    good, result = run(call, **mode), run(call | {"kv_cache": changed}, **mode)
    assert not same_bits(tuple(part[2] for part in good), tuple(part[2] for part in result))
    for name, rows in (("other sequences", slice(3, None)), ("earlier queries", slice(0, 2))):
        assert same_bits(tuple(part[rows] for part in good), tuple(part[rows] for part in result)), name


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_nan_in_one_query_changes_no_bit_of_the_others(mode: dict[str, Any]) -> None:
    call = arguments(make_batch([131, 64, 5], [3, 2, 2]), 16)
    q = call["q"].clone()
    q[1, 2] = torch.nan
    good, result = run(call, **mode), run(call | {"q": q}, **mode)
    assert bool(result[0][1, 2].isnan().all() & result[1][1, 2].isnan())
    keep = torch.ones(7, 4, dtype=torch.bool)
    keep[1, 2] = False
    assert same_bits(tuple(part[keep] for part in good), tuple(part[keep] for part in result))


def test_inputs_are_not_written() -> None:
    call = _call(torch.bfloat16, torch.bfloat16)
    before = {name: value.clone() for name, value in call.items() if isinstance(value, Tensor)}
    for mode in MODES:
        run(call, **mode)
    for name, value in before.items():
        assert same_bits((value,), (call[name],)), name
