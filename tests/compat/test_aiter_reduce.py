"""``mla_reduce_v1``: states in any places and numbers, against float64 sums of exponentials."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from batches import same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.compat import aiter
from pagedmla.compat.aiter import reduce
from pagedmla.contract.errors import InvalidArgument

U32 = 2.0**-24


def partials(
    counts: list[int], q_lens: list[int], num_heads: int = 3, dv: int = 5, *, spare: int = 2, seed: int = 0
) -> dict[str, Any]:
    """Random states of tiles, in permuted places of poisoned buffers; final rows that hold 7."""
    generator = torch.Generator().manual_seed(seed)
    q_len = max(q_lens)
    entries = sum(counts)
    # places are q_len rows apart and in any order; between and behind them is poison
    places = torch.randperm(entries + spare, generator=generator) * q_len
    outs = torch.full(((entries + spare) * q_len, num_heads, dv), math.nan)
    lses = torch.full((len(outs), num_heads), math.nan)
    for entry, tokens in enumerate(n for n, count in zip(q_lens, counts, strict=True) for _ in range(count)):
        rows = slice(int(places[entry]), int(places[entry]) + tokens)
        outs[rows] = torch.randn(tokens, num_heads, dv, generator=generator)
        lses[rows] = 4 * torch.randn(tokens, num_heads, generator=generator)
    starts = list(accumulate(q_lens, initial=0))
    return {
        "partial_output": outs,
        "partial_lse": lses,
        "reduce_indptr": torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32),
        "reduce_final_map": torch.tensor([starts[:-1], starts[1:]], dtype=torch.int32).T.contiguous(),
        "reduce_partial_map": torch.cat([places[:entries], torch.tensor([-9, 10**6])]).to(torch.int32),
        "max_seqlen_q": q_len,
        "num_kv_splits": 0,
        "final_output": torch.full((starts[-1], num_heads, dv), 7.0),
        "final_lse": torch.full((starts[-1], num_heads), 7.0),
    }


def check(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Merges, and holds every final row against float64, or against what it was."""
    before_out, before_lse = call["final_output"].clone(), call["final_lse"].clone()
    aiter.mla_reduce_v1(**call)
    out, lse = call["final_output"], call["final_lse"]
    indptr, places = call["reduce_indptr"].tolist(), call["reduce_partial_map"].tolist()
    wanted_out, wanted_lse = before_out.double(), before_lse.double()
    bound = torch.zeros_like(wanted_out)
    for tile, (begin, end) in enumerate(call["reduce_final_map"].tolist()):
        mine = places[indptr[tile] : indptr[tile + 1]]
        if len(mine) < 2 or begin == end:
            continue
        rows = torch.tensor(mine)[:, None] + torch.arange(end - begin)
        logs, states = call["partial_lse"][rows].double(), call["partial_output"][rows].double()
        logs = logs.masked_fill(logs == math.inf, -math.inf)
        total = torch.logsumexp(logs, 0)
        weights = torch.exp(logs - total.clamp(min=-1e300)).unsqueeze(-1)
        wanted_out[begin:end] = torch.where(weights == 0, 0.0, weights * states).sum(0)
        wanted_lse[begin:end] = total
        # a merge of two: products, a sum, exponentials of differences; as many as a tree is deep
        finite = logs.masked_fill(logs == -math.inf, 0.0).abs().amax().item()
        error = (16 + 4 * finite) * math.log2(len(mine) + 1) * U32 * states.nan_to_num(0.0).abs().amax(0)
        bound[begin:end] = error + torch.finfo(out.dtype).eps * (wanted_out[begin:end].abs() + error)
    assert bool(((out.double() - wanted_out).abs() <= bound).all())
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=2e-6)
    return out, lse


@pytest.mark.parametrize("num_heads", [1, 8, 20, 96])
@pytest.mark.parametrize("dv", [1, 64, 512])
def test_any_heads_and_sizes(num_heads: int, dv: int) -> None:
    check(partials([2, 0, 5, 1, 3], [1, 1, 1, 1, 1], num_heads, dv))


