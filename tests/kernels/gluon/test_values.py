"""Values of the Gluon kernels against the float64 oracle, for everything that their row of the support table takes."""

from __future__ import annotations

import math

import pytest
import torch
from batches import same_bits
from gluon_backend import (
    DEVICE,
    DTYPES,
    EVEN,
    PAIR,
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

# around row tiles of 16 and of 64, powers of two and not, and what models have on one to eight GPUs
HEADS = (1, 2, 5, 8, 12, 15, 16, 17, 20, 31, 33, 40, 63, 64, 65, 96, 127, 128, 130)


@pytest.mark.parametrize("num_heads", HEADS)
def test_head_counts(num_heads: int) -> None:
    """Several query tokens: row tiles begin and end within a token, and the causal mask within a row tile."""
    call = arguments(make_batch([300, 1, 0, 129, 64], [2, 1, 1, 3, 0], num_heads=num_heads))
    checked(call)
    checked(call, max_q_len=3)


@pytest.mark.parametrize("num_heads", [5, 16, 20, 64, 128, 192, 256])
def test_one_query_token_a_sequence(num_heads: int) -> None:
    lens = [131, 0, 1, 4097, 127, 64, 65, 128, 129, 1000]
    checked(arguments(make_batch(lens, num_heads=num_heads)) | EVEN)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [64, 128, 192])
def test_pages(page_size: int, dtype: torch.dtype) -> None:
    """Blocks of 64 keys within pages of one, two and three of them."""
    lens = [page_size + 1, 0, 131, page_size, 3 * page_size - 1, 700]
    call = arguments(make_batch(lens, [1, 1, 3, 2, 1, 2], q_dtype=dtype), page_size)
    checked(call)


@pytest.mark.parametrize(
    ("num_heads", "pages"), [(16, (64, 1, 2, 3, 16, 48, 96, 128, 192, 480)), (20, (64, 128, 192))], ids=str
)
def test_page_sizes_agree_bit_by_bit(num_heads: int, pages: tuple[int, ...]) -> None:
    """The same KV tiles, however they are cut into pages, and whoever copies them."""
    batch = make_batch([700, 131, 33, 1], num_heads=num_heads)
    first, *others = [run(arguments(batch, page_size) | EVEN) for page_size in pages]
    for page_size, other in zip(pages[1:], others, strict=True):
        assert same_bits(first, other), page_size


@pytest.mark.parametrize("num_heads", [3, 20, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5])
def test_query_lengths(q_len: int, num_heads: int) -> None:
    """Fewer keys than queries, keys around the edges of tiles and pairs; even batches, with and without query starts.

    From one row tile of a sequence to ten.
    """
    lens = [0, 1, q_len - 1, q_len, 63, 64, 65, 66, 127, 128, 129, 130, 255, 256, 257, 700]
    call = arguments(make_batch(lens, [q_len] * len(lens), num_heads=num_heads))
    checked(call)
    checked(call | EVEN)
    checked(call, max_q_len=q_len)


@pytest.mark.parametrize("num_heads", [4, 24, 128])
def test_ragged_queries(num_heads: int) -> None:
    """Of four heads an average sequence has few rows, and one that has the most of them many."""
    call = arguments(
        make_batch([131, 0, 1, 1030, 127, 64, 65, 128, 3], [2, 1, 3, 4, 0, 1, 2, 3, 5], num_heads=num_heads)
    )
    checked(call)
    checked(call, max_q_len=5)


@pytest.mark.parametrize("num_heads", [4, 32])
def test_every_query_sees_every_key_without_the_mask(num_heads: int) -> None:
    call = arguments(make_batch([300, 2, 0, 129], [3, 5, 1, 0], num_heads=num_heads, causal=False))
    full = checked(call)
    causal = run(call, causal=True)
    assert not same_bits((causal[0][:2],), (full[0][:2],))


@pytest.mark.parametrize("num_heads", [16, 20])
def test_lengths_around_tiles_and_pairs(num_heads: int) -> None:
    lens = [pairs * PAIR + step for pairs in (1, 2, 5) for step in (-65, -64, -63, -1, 0, 1, 63)]
    checked(arguments(make_batch([0, 1, *lens], num_heads=num_heads)) | EVEN)


