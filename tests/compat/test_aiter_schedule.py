"""The schedule of the persistent mode: run by a slow executor that knows the buffers alone, merged, and held to the oracle."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from batches import arguments, expect, make_batch
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches
from torch import Tensor

from pagedmla.compat import aiter
from pagedmla.conformance import numerics
from pagedmla.contract.target import Target
from pagedmla.paging.csr import CSR, block_table_to_csr

NAMES = (
    "work_metadata_ptrs",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


@pytest.fixture
def four_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "detect", lambda device: Target("cpu", "test", 4, 0))


def make_buffers(
    num_requests: int, q_len: int, num_heads: int, num_workers: int, rest: int = 99
) -> dict[str, Any]:
    """Buffers for so many workers, as large as the info function says, full of ``rest``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "detect", lambda device: Target("cpu", "test", num_workers, 0))
        dtypes = (torch.bfloat16, torch.bfloat16)
        info = aiter.get_mla_metadata_info_v1(num_requests, q_len, num_heads, *dtypes, is_sparse=False)
    return {
        name: torch.full(_shape(size), rest, dtype=dtype)
        for name, (size, dtype) in zip(NAMES, info, strict=True)
    }


def _shape(size: int | tuple[int, ...]) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else size


@dataclass(frozen=True)
class Step:
    """A batch with its pages as AITER has them."""

    call: dict[str, Any]
    csr: CSR

    @classmethod
    def of(cls, call: dict[str, Any]) -> Step:
        page_size = call["kv_cache"].shape[1]
        return cls(call, block_table_to_csr(call["block_table"], call["seq_lens"], page_size))

    @property
    def num_heads(self) -> int:
        return self.call["q"].shape[1]

    @property
    def page_size(self) -> int:
        return self.call["kv_cache"].shape[1]

    @property
    def q_len(self) -> int:
        return max(1, int(self.call["cu_seqlens_q"].diff().max()))

    def plan(self, buffers: dict[str, Any], **options: Any) -> None:
        known = {"max_seqlen_qo": self.q_len, "page_size": self.page_size, "kv_granularity": 1}
        aiter.get_mla_metadata_v1(
            self.call["cu_seqlens_q"],
            self.csr.kv_indptr,
            self.csr.kv_last_page_len,
            self.num_heads,
            1,
            self.call["causal"],
            **buffers,
            **(known | options),
        )


def works_of(buffers: dict[str, Any]) -> list[list[list[int]]]:
    """Each worker's works."""
    indptr, info = buffers["work_indptr"].tolist(), buffers["work_info_set"].tolist()
    return [info[begin:end] for begin, end in pairwise(indptr)]


