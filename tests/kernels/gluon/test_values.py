"""Values of the Gluon kernel against the float64 oracle, for everything that its row of the support table takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import same_bits
from gluon_backend import (
    DEVICE,
    DTYPES,
    MODES,
    PAIR,
    PERSISTENT,
    SPLITS,
    arguments,
    check,
    checked,
    is_zero,
    make_batch,
    needs_hopper,
    rows_of,
    run,
)

import pagedmla

# the oracle's matrices are large here
pytestmark = [needs_hopper, pytest.mark.all_threads]

# around row tiles of 64, powers of two and not, and what models have on one to eight GPUs
HEADS = (17, 20, 31, 33, 63, 64, 65, 96, 127, 128, 130)
EVEN: dict[str, Any] = {"cu_seqlens_q": None}


@pytest.mark.parametrize("num_heads", HEADS)
def test_head_counts(num_heads: int) -> None:
    """Several query tokens: row tiles begin and end within a token, and the causal mask within a row tile."""
    call = arguments(make_batch([300, 1, 0, 129, 64], [2, 1, 1, 3, 0], num_heads=num_heads))
    for mode in (PERSISTENT, SPLITS):
        checked(call, **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("num_heads", [20, 128])
def test_one_query_token_a_sequence(num_heads: int, mode: dict[str, Any]) -> None:
    lens = [131, 0, 1, 4097, 127, 64, 65, 128, 129, 1000]
    checked(arguments(make_batch(lens, num_heads=num_heads)) | EVEN, **mode)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [64, 128, 192])
def test_pages(page_size: int, dtype: torch.dtype) -> None:
    """Blocks of 64 keys within pages of one, two and three of them."""
    lens = [page_size + 1, 0, 131, page_size, 3 * page_size - 1, 700]
    call = arguments(make_batch(lens, [1, 1, 3, 2, 1, 2], q_dtype=dtype), page_size)
    for mode in MODES:
        checked(call, **mode)


def test_page_sizes_agree_bit_by_bit() -> None:
    """The same KV tiles, however they are cut into pages."""
    batch = make_batch([700, 131, 33, 1])
    results = [run(arguments(batch, page_size)) for page_size in (64, 128, 192)]
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5])
def test_query_lengths(q_len: int, mode: dict[str, Any]) -> None:
    """Fewer keys than queries, keys around the edges of blocks and pairs; even batches, with and without query starts."""
    lens = [0, 1, q_len - 1, q_len, 63, 64, 65, 66, 127, 128, 129, 130, 255, 256, 257, 700]
    call = arguments(make_batch(lens, [q_len] * len(lens), num_heads=20))
    checked(call, **mode)
    checked(call | EVEN, **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_ragged_queries(mode: dict[str, Any]) -> None:
    call = arguments(
        make_batch([131, 0, 1, 1030, 127, 64, 65, 128, 3], [2, 1, 3, 4, 0, 1, 2, 3, 5], num_heads=24)
    )
    checked(call, **mode)
    checked(call, max_q_len=5, **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_query_sees_every_key_without_the_mask(mode: dict[str, Any]) -> None:
    call = arguments(make_batch([300, 2, 0, 129], [3, 5, 1, 0], causal=False))
    full = checked(call, **mode)
    causal = run(call, causal=True, **mode)
    assert not same_bits((causal[0][:2],), (full[0][:2],))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_lengths_around_blocks_and_pairs(mode: dict[str, Any]) -> None:
    lens = [pairs * PAIR + step for pairs in (1, 2, 5) for step in (-65, -64, -63, -1, 0, 1, 63)]
    checked(arguments(make_batch([0, 1, *lens], num_heads=20)) | EVEN, **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_fully_masked_rows_lead_the_batch(mode: dict[str, Any]) -> None:
    """Twenty queries over six keys: the first fourteen see none, and a row tile of theirs has no key at all."""
    result = checked(arguments(make_batch([6, 300], [20, 1], num_heads=20)), **mode)
    assert is_zero(rows_of(result, slice(0, 14)))
    assert bool((result[1][14:] > -torch.inf).all())


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_holes_and_rows_of_no_sequence_are_zero(mode: dict[str, Any]) -> None:
    """Sequences without keys; rows before the first query start and past the last one, whatever they hold."""
    call = arguments(make_batch([0, 300, 0, 0, 3, 0], [1, 1, 2, 0, 3, 1]))
    padding = torch.full_like(call["q"][:3], torch.nan)
    padded = call | {"q": torch.cat([padding, call["q"], padding]), "cu_seqlens_q": call["cu_seqlens_q"] + 3}
    out = torch.full((14, 32, 512), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((14, 32), torch.nan, device=DEVICE)
    result = checked(padded, out=out, lse=lse, **mode)
    assert is_zero(rows_of(result, [0, 1, 2, 3, 5, 6, 10, 11, 12, 13]))


@pytest.mark.parametrize("lens", [[0], [0] * 5])
def test_nothing_but_holes(lens: list[int]) -> None:
    call = arguments(make_batch(lens))
    for mode in MODES:
        assert is_zero(run(call, **mode))
        assert is_zero(run(call | {"block_table": call["block_table"][:, :0]}, **mode))
        assert is_zero(run(call | {"kv_cache": call["kv_cache"][:0]}, **mode))


@pytest.mark.parametrize("num_splits", [1, 2, 7, 64])
def test_any_number_of_splits(num_splits: int) -> None:
    """More splits than pairs are empty ones; one split is written at once, its logarithm too."""
    call = arguments(make_batch([700, 0, 131, 1], [2, 1, 1, 3]))
    lse = torch.full((7, 32), torch.nan, device=DEVICE)
    checked(call, num_kv_splits=num_splits, lse=lse)
    assert not bool(lse.isnan().any())


@pytest.mark.parametrize("num_heads", [20, 128])
def test_long_sequences(num_heads: int) -> None:
    """More pairs than workers: whole row tiles, cut ones, and shares over several sequences."""
    lens = [4097, 0, 9001, 131, 6144, 1, 2048]
    call = arguments(make_batch(lens, [1, 1, 2, 1, 0, 2, 1], num_heads=num_heads, spread=0.7))
    for mode in MODES:
        checked(call, **mode)


def test_many_short_sequences() -> None:
    """More sequences than workers: a program goes through several segments, with and without keys."""
    lens = [(37 * place) % 300 for place in range(700)]
    call = arguments(make_batch(lens, num_heads=20)) | EVEN
    for mode in MODES:
        checked(call, **mode)


@pytest.mark.usefixtures("few_workers")
@pytest.mark.parametrize("num_heads", [20, 128])
def test_few_workers_go_through_many_segments(num_heads: int) -> None:
    """Segments without a pair, with one and with several follow one another in one program."""
    lens = [0, 300, 0, 0, 5, 1000, 0, 129, 128, 0, 64, 0, 2000, 1]
    q_lens = [1, 2, 1, 3, 1, 1, 0, 2, 1, 1, 1, 2, 3, 1]
    call = arguments(make_batch(lens, q_lens, num_heads=num_heads))
    checked(call)
    checked(arguments(make_batch(lens, num_heads=num_heads)) | EVEN)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_asking_for_lse_changes_no_bit_of_out(mode: dict[str, Any]) -> None:
    call = arguments(make_batch([700, 0, 16], [1, 2, 3]))
    plain, plain_lse = run(call, **mode)
    given, given_lse = run(call, lse=torch.full((6, 32), math.nan, device=DEVICE), **mode)
    into, _ = run(call, out=torch.full_like(plain, math.nan), **mode)
    assert same_bits((plain, plain, plain_lse), (given, into, given_lse))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [*MODES, {"num_kv_splits": 1}], ids=str)
def test_natural_logarithm_by_hand(mode: dict[str, Any], dtype: torch.dtype) -> None:
    """n equal keys of score s: lse is s + ln n, whichever pieces they were cut into."""
    lengths = [1, 2, 65, 500]
    q = torch.full((4, 20, 576), 0.125, dtype=dtype, device=DEVICE)
    kv = torch.full((32, 64, 576), 0.5, dtype=dtype, device=DEVICE)
    table = torch.arange(32, dtype=torch.int32, device=DEVICE).view(4, 8)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out, lse = pagedmla.decode(q, kv, table, seq_lens, softmax_scale=0.25, backend="gluon", **mode)
    wanted = torch.tensor([9.0 + math.log(n) for n in lengths], device=DEVICE)
    torch.testing.assert_close(lse, wanted[:, None].expand(4, 20), rtol=1e-6, atol=1e-6)
    assert bool((out == 0.5).all())


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beyond_half_precision(dtype: torch.dtype, mode: dict[str, Any]) -> None:
    """Scores past 65504, positive and negative, by margins that leave one key or two equal ones."""
    batch = make_batch([140, 300, 3], num_heads=20, q_dtype=dtype)
    for sequence, keys in enumerate(batch.tokens):
        keys[:, -1] = torch.arange(len(keys)).to(dtype) % 4 * 64 - 96
        batch.queries[sequence][..., -1] = 6000.0
    scores = batch.softmax_scale * batch.queries[0][0].double() @ batch.tokens[0].double().T
    assert scores.max() > 65504
    assert scores.min() < -65504
    checked(arguments(batch), **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("spread", [0.0, 60.0])
def test_flat_and_large_scores(spread: float, mode: dict[str, Any]) -> None:
    checked(arguments(make_batch([300, 64, 1], spread=spread)), **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_all_scores_far_below_zero(mode: dict[str, Any]) -> None:
    """A running maximum must start at minus infinity, not at 0 or at -1e4."""
    batch = make_batch([140, 300], num_heads=20, spread=0.5)
    for sequence, keys in enumerate(batch.tokens):
        keys[:, -1] = -256.0
        batch.queries[sequence][..., -1] = 4096.0
    assert checked(arguments(batch), **mode)[1].max() < -1e5


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_one_key_dominates_wherever_it_stands(mode: dict[str, Any]) -> None:
    """In either block of a pair, in the first pair or the last: the other's state is rescaled."""
    places = (0, 63, 64, 127, 128, 200, 299)
    batch = make_batch([300] * len(places), num_heads=20)
    for sequence, position in enumerate(places):
        query = batch.queries[sequence][0, 0].float()
        batch.tokens[sequence][position] = (30.0 * query / query.norm()).to(torch.bfloat16)
    checked(arguments(batch), **mode)