@pytest.mark.parametrize("counts", [[2], [17], [0, 0, 2], [64, 2, 0, 33], [1, 1], [3] * 9])
def test_any_numbers_of_states(counts: list[int]) -> None:
    check(partials(counts, [2] * len(counts)))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=6), st.integers(0, 99))
def test_ragged_tiles(tiles: list[tuple[int, int]], seed: int) -> None:
    counts, q_lens = [count for count, _ in tiles], [tokens for _, tokens in tiles]
    if max(q_lens):
        check(partials(counts, q_lens, seed=seed))


@pytest.mark.parametrize("counts", [[2, 0, 5, 1, 3], [1, 1, 1], [64]])
def test_what_a_device_does_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
    """It does not know how many states a tile has at most: the further rounds change nothing."""
    q_lens = [3] * len(counts)
    right = check(partials(counts, q_lens))
    monkeypatch.setattr(reduce, "_most_states", lambda counts, num_entries: num_entries)
    assert same_bits(check(partials(counts, q_lens)), right)


def test_no_value_is_read_on_a_device() -> None:
    """A meta tensor has no values: whatever waits for one raises."""
    call = partials([2, 0, 5], [1, 2, 1])
    aiter.mla_reduce_v1(**{k: v.to("meta") if isinstance(v, Tensor) else v for k, v in call.items()})


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_states_without_keys_add_nothing(empty: float, garbage: float) -> None:
    """Bit for bit where one state has keys; (0, -inf) where none has."""
    call = partials([3, 4, 2], [2, 2, 2])
    places, keep = call["reduce_partial_map"].tolist(), (1, 5)
    for entry, place in enumerate(places[:9]):
        if entry not in keep:
            call["partial_output"][place : place + 2] = garbage
            call["partial_lse"][place : place + 2] = empty
    aiter.mla_reduce_v1(**call)
    out, lse = call["final_output"], call["final_lse"]
    for tile, entry in enumerate(keep):
        rows, own = slice(2 * tile, 2 * tile + 2), slice(places[entry], places[entry] + 2)
        assert same_bits((out[rows], lse[rows]), (call["partial_output"][own], call["partial_lse"][own]))
    assert torch.equal(out[4:], torch.zeros(2, 3, 5))
    assert bool((lse[4:] == -math.inf).all())


def test_a_real_nan_stays_visible() -> None:
    call = partials([2, 2], [1, 1])
    call["partial_output"][call["reduce_partial_map"][1], 1, 2] = math.nan
    aiter.mla_reduce_v1(**call)
    assert call["final_output"].isnan().nonzero().tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_final_dtypes_and_strides(dtype: torch.dtype) -> None:
    """The caller's memory, where it is; what lies between its rows stays."""
    call = partials([3, 1, 2], [2, 1, 2])
    storage = torch.full((7, 6, 5), 7.0, dtype=dtype)
    lse_storage = torch.full((7, 6), 7.0)
    call |= {"final_output": storage[1:6, 1:4], "final_lse": lse_storage[1:6, 1:4]}
    out, _ = check(call)
    assert out.data_ptr() == storage[1:6, 1:4].data_ptr()
    between = torch.ones(7, 6, dtype=torch.bool)
    between[1:6, 1:4] = False
    assert bool((storage[between] == 7).all() & (lse_storage[between] == 7).all())


def test_a_tile_with_one_state_keeps_its_final_rows() -> None:
    """A nan of the caller's included, to the bit."""
    call = partials([1, 2, 0], [1, 1, 1])
    for row in (0, 2):
        call["final_output"][row], call["final_lse"][row] = math.nan, math.nan
    before = call["final_output"].clone()
    aiter.mla_reduce_v1(**call)
    assert same_bits((call["final_output"][[0, 2]],), (before[[0, 2]],))
    assert bool(call["final_lse"][[0, 2]].isnan().all() & call["final_output"][1].isfinite().all())


def test_without_lse_and_with_more_dimensions() -> None:
    plain = partials([3, 2], [1, 1])
    check(plain)
    lses = plain["partial_lse"]
    for shaped in (lses[:, None], lses[:, :, None], lses[:, None, :, None]):
        call = partials([3, 2], [1, 1])
        call |= {"partial_output": call["partial_output"][:, None], "partial_lse": shaped, "final_lse": None}
        aiter.mla_reduce_v1(**call)
        assert same_bits((call["final_output"],), (plain["final_output"],))


