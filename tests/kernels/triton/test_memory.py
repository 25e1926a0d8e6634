"""MEM: memory that a row does not own never changes a bit of it; scratch may hold anything and is exactly as large as said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import same_bits
from torch import Tensor
from triton_backend import (
    DEVICE,
    DTYPES,
    MODES,
    arguments,
    check,
    checked,
    make_batch,
    problem_of,
    rows_of,
    run,
)

import pagedmla
from pagedmla.contract.errors import InvalidArgument

pytestmark = pytest.mark.usefixtures("short_cuts")


def _call(dtype: torch.dtype = torch.float16, **options: Any) -> dict[str, Any]:
    return arguments(make_batch([1, 0, 70, 16], [1, 1, 3, 1], num_heads=5, q_dtype=dtype), 16, **options)


def _size(call: dict[str, Any], mode: dict[str, Any], max_q_len: int = 3) -> int:
    return pagedmla.workspace_size(*problem_of(call, max_q_len, **mode), DEVICE, "triton")


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_changes_no_bit(dtype: torch.dtype, mode: dict[str, Any]) -> None:
    clean = checked(_call(dtype, poison="finite"), **mode)
    for poison in ("nan", "inf"):
        assert same_bits(clean, run(_call(dtype, poison=poison), **mode))


@pytest.mark.parametrize(("num_heads", "mode"), [*((5, mode) for mode in MODES), (50, MODES[0])], ids=str)
def test_workspace_of_the_exact_size_may_hold_anything(num_heads: int, mode: dict[str, Any]) -> None:
    """Fifty heads, three query tokens: several row tiles a sequence, which persistent workers take side by side."""
    q_lens = [3, 3, 3] if num_heads == 50 else [0, 3, 1]
    call = arguments(make_batch([0, 70, 16], q_lens, num_heads=num_heads), 16, spare_columns=0)
    if len(set(q_lens)) == 1:
        call["cu_seqlens_q"] = None
    size = _size(call, mode)
    plain = run(call, **mode)
    for byte, start in ((0xFF, 64), (0x7F, 65)):
        # an odd start: whoever hands out bytes need not know of alignment
        storage = torch.full((size + 130,), 0xA5, dtype=torch.uint8, device=DEVICE)
        workspace = storage[start : start + size]
        workspace.fill_(byte)
        assert same_bits(plain, run(call, workspace=workspace, max_q_len=3, **mode))
        guards = torch.cat([storage[:start], storage[start + size :]])
        assert bool((guards == 0xA5).all()), "bytes around the workspace were written"


@pytest.mark.parametrize("mode", [*MODES, {"num_kv_splits": 40}], ids=str)
def test_the_size_covers_every_smaller_call(mode: dict[str, Any]) -> None:
    """Fewer sequences, tokens or columns never need more, whichever tiles they run with."""
    problem, bounds = problem_of(_call(), 3, **mode)
    whole = pagedmla.workspace_size(problem, bounds, DEVICE, "triton")
    for num_seqs in range(1, bounds.max_num_seqs + 1):
        for num_tokens in range(1, 3 * num_seqs + 1):
            for pages in (1, bounds.max_pages_per_seq):
                smaller = pagedmla.BatchBounds(num_seqs, pages, num_tokens)
                if num_tokens <= bounds.num_tokens(problem):
                    assert pagedmla.workspace_size(problem, smaller, DEVICE, "triton") <= whole


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_workspace_that_is_too_small_is_refused(mode: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(_call(), workspace=torch.empty(100, dtype=torch.uint8, device=DEVICE), **mode)
    assert caught.value.argument == "workspace"
    assert "workspace_size" in caught.value.wanted


def test_one_workspace_serves_all_modes_and_smaller_calls_in_turn() -> None:
    large, small = (
        arguments(make_batch([90, 33], [2, 2], num_heads=8)),
        arguments(make_batch([5], num_heads=3)),
    )
    size = max(_size(large, mode, 2) for mode in MODES)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
    for mode in MODES:
        for call, most in ((large, 2), (small, 1)):
            plain = run(call, max_q_len=most, **mode)
            assert same_bits(plain, run(call, workspace=workspace, max_q_len=most, **mode))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_only_the_given_rows_are_written(mode: dict[str, Any]) -> None:
    call = _call()
    out_storage = torch.full((10, 5, 32), -768.0, dtype=torch.float16, device=DEVICE)
    lse_storage = torch.full((10, 5), -768.0, device=DEVICE)
    out, lse = out_storage[2:-2].fill_(torch.nan), lse_storage[2:-2].fill_(torch.nan)
    result = run(call, out=out, lse=lse, **mode)
    assert (result[0].data_ptr(), result[1].data_ptr()) == (out.data_ptr(), lse.data_ptr())
    check(result, call)
    for storage in (out_storage, lse_storage):
        assert bool((storage[:2] == -768).all() & (storage[-2:] == -768).all())


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, 6e4])
def test_a_live_key_changes_no_bit_of_rows_that_do_not_see_it(value: float, mode: dict[str, Any]) -> None:
    """The newest token of one sequence, a nan or an overflow in a broken model: its neighbours in the batch, and the
    earlier queries of its own sequence, which the causal mask keeps from it, have nothing to do with that.
    """
    call = arguments(make_batch([70, 33, 5], [3, 2, 2]), 16)
    changed = call["kv_cache"].clone()
    changed[int(call["block_table"][0, 4]), 69 % 16] = value
    good, result = run(call, **mode), run(call | {"kv_cache": changed}, **mode)
    newest = rows_of(result, [2])
    assert not same_bits(rows_of(good, [2]), newest)
    if value != 6e4:
        assert not bool(newest[0].isfinite().any() | newest[1].isfinite().any())
    for rows in (slice(3, None), slice(0, 2)):
        assert same_bits(rows_of(good, rows), rows_of(result, rows))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("column", [3, 35])
def test_one_broken_number_breaks_the_rows_that_see_it(column: int, mode: dict[str, Any]) -> None:
    """Of the latent, which is a value, or of the rope part, which is not: either is in the score, so it may not vanish."""
    call = arguments(make_batch([70, 33], [3, 2]), 16)
    changed = call["kv_cache"].clone()
    changed[int(call["block_table"][0, 4]), 68 % 16, column] = torch.nan
    good, result = run(call, **mode), run(call | {"kv_cache": changed}, **mode)
    for row in (1, 2):
        assert bool(result[0][row].isnan().all() & result[1][row].isnan().all())
    for rows in ([0], slice(3, None)):
        assert same_bits(rows_of(good, rows), rows_of(result, rows))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_nan_in_one_query_changes_no_bit_of_the_others(mode: dict[str, Any]) -> None:
    call = arguments(make_batch([70, 33, 5], [3, 2, 2]), 16)
    q = call["q"].clone()
    q[1, 2] = torch.nan
    good, result = run(call, **mode), run(call | {"q": q}, **mode)
    assert bool(result[0][1, 2].isnan().all() & result[1][1, 2].isnan())
    keep = torch.ones(7, 4, dtype=torch.bool)
    keep[1, 2] = False
    assert same_bits(rows_of(good, keep), rows_of(result, keep))


def test_inputs_are_not_written() -> None:
    call = _call()
    before = {name: value.clone() for name, value in call.items() if isinstance(value, Tensor)}
    for mode in MODES:
        run(call, **mode)
    for name, value in before.items():
        assert same_bits((value,), (call[name],)), name
