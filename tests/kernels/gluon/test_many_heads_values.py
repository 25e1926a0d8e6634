"""Values of the kernel for many rows against the float64 oracle: its pairs of KV tiles, its row tiles and its lanes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from batches import same_bits
from gluon_backend import (
    DEVICE,
    DTYPES,
    EVEN,
    TILE,
    arguments,
    checked,
    is_zero,
    make_batch,
    needs_hopper,
    rows_of,
    run,
    workspace_of,
)

from pagedmla.kernels.gluon.choice import Choice

# the oracle's matrices are large here
pytestmark = [needs_hopper, pytest.mark.all_threads]

LENS = [131, 0, 1, 1030, 127, 64, 65, 128, 129, 2]
SetLanes = Callable[[int], Choice]


@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_heads", [17, 20, 40, 64, 96, 128])
def test_heads_and_query_lengths(num_heads: int, q_len: int, launched: list[Choice]) -> None:
    """One row tile of a sequence to ten; fewer keys than queries, and none; with and without query starts and the mask."""
    lens = [*LENS, q_len]
    call = arguments(make_batch(lens, [q_len] * len(lens), num_heads=num_heads))
    checked(call | EVEN)
    checked(call, max_q_len=q_len)
    checked(call | EVEN | {"causal": False})
    assert {choice.kernel for choice in launched} == {"many_heads"}
    # no row tile of a sequence is left empty
    assert {-(-num_heads * q_len // 64) % choice.lanes for choice in launched} == {0}


@pytest.mark.parametrize("num_heads", [17, 20, 40, 64, 96, 128])
def test_ragged_queries(num_heads: int) -> None:
    """Sequences without query tokens, with one and with many, so that lanes have row tiles of some and none of others."""
    call = arguments(make_batch(LENS, [1, 2, 0, 4, 0, 0, 7, 1, 0, 1], num_heads=num_heads))
    checked(call)
    checked(call, max_q_len=7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [20, 192])
def test_half_precision_in_pieces(num_heads: int, dtype: torch.dtype) -> None:
    checked(arguments(make_batch([9000, 0, 77], num_heads=num_heads, q_dtype=dtype, spread=0.7)) | EVEN)


@pytest.mark.parametrize(("num_heads", "programs"), [(20, 3), (128, 6)])
@pytest.mark.parametrize("tail", [0, -1, -63])
def test_shares_that_end_in_the_middle_of_a_pair(
    tail: int, num_heads: int, programs: int, set_compute_units: Callable[[int], None]
) -> None:
    """All numbers of tiles up to 27 in three programs, in each of two lanes too: pieces of odd and of even numbers of tiles."""
    set_compute_units(programs)
    for tiles in range(1, 28):
        checked(arguments(make_batch([tiles * TILE + tail], num_heads=num_heads)) | EVEN)


@pytest.mark.usefixtures("few_workers")
@pytest.mark.parametrize("q_len", [1, 3])
def test_odd_numbers_of_tiles_follow_one_another(q_len: int) -> None:
    """Of each sequence; a pair's second tile that does not exist holds what the last one left there."""
    lens = [TILE * tiles + step for tiles in (1, 3, 0, 5, 7, 2, 9, 1, 0, 11) for step in (0, 1)]
    batch = make_batch(lens, [q_len] * len(lens), num_heads=20)
    checked(arguments(batch) | EVEN)
    checked(arguments(batch))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("num_heads", [17, 64, 128, 192, 320])
def test_any_number_of_lanes(num_heads: int, count: int, set_lanes: SetLanes) -> None:
    """More lanes than row tiles, fewer, and numbers that do not go into them: a ragged batch may have them all."""
    set_lanes(count)
    lens = [131, 0, 4097, 1, 700, 64, 128]
    checked(arguments(make_batch(lens, num_heads=num_heads, spread=0.7)) | EVEN)
    checked(arguments(make_batch(lens, [1, 2, 1, 0, 3, 1, 0], num_heads=num_heads, spread=0.7)))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_lanes_write_nothing_but_their_rows_and_leave_their_flags_0(count: int, set_lanes: SetLanes) -> None:
    """Three row tiles a sequence and one: with two lanes or four, some have none."""
    choice = set_lanes(count)
    call = arguments(make_batch([9000, 0, 131, 5000], [3, 0, 1, 1], num_heads=64, spread=0.7))
    out = torch.full((13, 64, 512), -768.0, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((13, 64), -768.0, device=DEVICE)
    workspace = workspace_of(call)
    checked(call, workspace=workspace, out=out[4:-4], lse=lse[4:-4])
    for storage in (out, lse):
        assert bool((storage[:4] == -768).all() & (storage[-4:] == -768).all()), "guard rows were written"
    flags = choice.layout.carve(workspace, DEVICE).flags
    # it was full of -1
    assert bool(((flags == 0) | (flags == -1)).all() & (flags == 0).any())


@pytest.mark.parametrize("num_seqs", [1, 31, 32, 33, 255, 256, 257, 600])
def test_any_number_of_sequences(num_seqs: int) -> None:
    """Around what is looked at at once, the padding's place included."""
    lens = [(37 * place + 5) % 200 for place in range(num_seqs)]
    checked(arguments(make_batch(lens, num_heads=17)) | EVEN)
    q_lens = [(7 * place + 1) % 4 for place in range(num_seqs)]
    checked(arguments(make_batch(lens, q_lens, num_heads=17)), max_q_len=3)


def test_query_tokens_only_past_many_sequences_without_any() -> None:
    lens = [(37 * place) % 200 for place in range(530)]
    q_lens = [0] * 530
    q_lens[280], q_lens[529] = 2, 3
    checked(arguments(make_batch(lens, q_lens, num_heads=40)))


def test_rows_past_the_last_query_start_are_zero_in_every_lane() -> None:
    """Padding counts as one more sequence, without keys, whose row tiles are shared out like others."""
    call = arguments(make_batch([300, 5], [1, 2], num_heads=128))
    padding = torch.full_like(call["q"][:1].expand(5, -1, -1), torch.nan)
    padded = call | {"q": torch.cat([call["q"], padding])}
    assert is_zero(rows_of(checked(padded, workspace=workspace_of(padded)), slice(3, None)))


@pytest.mark.parametrize("num_heads", [64, 128])
def test_two_hundred_times_the_same_bits_whatever_the_workspace_holds(num_heads: int) -> None:
    """With one lane and two; noise in the workspace before each launch, but where a flag would be read as set."""
    call = arguments(make_batch([9000, 0, 131, 3000], num_heads=num_heads, spread=0.7)) | EVEN
    plain = checked(call)
    workspace = workspace_of(call)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(200):
        workspace.random_(0, 256)
        found = run(call, workspace=workspace)
        wrong += sum(
            (a.view(torch.int16) != b.view(torch.int16)).sum() for a, b in zip(found, plain, strict=True)
        )
    assert int(wrong) == 0
    assert same_bits(plain, run(call))