def test_without_a_final_map_tiles_have_rows_in_order() -> None:
    mapped, plain = partials([3, 1, 2], [2, 2, 2]), partials([3, 1, 2], [2, 2, 2])
    aiter.mla_reduce_v1(**mapped)
    aiter.mla_reduce_v1(**(plain | {"reduce_final_map": None}))
    assert same_bits((plain["final_output"],), (mapped["final_output"],))


def test_the_same_bits_every_time() -> None:
    results = []
    for _ in range(5):
        call = partials([7, 40, 2], [2, 1, 2], 16, 32)
        aiter.mla_reduce_v1(**call)
        results.append((call["final_output"], call["final_lse"]))
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("reduce_indptr", 1, -5),
        ("reduce_indptr", 1, 10**9),
        ("reduce_indptr", 3, 2**31 - 1),
        ("reduce_partial_map", 0, 10**9),
        ("reduce_partial_map", 0, -1),
        ("reduce_final_map", (0, 0), -3),
        ("reduce_final_map", (0, 1), 10**9),
        ("reduce_final_map", (0, 0), 10**9),
    ],
)
def test_garbage_in_the_maps_leads_nowhere(name: str, place: Any, value: int) -> None:
    call = partials([2, 3, 2], [2, 2, 2])
    storage = torch.full((8, 3, 5), 7.0)
    call["final_output"] = storage[1:7]
    call[name][place] = value
    aiter.mla_reduce_v1(**call)
    assert bool((storage[[0, 7]] == 7).all())


@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_nothing_to_merge(counts: list[int]) -> None:
    call = partials(counts or [0], [1] * len(counts or [0]))
    if not counts:
        call |= {"reduce_indptr": torch.zeros(1, dtype=torch.int32), "reduce_final_map": None}
    empty = {"reduce_partial_map": torch.zeros(0, dtype=torch.int32)}
    for changed in ({}, empty, empty | {name: call[name][:0] for name in ("partial_output", "partial_lse")}):
        aiter.mla_reduce_v1(**(call | changed))
        assert bool((call["final_output"] == 7).all() & (call["final_lse"] == 7).all())


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"partial_output": torch.zeros(18, 3, 5, dtype=torch.bfloat16)}, "dtype"),
        ({"partial_output": torch.zeros(18, 2, 3, 5)}, "rank"),
        ({"partial_output": torch.zeros(18, 3, 5, 1)}, "rank"),
        ({"partial_output": None}, "type"),
        ({"partial_lse": torch.zeros(3, 18)}, "shape"),
        ({"partial_lse": torch.zeros(7, 3, dtype=torch.float64)}, "dtype"),
        ({"reduce_indptr": torch.zeros(4)}, "dtype"),
        ({"reduce_indptr": torch.zeros(0, dtype=torch.int32)}, "shape"),
        ({"reduce_final_map": torch.zeros(1, 2, dtype=torch.int32)}, "shape"),
        ({"reduce_final_map": torch.zeros(2, 3, dtype=torch.int32)}, "shape"),
        ({"reduce_partial_map": torch.zeros(7, 2, dtype=torch.int32)}, "rank"),
        ({"max_seqlen_q": 0}, "max_seqlen_q"),
        ({"num_kv_splits": -1}, "num_kv_splits"),
        ({"final_output": torch.zeros(2, 4, 5)}, "shape"),
        ({"final_output": torch.zeros(2, 3, 5, dtype=torch.float64)}, "dtype"),
        ({"final_output": torch.zeros(2, 3, 5, device="meta")}, "device"),
        ({"final_lse": torch.zeros(3, 2)}, "shape"),
        ({"final_lse": torch.zeros(2, 3, dtype=torch.bfloat16)}, "dtype"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], code: str) -> None:
    call = partials([3, 2], [1, 1])
    with pytest.raises(InvalidArgument) as error:
        aiter.mla_reduce_v1(**(call | changed))
    assert (error.value.code, error.value.argument) == (code, next(iter(changed)))
