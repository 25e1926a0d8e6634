"""1 to 8 ranks in one process: each one's part and the merge, against the oracle over the whole cache."""

from __future__ import annotations

import pytest
import torch
from batches import arguments, make_batch, run, same_bits
from distributed.shards import OWNERS, difference, local_call, virtual
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import batches

import pagedmla
from pagedmla.contract.errors import InvalidArgument
from pagedmla.distributed import ContextParallel, KeySharding, decode_local, local_rows

LENS = [0, 1, 127, 131, 16, 17, 32, 3]
"""Nothing, one token, primes, a page's edges, and fewer tokens than queries."""


@pytest.mark.parametrize("layout", OWNERS)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_shards_merge_into_one_pass(layout: str, num_ranks: int) -> None:
    batch = make_batch(LENS, [1, 2, 3, 4, 4, 3, 2, 4], num_heads=3, q_dtype=torch.float32)
    assert difference(virtual(batch, layout, num_ranks), batch, OWNERS[layout][1], num_ranks) == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", OWNERS)
@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_an_even_batch_in_half_precision(layout: str, q_len: int, dtype: torch.dtype) -> None:
    batch = make_batch(LENS, [q_len] * len(LENS), num_heads=3, q_dtype=dtype)
    result = virtual(batch, layout, 4, cu_seqlens_q=None)
    assert difference(result, batch, OWNERS[layout][1], 4) == ""


@pytest.mark.parametrize("layout", OWNERS)
def test_without_causality_every_query_sees_every_key(layout: str) -> None:
    batch = make_batch(LENS, [1, 2, 3, 4, 4, 0, 2, 4], num_heads=3, q_dtype=torch.float32, causal=False)
    assert difference(virtual(batch, layout, 3), batch, OWNERS[layout][1], 3) == ""


@given(st.data())
def test_any_batch_on_any_number_of_ranks(data: st.DataObject) -> None:
    batch = data.draw(batches(16, max_q_len=5, max_seqs=3, most=60, q_dtype=torch.float32))
    assume(sum(batch.q_lens) > 0)
    layout, num_ranks = data.draw(st.sampled_from(list(OWNERS))), data.draw(st.integers(1, 8))
    page_size = data.draw(st.sampled_from((1, 3, 16, 64)))
    result = virtual(batch, layout, num_ranks, page_size)
    assert difference(result, batch, OWNERS[layout][1], num_ranks) == ""