def execute(step: Step, buffers: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What a kernel does with the buffers, work by work, in float64; the states rounded to float32, then merged."""
    call = step.call
    heads, rank = step.num_heads, call["kv_lora_rank"]
    out_dtype = torch.bfloat16 if call["q"].dtype.itemsize == 1 else call["q"].dtype
    num_rows = buffers["reduce_partial_map"].shape[0] * step.q_len
    partial_out = torch.full((num_rows, 1, heads, rank), math.nan)
    partial_lse = torch.full((num_rows, 1, heads, 1), math.nan)
    out = torch.full((call["q"].shape[0], heads, rank), math.nan, dtype=out_dtype)
    lse = torch.full((call["q"].shape[0], heads), math.nan)
    taken: Counter[int] = Counter()
    for works in works_of(buffers):
        for work in works:
            row, q_begin, q_end = work[1:4]
            state_out, state_lse = attend(step, work)
            if row < 0:
                out[q_begin:q_end], lse[q_begin:q_end] = state_out.to(out_dtype), state_lse
                continue
            rows = slice(row, row + q_end - q_begin)
            taken.update(range(rows.start, rows.stop))
            partial_out[rows, 0], partial_lse[rows, 0, :, 0] = state_out.float(), state_lse.float()
    assert max(taken, default=-1) < num_rows
    assert set(taken.values()) <= {1}
    maps = [buffers[name] for name in NAMES[3:]]
    aiter.mla_reduce_v1(partial_out, partial_lse, *maps, step.q_len, 0, out, lse)
    return out, lse


def attend(step: Step, work: list[int]) -> tuple[Tensor, Tensor]:
    """One work from its eight numbers: out f64 [tokens, heads, rank] and lse f64 [tokens, heads]."""
    request, _, q_begin, q_end, page_begin, page_end, offset, padding = work
    assert padding == 0
    call = step.call
    pages = step.csr.kv_indices[page_begin:page_end].long()
    num_tokens = len(pages) * step.page_size + min(offset, 0)
    keys = call["kv_cache"][pages].flatten(0, 1)[: max(0, num_tokens)].double()
    # from the request's end: its last token is at 1
    distance = len(pages) * step.page_size + offset - torch.arange(len(keys))
    last_query = int(call["cu_seqlens_q"][request + 1]) - 1
    after = last_query - torch.arange(q_begin, q_end)
    seen = (
        distance > after[:, None] if call["causal"] else torch.ones(len(after), len(keys), dtype=torch.bool)
    )
    scores = call["softmax_scale"] * (call["q"][q_begin:q_end].double() @ keys.T)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.clamp(min=-1e300)[..., None])
    return weights @ keys[:, : call["kv_lora_rank"]], lse


def check(step: Step, buffers: dict[str, Any]) -> None:
    comparison = numerics.compare(*execute(step, buffers), expect(step.call))
    assert comparison.passed, comparison.detail


def check_invariants(step: Step, buffers: dict[str, Any], granularity: int = 1) -> None:
    """What consumers of the buffers take for granted, beside the values."""
    indptr = buffers["work_indptr"].tolist()
    assert indptr[0] == 0
    assert indptr == sorted(indptr)
    works = [work for own in works_of(buffers) for work in own]
    assert len(works) == indptr[-1] <= buffers["work_info_set"].shape[0]
    by_tile: dict[tuple[int, int], list[list[int]]] = {}
    for work in works:
        by_tile.setdefault((work[0], work[2]), []).append(work)
    # one tile after another, each tile's works in the order of its keys
    assert [work for tile in by_tile.values() for work in tile] == works
    for tile in by_tile.values():
        first, last = step.csr.kv_indptr[tile[0][0] : tile[0][0] + 2].tolist()
        assert tile[0][4] == first
        assert all(one[5] == two[4] for one, two in pairwise(tile))
        assert all((work[4] - first) % granularity == 0 for work in tile)
        assert tile[-1][5] <= last
        # the end of the request in tokens, from any of its works
        length = int(step.call["seq_lens"][tile[0][0]])
        assert {(work[5] - first) * step.page_size + work[6] for work in tile} == {length}
        assert {work[1] == -1 for work in tile} == {len(tile) == 1}
    _check_reduce_maps(list(by_tile.values()), buffers)
    rows = [range(work[2], work[3]) for tile in by_tile.values() for work in tile[:1]]
    assert [row for span in rows for row in span] == list(range(step.call["q"].shape[0]))
    assert works == sorted(works, key=lambda work: (work[0], work[2], work[4]))
    assert not buffers["work_info_set"][len(works) :].any()


def _check_reduce_maps(tiles: list[list[list[int]]], buffers: dict[str, Any]) -> None:
    indptr, final_map, partial_map = (buffers[name].tolist() for name in NAMES[3:])
    split = [tile for tile in tiles if len(tile) > 1]
    assert indptr[0] == 0
    assert [count for count in (b - a for a, b in pairwise(indptr)) if count] == [len(tile) for tile in split]
    groups = [number for number, (a, b) in enumerate(pairwise(indptr)) if b > a]
    assert [final_map[number] for number in groups] == [tile[0][2:4] for tile in split]
    rows = [work[1] for tile in split for work in tile]
    assert partial_map[: indptr[-1]] == rows
    assert set(partial_map[indptr[-1] :]) <= {-1}


def lengths(page_size: int) -> list[int]:
    return [131, 0, 1, page_size, page_size + 1, 127, 3]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_run_work_by_work(page_size: int, num_workers: int) -> None:
    step = Step.of(arguments(make_batch(lengths(page_size), num_heads=16), page_size))
    buffers = make_buffers(7, 1, 16, num_workers)
    step.plan(buffers)
    check_invariants(step, buffers)
    check(step, buffers)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_heads", [1, 20, 64, 128])
def test_several_query_tokens(num_heads: int, causal: bool) -> None:
    """Ragged, none for some, more than keys, and several tiles a request where heads are many."""
    q_lens = [4, 1, 3, 2, 0, 8, 8]
    step = Step.of(arguments(make_batch(lengths(16), q_lens, num_heads=num_heads, causal=causal), 16))
    buffers = make_buffers(7, 8, num_heads, 5)
    step.plan(buffers)
    check_invariants(step, buffers)
    check(step, buffers)


@given(st.data())
def test_any_batch_any_workers(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 3, 16, 64]))
    batch = data.draw(batches(page_size, max_q_len=5, most=150, causal=data.draw(st.booleans())))
    step = Step.of(arguments(batch, page_size))
    granularity = data.draw(st.sampled_from([1, 2, 16]))
    room = data.draw(st.integers(0, 2))
    buffers = make_buffers(
        len(batch.seq_lens) + room, step.q_len + room, step.num_heads, data.draw(st.integers(1, 12))
    )
    step.plan(buffers, kv_granularity=granularity)
    check_invariants(step, buffers, granularity)
    check(step, buffers)


@pytest.mark.parametrize(("page_size", "granularity"), [(1, 16), (16, 2), (64, 1)])
def test_shares_are_equal(page_size: int, granularity: int) -> None:
    """In blocks of kv_granularity pages; a request without keys counts as one."""
    seq_lens = [2000, 1, 0, 640, 131, 17, 5000, 3]
    step = Step.of(arguments(make_batch(seq_lens, num_heads=16), page_size))
    buffers = make_buffers(8, 1, 16, 7)
    step.plan(buffers, kv_granularity=granularity)
    check_invariants(step, buffers, granularity)
    shares = [
        sum(max(1, -(-(work[5] - work[4]) // granularity)) for work in own) for own in works_of(buffers)
    ]
    assert max(shares) - min(shares) <= 1
    assert len(works_of(buffers)[0]) == 1  # the long one is cut, and not left to one worker


def test_by_hand() -> None:
    """Two requests of 3 and 1 pages of 16 tokens, the last ones not full, on two workers: two blocks each."""
    buffers = make_buffers(2, 1, 16, 2)
    qo, kv, last = (torch.tensor(values, dtype=torch.int32) for values in ([0, 1, 2], [0, 3, 4], [5, 16]))
    aiter.get_mla_metadata_v1(
        qo, kv, last, 16, 1, True, **buffers, page_size=16, kv_granularity=1, max_seqlen_qo=1
    )
    assert buffers["work_indptr"].tolist() == [0, 1, 3]
    assert buffers["work_info_set"].tolist() == [
        [0, 0, 0, 1, 0, 2, 5, 0],  # 37 tokens: 5 are left behind page 2
        [0, 1, 0, 1, 2, 3, -11, 0],  # 11 are missing in the third page
        [1, -1, 1, 2, 3, 4, 0, 0],
    ]
    assert buffers["reduce_indptr"].tolist() == [0, 2, 2]
    assert buffers["reduce_final_map"].tolist() == [[0, 1], [1, 2]]
    assert buffers["reduce_partial_map"].tolist() == [0, 1]
    addresses = [buffers["work_indptr"].data_ptr(), buffers["work_info_set"].data_ptr()]
    assert buffers["work_metadata_ptrs"].tolist() == addresses


def test_the_partial_map_ends_with_the_states() -> None:
    """One request whole, the other cut twice: every work is used, and one entry is not."""
    step = Step.of(arguments(make_batch([1, 80], num_heads=16), 16))
    buffers = make_buffers(2, 1, 16, 3)
    step.plan(buffers)
    check_invariants(step, buffers)
    assert buffers["work_indptr"].tolist() == [0, 2, 3, 4]
    assert buffers["reduce_partial_map"].tolist() == [0, 1, 2, -1]


def test_refilled_for_other_lengths_nothing_stale_is_left() -> None:
    """A captured graph replays the same calls on the same buffers."""
    buffers = make_buffers(4, 2, 16, 6)
    for seq_lens in ([500, 1, 131, 64], [0, 0, 0, 0], [3, 700, 0, 1], [127, 127, 127, 127]):
        step = Step.of(arguments(make_batch(seq_lens, [2, 1, 0, 2], num_heads=16), 16))
        step.plan(buffers, max_seqlen_qo=2)
        fresh = make_buffers(4, 2, 16, 6, rest=-7)
        step.plan(fresh, max_seqlen_qo=2)
        assert all(torch.equal(buffers[name], fresh[name]) for name in NAMES[1:])
        check_invariants(step, buffers)
        check(step, buffers)


def test_without_a_known_query_length_a_request_is_one_tile() -> None:
    step = Step.of(arguments(make_batch([131, 5, 0], [9, 2, 1], num_heads=128), 16))
    buffers = make_buffers(3, 9, 128, 5)
    for options in ({"max_seqlen_qo": -1}, {"max_seqlen_qo": -1, "uni_seqlen_qo": 9}):
        step.plan(buffers, **options)
        check_invariants(step, buffers)
        check(step, buffers)
    works = [work for own in works_of(buffers) for work in own]
    assert max(work[3] - work[2] for work in works) == 1


@pytest.mark.parametrize("budget", [1, 2, 100])
def test_a_budget_of_splits(budget: int) -> None:
    """As in AITER a budget for the batch: so many workers for each request, wherever they are needed."""
    step = Step.of(arguments(make_batch([900, 0, 3], num_heads=16), 16))
    buffers = make_buffers(3, 1, 16, 20)
    step.plan(buffers, max_split_per_batch=budget)
    check_invariants(step, buffers)
    check(step, buffers)
    assert sum(bool(own) for own in works_of(buffers)) == min(20, 3 * budget)


@pytest.mark.parametrize("q_len", [1, 2, 4, 7])
@pytest.mark.parametrize("num_heads", [8, 16, 32, 48, 64, 96, 128])
def test_buffers_that_aiter_sizes_are_large_enough(num_heads: int, q_len: int) -> None:
    """With its fewest tiles, 128 packed rows each (a token each for 48 heads, and for more than 64), and as many workers."""
    for batch, workers in ((1, 1), (1, 304), (64, 256), (300, 8)):
        tiles = q_len if num_heads == 48 or num_heads > 64 else -(-q_len * num_heads // 128)
        aiters = {
            "work_indptr": workers + 1,
            "work_info_set": (batch + workers - 1) * tiles,
            "reduce_indptr": batch * tiles + 1,
            "reduce_final_map": batch * tiles,
            "reduce_partial_map": min(batch + workers - 1, 2 * (workers - 1)) * tiles,
        }
        ours = make_buffers(batch, q_len, num_heads, workers)
        assert all(ours[name].shape[0] <= rows for name, rows in aiters.items())


def test_no_requests() -> None:
    buffers = make_buffers(2, 1, 16, 3)
    qo, nothing = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    aiter.get_mla_metadata_v1(qo, qo, nothing, 16, 1, True, **buffers)
    assert all(not buffers[name].any() for name in NAMES[1:])


@pytest.mark.parametrize("name", ["seqlens_qo_indptr", "seqlens_kv_indptr", "kv_last_page_lens"])
@pytest.mark.parametrize("value", [-1, 2**31 - 1, -(2**31)])
def test_garbage_on_the_device_stays_in_the_buffers(name: str, value: int) -> None:
    step = Step.of(arguments(make_batch([131, 5, 64], num_heads=16), 16))
    given = {
        "seqlens_qo_indptr": step.call["cu_seqlens_q"],
        "seqlens_kv_indptr": step.csr.kv_indptr,
        "kv_last_page_lens": step.csr.kv_last_page_len,
    }
    given[name][1] = value
    buffers = make_buffers(3, 1, 16, 4)
    aiter.get_mla_metadata_v1(
        **given,
        num_heads_per_head_k=16,
        num_heads_k=1,
        is_causal=True,
        page_size=16,
        max_seqlen_qo=1,
        **buffers,
    )
    indptr = buffers["work_indptr"].tolist()
    assert indptr == sorted(indptr)
    assert 0 <= indptr[0] <= indptr[-1] <= buffers["work_info_set"].shape[0]
    entries = buffers["reduce_indptr"].tolist()
    assert entries == sorted(entries)
    assert 0 <= entries[0] <= entries[-1] <= buffers["reduce_partial_map"].shape[0]
    assert int(buffers["reduce_partial_map"].max()) < buffers["reduce_partial_map"].shape[0]


@pytest.mark.usefixtures("four_workers")
def test_sizes_by_hand() -> None:
    """Three requests of up to five tokens, 64 heads: tiles of two tokens, three of them a request."""
    info = aiter.get_mla_metadata_info_v1(3, 5, 64, torch.bfloat16, torch.bfloat16, False)
    assert [size for size, _ in info] == [2, 5, (12, 8), 10, (9, 2), 6]
    assert [dtype for _, dtype in info] == [torch.uint64, *[torch.int32] * 5]


def test_workers_are_the_devices_own() -> None:
    units = Target.detect("cpu").compute_units
    info = aiter.get_mla_metadata_info_v1(1, 1, 20, torch.bfloat16, torch.bfloat16, False, device="cpu")
    assert info[1][0] == units + 1
