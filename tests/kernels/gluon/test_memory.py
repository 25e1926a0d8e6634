"""MEM: memory that a row does not own never changes a bit of it; values on the device are bounded, not trusted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import same_bits
from gluon_backend import (
    DEVICE,
    DTYPES,
    arguments,
    check,
    make_batch,
    needs_hopper,
    problem_of,
    rows_of,
    run,
)
from torch import Tensor

import pagedmla
from pagedmla.contract.errors import InvalidArgument

pytestmark = needs_hopper

HUGE = 2**31 - 1
# one of each kernel's
both_kernels = pytest.mark.parametrize("num_heads", [5, 20])
BAD = 1
# the rows of the sequences whose values are right
OTHERS = [0, 3, 4, 5]


def _call(num_heads: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Any]:
    return arguments(
        make_batch([1, 0, 170, 64, 300], [1, 1, 3, 1, 2], num_heads=num_heads, q_dtype=dtype), **options
    )


@pytest.mark.parametrize(("num_heads", "page_size"), [(5, 64), (5, 1), (5, 48), (20, 64), (20, 192)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_changes_no_bit(dtype: torch.dtype, num_heads: int, page_size: int) -> None:
    """Past a sequence's end in its last page, in the tile beside it, and in pages that nobody owns."""
    clean = run(_call(num_heads, dtype, page_size=page_size, poison="finite"), max_q_len=3)
    check(clean, _call(num_heads, dtype, page_size=page_size, poison="finite"))
    for poison in ("nan", "inf"):
        assert same_bits(
            clean, run(_call(num_heads, dtype, page_size=page_size, poison=poison), max_q_len=3)
        ), poison


@pytest.mark.parametrize("num_heads", [5, 20, 128])
def test_workspace_of_the_exact_size_may_hold_anything(num_heads: int) -> None:
    call = arguments(make_batch([0, 300, 16], [0, 3, 1], num_heads=num_heads), spare_columns=0)
    size = pagedmla.workspace_size(*problem_of(call, 3), DEVICE, "gluon")
    plain = run(call, max_q_len=3)
    for byte, start in ((0xFF, 64), (0x7F, 65)):
        # an odd start: whoever hands out bytes need not know of alignment
        storage = torch.full((size + 130,), 0xA5, dtype=torch.uint8, device=DEVICE)
        workspace = storage[start : start + size]
        workspace.fill_(byte)
        assert same_bits(plain, run(call, workspace=workspace, max_q_len=3))
        guards = torch.cat([storage[:start], storage[start + size :]])
        assert bool((guards == 0xA5).all()), "bytes around the workspace were written"


@both_kernels
def test_a_workspace_that_is_too_small_is_refused(num_heads: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(_call(num_heads), workspace=torch.empty(100, dtype=torch.uint8, device=DEVICE))
    assert caught.value.argument == "workspace"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 6e4])
@both_kernels
def test_a_live_key_changes_no_bit_of_rows_that_do_not_see_it(num_heads: int, value: float) -> None:
    """The newest token of one sequence: earlier queries of its own, in the same row tile, are kept from it by the mask."""
    call = arguments(make_batch([170, 133, 5], [3, 2, 2], num_heads=num_heads))
    changed = call["kv_cache"].clone()
    changed[int(call["block_table"][0, 2]), 169 % 64] = value
    good, result = run(call), run(call | {"kv_cache": changed})
    newest = rows_of(result, [2])
    assert not same_bits(rows_of(good, [2]), newest)
    if value != 6e4:
        assert not bool(newest[0].isfinite().any() | newest[1].isfinite().any())
    for rows in (slice(3, None), slice(0, 2)):
        assert same_bits(rows_of(good, rows), rows_of(result, rows))