@pytest.mark.parametrize("q_len", [1, 2])
def test_a_long_tail_beside_one_dominating_key_is_not_lost(q_len: int) -> None:
    """Each pair adds less than half an ulp to the sum of weights; all of them together move lse by 3e-5."""
    batch = make_batch([131072], [q_len], num_heads=20)
    keys, queries = batch.tokens[0], batch.queries[0]
    keys[...] = 0.0
    queries[...] = 0.0
    queries[..., 0] = 16.0
    # 20.1 nats below the first key, whose score is 0
    keys[:, 0] = -9.68
    keys[0, 0] = 0.0
    checked(arguments(batch), num_kv_splits=1)


def test_the_backend_that_is_chosen_is_this_one() -> None:
    call = arguments(make_batch([300, 5], [1, 2]))
    assert same_bits(run(call), run(call, backend=None))


def test_every_row_and_head_has_its_own_answer() -> None:
    out, _ = run(arguments(make_batch([200, 30, 140], [2, 1, 2], num_heads=20)))
    assert len({tuple(row.tolist()) for row in out.flatten(0, 1)}) == 100


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_autocast_and_inference_mode_change_no_bit(mode: dict[str, Any]) -> None:
    call = arguments(make_batch([300, 0, 17], [1, 2, 3]))
    plain = run(call, **mode)
    check(plain, call)
    with torch.autocast("cuda", torch.float16):
        assert same_bits(plain, run(call, **mode))
    with torch.inference_mode():
        assert same_bits(plain, run(call, **mode))