@pytest.mark.parametrize("layout", OWNERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_a_token_has_one_place_and_the_count_of_each_rank_says_it(layout: str, num_ranks: int) -> None:
    sharding, owner = OWNERS[layout]
    for length in (1, 2, 7, 40, 41, 127, 131, 400):
        lengths = torch.tensor([length])
        ranks, places = sharding.place(torch.arange(length)[None], lengths[:, None], num_ranks)
        counts = [0] * num_ranks
        for token in range(length):
            rank = owner(token, length, num_ranks)
            assert (int(ranks[0, token]), int(places[0, token])) == (rank, counts[rank])
            counts[rank] += 1
            seen = torch.tensor([token + 1])
            assert [int(sharding.owned(seen, lengths, r, num_ranks)) for r in range(num_ranks)] == counts


def test_contiguous_cuts_of_each_sequence_stay_while_it_grows() -> None:
    cuts = torch.tensor([10, 0, 2], dtype=torch.int32)
    sharding = KeySharding.contiguous(cuts)
    batch = make_batch([25, 3, 4], [2, 3, 1], num_heads=2, q_dtype=torch.float32)

    def rank_of(token: int, length: int) -> int:
        return min(token // {25: 10, 3: 1, 4: 2}[length], 1)

    states = []
    for rank in range(2):
        call = local_call(batch, lambda t, n, w: rank_of(t, n), rank, 2)
        states.append(decode_local(**call, backend="torch", sharding=sharding, rank=rank, num_ranks=2))
    result = pagedmla.merge_states(*zip(*states, strict=True))
    assert difference(result, batch, lambda t, n, w: rank_of(t, n), 2) == ""


def test_a_query_sees_nothing_of_a_rank_whose_tokens_come_after_it() -> None:
    rows = local_rows(
        torch.tensor([[7, 8]], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        num_tokens=4,
        sharding=KeySharding.round_robin(),
        rank=1,
        num_ranks=2,
    )
    # queries at positions 1 2 3 4; rank 1 holds tokens 1 and 3
    assert rows.seq_lens.tolist() == [1, 1, 2, 2]
    assert rows.block_table.tolist() == [[7, 8]] * 4


def test_tokens_of_no_sequence_and_sequences_without_tokens() -> None:
    starts = torch.tensor([1, 3, 3, 4], dtype=torch.int32)
    rows = local_rows(
        torch.tensor([[5], [6], [7]], dtype=torch.int32),
        torch.tensor([9, 9, 4], dtype=torch.int32),
        num_tokens=6,
        sharding=KeySharding.round_robin(),
        rank=0,
        num_ranks=2,
        cu_seqlens_q=starts,
    )
    assert rows.seq_lens.tolist() == [0, 4, 5, 2, 0, 0]
    assert rows.block_table[1:4].tolist() == [[5], [5], [7]]


@pytest.mark.parametrize("value", [-(2**31), -1, 2**31 - 1])
def test_garbage_lengths_stay_numbers(value: int) -> None:
    rows = local_rows(
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([value], dtype=torch.int32),
        num_tokens=2,
        sharding=KeySharding.contiguous(2**31),
        rank=7,
        num_ranks=8,
    )
    assert rows.seq_lens.tolist() == [0, 0]


def test_a_step_without_sequences() -> None:
    batch = make_batch([4], [2], q_dtype=torch.float32)
    call = arguments(batch) | {"block_table": torch.zeros(0, 1, dtype=torch.int32), "backend": "torch"}
    call |= {"seq_lens": torch.zeros(0, dtype=torch.int32), "cu_seqlens_q": torch.zeros(1, dtype=torch.int32)}
    out, lse = decode_local(**call, sharding=KeySharding.round_robin(), rank=0, num_ranks=2)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


def test_without_a_group_it_is_plain_decode() -> None:
    call = arguments(make_batch(LENS, [1, 2, 3, 4, 4, 3, 2, 4], num_heads=3))
    for heads in ("replicated", "sharded"):
        alone = ContextParallel(KeySharding.round_robin(), heads=heads)
        assert (alone.rank, alone.num_ranks) == (0, 1)
        assert same_bits(alone.decode(**call, backend="torch"), run(call))


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: KeySharding.interleaved(0), "run"),
        (lambda: KeySharding.interleaved(True), "run"),
        (lambda: KeySharding.interleaved(None), "run"),  # type: ignore[arg-type]
        (lambda: KeySharding.contiguous(-1), "tokens_per_rank"),
        (lambda: KeySharding.contiguous(torch.ones(2)), "tokens_per_rank"),
        (lambda: KeySharding("striped", 1), "kind"),
        (lambda: ContextParallel("round_robin"), "sharding"),  # type: ignore[arg-type]
        (lambda: ContextParallel(KeySharding.round_robin(), heads="both"), "heads"),
        (lambda: ContextParallel(KeySharding.round_robin(), check="no"), "check"),  # type: ignore[arg-type]
        (lambda: ContextParallel(KeySharding.round_robin(), timeout=0), "timeout"),
        (lambda: ContextParallel(KeySharding.round_robin(), -100), "group"),  # type: ignore[arg-type]
    ],
)
def test_wrong_layouts_and_groups_are_refused(make: object, argument: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()  # type: ignore[operator]
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"rank": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"num_ranks": 0}, "num_ranks"),
        ({"sharding": "round_robin"}, "sharding"),
        ({"sharding": KeySharding.contiguous(torch.ones(3, dtype=torch.int32))}, "tokens_per_rank"),
        ({"seq_lens": torch.ones(2, dtype=torch.int64)}, "seq_lens"),
        ({"seq_lens": [1, 2]}, "seq_lens"),
        ({"block_table": torch.ones(3, 2, dtype=torch.int32)}, "block_table"),
        ({"cu_seqlens_q": torch.zeros(4, dtype=torch.int32)}, "cu_seqlens_q"),
        ({"cu_seqlens_q": None}, "q"),
        ({"q": "q"}, "q"),
        ({"q": torch.ones(3, 40)}, "q"),
    ],
)
def test_wrong_arguments_of_a_rank_are_refused(change: dict[str, object], argument: str) -> None:
    call = arguments(make_batch([9, 5], [2, 1])) | {"rank": 0, "num_ranks": 2}
    call |= {"sharding": KeySharding.round_robin(), "backend": "torch"}
    with pytest.raises(InvalidArgument) as caught:
        decode_local(**(call | change))
    assert caught.value.argument == argument


class _CountedChecks:
    """Stands in for an Agreement: counts."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def check(self, call: object) -> None:
        self.calls.append(call)


@pytest.mark.parametrize(("check", "checks"), [(None, [1, 1, 2, 2, 3]), (True, [1, 2, 3, 4, 5])])
def test_on_a_device_each_kind_of_call_is_checked_once(
    monkeypatch: pytest.MonkeyPatch, check: bool | None, checks: list[int]
) -> None:
    parallel = ContextParallel(KeySharding.round_robin(), check=check)
    monkeypatch.setattr(parallel, "_describe", lambda *given: {})
    counted, seen = _CountedChecks(), []
    # heads, scale of each call; meta: a device that is not the CPU, without one
    for heads, scale in ((4, 0.1), (4, 0.1), (3, 0.1), (4, 0.1), (4, 0.2)):
        q = torch.empty(2, heads, 40, device="meta")
        parallel._agree(counted, q, {"kv_cache": q}, {"softmax_scale": scale}, None, None)  # type: ignore[arg-type]
        seen.append(len(counted.calls))
    assert seen == checks