@pytest.mark.parametrize("num_heads", [1, 20])
def test_fully_masked_rows_lead_the_batch(num_heads: int) -> None:
    """Twenty queries over six keys: the first fourteen see none, and a row tile of theirs has no key at all."""
    result = checked(arguments(make_batch([6, 300], [20, 1], num_heads=num_heads)))
    assert is_zero(rows_of(result, slice(0, 14)))
    assert bool((result[1][14:] > -torch.inf).all())


@pytest.mark.parametrize("num_heads", [5, 32])
def test_holes_and_rows_of_no_sequence_are_zero(num_heads: int) -> None:
    """Sequences without keys; rows before the first query start and past the last one, whatever they hold."""
    call = arguments(make_batch([0, 300, 0, 0, 3, 0], [1, 1, 2, 0, 3, 1], num_heads=num_heads))
    padding = torch.full_like(call["q"][:3], torch.nan)
    padded = call | {"q": torch.cat([padding, call["q"], padding]), "cu_seqlens_q": call["cu_seqlens_q"] + 3}
    out = torch.full((14, num_heads, 512), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((14, num_heads), torch.nan, device=DEVICE)
    result = checked(padded, out=out, lse=lse)
    assert is_zero(rows_of(result, [0, 1, 2, 3, 5, 6, 10, 11, 12, 13]))


@pytest.mark.parametrize("num_heads", [16, 32])
@pytest.mark.parametrize("lens", [[0], [0] * 5, [0] * 300], ids=len)
def test_nothing_but_holes(lens: list[int], num_heads: int) -> None:
    call = arguments(make_batch(lens, num_heads=num_heads))
    assert is_zero(run(call))
    assert is_zero(run(call | EVEN))
    assert is_zero(run(call | {"block_table": call["block_table"][:, :0]}))
    assert is_zero(run(call | {"kv_cache": call["kv_cache"][:0]}))


@pytest.mark.parametrize("num_heads", [5, 20, 128])
def test_long_sequences(num_heads: int) -> None:
    """More tiles than programs: whole row tiles, cut ones, and shares over several sequences."""
    lens = [4097, 0, 9001, 131, 6144, 1, 2048]
    call = arguments(make_batch(lens, [1, 1, 2, 1, 0, 2, 1], num_heads=num_heads, spread=0.7))
    checked(call)


@pytest.mark.parametrize("num_heads", [16, 20])
def test_many_short_sequences(num_heads: int) -> None:
    """More sequences than programs: each goes through several segments, with and without keys."""
    lens = [(37 * place) % 300 for place in range(700)]
    checked(arguments(make_batch(lens, num_heads=num_heads)) | EVEN)


@pytest.mark.usefixtures("few_workers")
@pytest.mark.parametrize("num_heads", [1, 5, 16, 20, 128])
def test_few_workers_go_through_many_segments(num_heads: int) -> None:
    """Segments without a tile, with one and with several follow one another in one program."""
    lens = [0, 300, 0, 0, 5, 1000, 0, 129, 128, 0, 64, 0, 2000, 1]
    q_lens = [1, 2, 1, 3, 1, 1, 0, 2, 1, 1, 1, 2, 3, 1]
    call = arguments(make_batch(lens, q_lens, num_heads=num_heads))
    checked(call)
    checked(arguments(make_batch(lens, num_heads=num_heads)) | EVEN)


@pytest.mark.parametrize("num_heads", [5, 32])
def test_asking_for_lse_changes_no_bit_of_out(num_heads: int) -> None:
    call = arguments(make_batch([700, 0, 16], [1, 2, 3], num_heads=num_heads))
    plain, plain_lse = run(call)
    given, given_lse = run(call, lse=torch.full((6, num_heads), math.nan, device=DEVICE))
    into, _ = run(call, out=torch.full_like(plain, math.nan))
    assert same_bits((plain, plain, plain_lse), (given, into, given_lse))


@pytest.mark.parametrize("num_heads", [16, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_natural_logarithm_by_hand(dtype: torch.dtype, num_heads: int) -> None:
    """n equal keys of score s: lse is s + ln n, whichever pieces they were cut into."""
    lengths = [1, 2, 65, 500]
    q = torch.full((4, num_heads, 576), 0.125, dtype=dtype, device=DEVICE)
    kv = torch.full((32, 64, 576), 0.5, dtype=dtype, device=DEVICE)
    table = torch.arange(32, dtype=torch.int32, device=DEVICE).view(4, 8)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out, lse = pagedmla.decode(q, kv, table, seq_lens, softmax_scale=0.25, backend="gluon")
    wanted = torch.tensor([9.0 + math.log(n) for n in lengths], device=DEVICE)
    torch.testing.assert_close(lse, wanted[:, None].expand(4, num_heads), rtol=1e-6, atol=1e-6)
    assert bool((out == 0.5).all())


@pytest.mark.parametrize("num_heads", [16, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beyond_half_precision(dtype: torch.dtype, num_heads: int) -> None:
    """Scores past 65504, positive and negative, by margins that leave one key or two equal ones."""
    batch = make_batch([140, 300, 3], num_heads=num_heads, q_dtype=dtype)
    for sequence, keys in enumerate(batch.tokens):
        keys[:, -1] = torch.arange(len(keys)).to(dtype) % 4 * 64 - 96
        batch.queries[sequence][..., -1] = 6000.0
    scores = batch.softmax_scale * batch.queries[0][0].double() @ batch.tokens[0].double().T
    assert scores.max() > 65504
    assert scores.min() < -65504
    checked(arguments(batch))


@pytest.mark.parametrize("num_heads", [16, 32])
@pytest.mark.parametrize("spread", [0.0, 60.0])
def test_flat_and_large_scores(spread: float, num_heads: int) -> None:
    checked(arguments(make_batch([300, 64, 1], num_heads=num_heads, spread=spread)) | EVEN)


@pytest.mark.parametrize("num_heads", [16, 20])
def test_all_scores_far_below_zero(num_heads: int) -> None:
    """A running maximum must start at minus infinity, not at 0 or at -1e4; in one piece and in several."""
    batch = make_batch([140, 9000], num_heads=num_heads, spread=0.5)
    for sequence, keys in enumerate(batch.tokens):
        keys[:, -1] = -256.0
        batch.queries[sequence][..., -1] = 4096.0
    assert checked(arguments(batch) | EVEN)[1].max() < -1e5


@pytest.mark.parametrize("num_heads", [16, 20])
def test_one_key_dominates_wherever_it_stands(num_heads: int) -> None:
    """In either tile of a pair, in the first pair or the last: the other's state is rescaled."""
    places = (0, 63, 64, 127, 128, 200, 299)
    batch = make_batch([300] * len(places), num_heads=num_heads)
    for sequence, position in enumerate(places):
        query = batch.queries[sequence][0, 0].float()
        batch.tokens[sequence][position] = (30.0 * query / query.norm()).to(torch.bfloat16)
    checked(arguments(batch))


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("num_heads", [8, 20])
def test_a_long_tail_beside_one_dominating_key_is_not_lost(num_heads: int, q_len: int) -> None:
    """Each tile adds less than half an ulp to the sum of weights; all of them together move lse by 3e-5.

    One program has them all: in shares of their own they would not meet that key.
    """
    batch = make_batch([131072], [q_len], num_heads=num_heads)
    keys, queries = batch.tokens[0], batch.queries[0]
    keys[...] = 0.0
    queries[...] = 0.0
    queries[..., 0] = 16.0
    # 20.1 nats below the first key, whose score is 0
    keys[:, 0] = -9.68
    keys[0, 0] = 0.0
    checked(arguments(batch), max_q_len=q_len)


@pytest.mark.parametrize("num_heads", [5, 32])
def test_the_backend_that_is_chosen_is_this_one_and_its_schedule_has_a_name(num_heads: int) -> None:
    call = arguments(make_batch([9000, 5], [1, 2], num_heads=num_heads, spread=0.7))
    plain = checked(call)
    assert same_bits(plain, run(call, backend=None))
    assert same_bits(plain, run(call, schedule="persistent"))


@pytest.mark.parametrize("num_heads", [5, 20, 128])
def test_every_row_and_head_has_its_own_answer(num_heads: int) -> None:
    out, _ = run(arguments(make_batch([200, 30, 140], [2, 1, 2], num_heads=num_heads)))
    assert len({tuple(row.tolist()) for row in out.flatten(0, 1)}) == 5 * num_heads


@pytest.mark.parametrize("num_heads", [5, 32])
def test_autocast_and_inference_mode_change_no_bit(num_heads: int) -> None:
    call = arguments(make_batch([300, 0, 17], [1, 2, 3], num_heads=num_heads))
    plain = run(call)
    check(plain, call)
    with torch.autocast("cuda", torch.float16):
        assert same_bits(plain, run(call))
    with torch.inference_mode():
        assert same_bits(plain, run(call))