@both_kernels
@pytest.mark.parametrize("column", [0, 300, 511, 575])
@pytest.mark.parametrize("position", [0, 10, 63, 64, 100, 167, 168, 169])
def test_one_broken_number_breaks_the_rows_that_see_it(position: int, column: int, num_heads: int) -> None:
    """In either half of the values or in the rotated part, in either tile of a pair, among keys that all rows see or not."""
    call = arguments(make_batch([170, 133], [3, 2], num_heads=num_heads))
    changed = call["kv_cache"].clone()
    changed[int(call["block_table"][0, position // 64]), position % 64, column] = torch.nan
    good, result = run(call), run(call | {"kv_cache": changed})
    # query 0 sees the keys up to 167, query 1 those up to 168
    broken = [row for row in range(3) if position <= 167 + row]
    for row in broken:
        assert bool(result[0][row].isnan().all() & result[1][row].isnan().all()), row
    rest = [row for row in range(5) if row not in broken]
    assert same_bits(rows_of(good, rest), rows_of(result, rest))


@both_kernels
def test_a_nan_in_one_query_changes_no_bit_of_the_others(num_heads: int) -> None:
    call = arguments(make_batch([170, 133, 5], [3, 2, 2], num_heads=num_heads))
    q = call["q"].clone()
    q[1, 2] = torch.nan
    good, result = run(call), run(call | {"q": q})
    assert bool(result[0][1, 2].isnan().all() & result[1][1, 2].isnan())
    keep = torch.ones(7, num_heads, dtype=torch.bool, device=DEVICE)
    keep[1, 2] = False
    assert same_bits(rows_of(good, keep), rows_of(result, keep))


@both_kernels
def test_inputs_are_not_written(num_heads: int) -> None:
    call = _call(num_heads)
    before = {name: value.clone() for name, value in call.items() if isinstance(value, Tensor)}
    run(call)
    for name, value in before.items():
        assert same_bits((value,), (call[name],)), name


def _spoiled(num_heads: int) -> dict[str, Any]:
    return arguments(make_batch([133, 120, 270, 5], [1, 2, 2, 1], num_heads=num_heads))


def _banded_run(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Runs between guard rows and checks them; returns the rows inside."""
    count, num_heads = call["q"].shape[:2]
    out = torch.full((count + 8, num_heads, 512), -768.0, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((count + 8, num_heads), -768.0, device=DEVICE)
    run(call, out=out[4:-4], lse=lse[4:-4])
    for storage in (out, lse):
        assert bool((storage[:4] == -768).all() & (storage[-4:] == -768).all()), "guard rows were written"
    return out[4:-4], lse[4:-4]


@pytest.mark.parametrize(("column", "value"), [(0, -1), (1, -(2**31)), (0, HUGE), (1, "num_pages")])
@both_kernels
def test_page_outside_the_pool(num_heads: int, column: int, value: int | str) -> None:
    call = _spoiled(num_heads)
    table = call["block_table"].clone()
    table[BAD, column] = call["kv_cache"].shape[0] if isinstance(value, str) else value
    good, result = run(call), _banded_run(call | {"block_table": table})
    assert same_bits(rows_of(good, OTHERS), rows_of(result, OTHERS))


@pytest.mark.parametrize("value", [-1, -(2**31), HUGE, 64 * 7 + 1])
@both_kernels
def test_length_past_the_table_or_negative(num_heads: int, value: int) -> None:
    """A length may change how the call is cut, so the neighbours keep their values, not their bits."""
    call = _spoiled(num_heads)
    assert call["block_table"].shape[1] == 7
    lens = call["seq_lens"].clone()
    lens[BAD] = value
    good, result = run(call), _banded_run(call | {"seq_lens": lens})
    patched = tuple(part.clone() for part in good)
    for part, new in zip(patched, result, strict=True):
        part[OTHERS] = new[OTHERS]
    check((patched[0], patched[1]), call)


@pytest.mark.parametrize(
    ("starts", "kept"),
    [
        ([0, 1, 0, 5, 6], [0, 5]),
        ([0, 5, 3, 5, 6], [5]),
        ([-4, 1, 3, 5, 6], [1, 2, 3, 4, 5]),
        ([0, 1, 3, 5, 99], [0, 1, 2, 3, 4, 5]),
        ([0, HUGE, -HUGE, 5, 6], []),
        ([6, 5, 3, 1, 0], []),
        ([3, 1, 3, 5, 6], [3, 4, 5]),
    ],
)
@both_kernels
def test_query_starts_that_fall_or_lie_outside(num_heads: int, starts: list[int], kept: list[int]) -> None:
    """``kept``: rows that one sequence claims, rightly, and no other."""
    call = _spoiled(num_heads)
    bad = call | {"cu_seqlens_q": torch.tensor(starts, dtype=torch.int32, device=DEVICE)}
    result = _banded_run(bad)
    # every row is somebody's or padding: none keeps what stood there
    assert not bool((result[0] == -768).any() | (result[1] == -768).any())
    patched = tuple(part.clone() for part in run(call))
    for part, new in zip(patched, result, strict=True):
        part[kept] = new[kept]
    check((patched[0], patched[1]), call)


@both_kernels
def test_everything_bad_at_once(num_heads: int) -> None:
    call = _spoiled(num_heads)
    # nothing is promised of the query lengths, so any sequence may have all of the tokens
    size = pagedmla.workspace_size(*problem_of(call, len(call["q"])), DEVICE, "gluon")
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        noise = {
            name: torch.randint(
                -(2**31), HUGE, call[name].shape, generator=generator, dtype=torch.int64
            ).int().to(DEVICE)
            for name in ("block_table", "seq_lens", "cu_seqlens_q")
        }  # fmt: skip
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
        _banded_run(call | noise | {"workspace": workspace})
        torch.cuda.synchronize()
