"""Values of the few-heads kernel against the float64 oracle, and the memory that it may touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import same_bits
from gluon_backend import (
    DEVICE,
    DTYPES,
    PERSISTENT,
    RANK,
    ROPE,
    arguments,
    check,
    checked,
    is_zero,
    make_batch,
    needs_hopper,
    problem_of,
    rows_of,
    run,
)
from torch import Tensor

import pagedmla
from pagedmla.contract.target import Target
from pagedmla.kernels.gluon import choice
from pagedmla.kernels.gluon.few_heads import launch as few_heads
from pagedmla.kernels.gluon.few_heads.pieces import PUBLISHED
from pagedmla.kernels.policy import GLUON_FEW_HEADS_CONFIG

# the oracle's matrices are large here
pytestmark = [needs_hopper, pytest.mark.all_threads]

EVEN: dict[str, Any] = {"cu_seqlens_q": None}
LENS = [131, 0, 1, 1030, 127, 64, 65, 128, 129, 2]
HEADS = (1, 2, 5, 8, 12, 16, 20, 32)
BLOCK_ROWS = GLUON_FEW_HEADS_CONFIG.block_rows[-1]
HUGE = 2**31 - 1


def workspace_of(call: dict[str, Any], byte: int = 0xFF) -> Tensor:
    """For any spread of the call's query tokens."""
    size = pagedmla.workspace_size(*problem_of(call, len(call["q"])), DEVICE)
    return torch.full((size,), byte, dtype=torch.uint8, device=DEVICE)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row tiles of the few-heads launches that were made."""
    seen: list[int] = []
    right = few_heads.launch_decode

    def launch_decode(args: Any, problem: Any, layout: few_heads.FewHeadsLayout, *others: Any) -> Any:
        seen.append(layout.block_rows)
        return right(args, problem, layout, *others)

    monkeypatch.setattr(few_heads, "launch_decode", launch_decode)
    return seen


@pytest.mark.parametrize(
    ("num_heads", "q_len"), [(n, q) for n in HEADS for q in (1, 2, 3, 4) if n * q <= 32], ids=str
)  # fmt: skip
def test_heads_and_query_lengths(num_heads: int, q_len: int, launched: list[int]) -> None:
    """Up to 32 rows a sequence, in whichever kernel; fewer keys than queries, and none; with and without query starts."""
    lens = [*LENS, q_len]
    call = arguments(make_batch(lens, [q_len] * len(lens), num_heads=num_heads))
    checked(call | EVEN)
    checked(call, max_q_len=q_len)
    assert len(launched) == (2 if num_heads * q_len <= BLOCK_ROWS else 0)
    checked(call | EVEN | {"causal": False})


@pytest.mark.parametrize("num_heads", [1, 5, 8, 16])
def test_ragged_queries_of_any_length(num_heads: int, launched: list[int]) -> None:
    """The average is small, so some sequences have several row tiles; many have no query token at all."""
    q_lens = [1, 2, 0, 4, 0, 0, 0, 1, 0, 1]
    call = arguments(make_batch(LENS, q_lens, num_heads=num_heads))
    checked(call)
    assert launched == [16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [64, 128, 192])
def test_pages(page_size: int, dtype: torch.dtype) -> None:
    lens = [page_size + 1, 0, 131, page_size, 3 * page_size - 1, 700]
    checked(arguments(make_batch(lens, num_heads=16, q_dtype=dtype), page_size) | EVEN)
    checked(
        arguments(make_batch(lens, [1, 1, 3, 2, 1, 2], num_heads=5, q_dtype=dtype), page_size), max_q_len=3
    )


@pytest.mark.parametrize("num_seqs", [1, 30, 31, 32, 33, 255, 256, 257, 600])
def test_any_number_of_sequences(num_seqs: int, launched: list[int]) -> None:
    """Around what is looked at at once, the padding's place included."""
    lens = [(37 * place + 5) % 300 for place in range(num_seqs)]
    checked(arguments(make_batch(lens, num_heads=16)) | EVEN)
    q_lens = [(7 * place + 1) % 4 for place in range(num_seqs)]
    checked(arguments(make_batch(lens, q_lens, num_heads=4)), max_q_len=3)
    assert launched == [16, 16]


def test_query_tokens_only_past_many_sequences_without_any(launched: list[int]) -> None:
    lens = [(37 * place) % 200 for place in range(530)]
    q_lens = [0] * 530
    q_lens[280], q_lens[529] = 2, 3
    checked(arguments(make_batch(lens, q_lens, num_heads=5)))
    assert launched == [16]


@pytest.mark.parametrize(
    "lens",
    [
        [4097, 0, 9001, 131, 6144, 1, 2048],
        [641, 45118, 1730, 1696],
        [65536],
        # as many for each program, and shares that are cut alike
        [1024] * 132,
        [1024] * 64,
        [4096] * 16,
    ],
    ids=lambda lens: f"{len(lens)}x{max(lens)}",
)  # fmt: skip
def test_long_sequences_in_few_and_in_many_pieces(lens: list[int]) -> None:
    checked(arguments(make_batch(lens, num_heads=16, spread=0.7)) | EVEN)


@pytest.mark.usefixtures("few_workers")
@pytest.mark.parametrize("num_heads", [1, 5, 16])
def test_few_workers_go_through_many_segments(num_heads: int) -> None:
    lens = [0, 300, 0, 0, 5, 1000, 0, 129, 128, 0, 64, 0, 2000, 1]
    q_lens = [1, 2, 1, 0, 1, 1, 0, 2, 1, 1, 0, 2, 0, 1]
    checked(arguments(make_batch(lens, q_lens, num_heads=num_heads)))
    checked(arguments(make_batch(lens, num_heads=num_heads)) | EVEN)


def test_rows_of_no_sequence_are_zero_whatever_they_hold() -> None:
    call = arguments(make_batch([0, 300, 0, 0, 3, 0], [1, 1, 2, 0, 3, 1], num_heads=5))
    padding = torch.full_like(call["q"][:3], torch.nan)
    padded = call | {"q": torch.cat([padding, call["q"], padding]), "cu_seqlens_q": call["cu_seqlens_q"] + 3}
    result = checked(padded, max_q_len=3, workspace=workspace_of(padded))
    assert is_zero(rows_of(result, [0, 1, 2, 3, 5, 6, 10, 11, 12, 13]))


def test_nothing_but_holes() -> None:
    for lens in ([0], [0] * 5, [0] * 300):
        call = arguments(make_batch(lens, num_heads=16))
        assert is_zero(run(call | EVEN))
        assert is_zero(run(call))


def test_a_workspace_is_never_cleared_and_may_have_served_any_other_shape(launched: list[int]) -> None:
    """Flags stand at one place for all batches; what one launch leaves there must not look published to another."""
    calls = [
        arguments(make_batch(lens, q_lens, num_heads=num_heads, spread=0.7))
        for lens, q_lens, num_heads in (
            ([9000, 40], None, 16),
            ([300] * 40, None, 8),
            ([20000], [3], 5),
            ([5, 0, 7000], [0, 2, 1], 4),
            ([130] * 300, None, 1),
            ([3000, 3000], [1, 1], 128),
        )
    ]
    workspace = max((workspace_of(call) for call in calls), key=len)
    layout = few_heads.layout_of(Target.detect(DEVICE).compute_units, 16)
    flags = layout.carve(workspace, DEVICE).flags
    expected = [checked(call) for call in calls]
    for order in ((0, 1, 2, 3, 4, 5), (5, 3, 1, 4, 0, 2), (2, 2, 0, 0, 4, 4)):
        for index in order:
            assert same_bits(expected[index], run(calls[index], workspace=workspace)), index
            assert not bool((flags == PUBLISHED.value).any()), index
    assert set(launched) == {16}
    # another backend's numbers in between
    run(calls[0], workspace=workspace, backend="triton")
    assert same_bits(expected[0], run(calls[0], workspace=workspace))


@pytest.mark.parametrize("start", [0, 1, 8, 15])
def test_nothing_around_a_workspace_is_written(start: int) -> None:
    call = arguments(make_batch([9000, 0, 131], num_heads=16, spread=0.7)) | EVEN
    size = len(workspace_of(call))
    storage = torch.full((size + 64,), 0xA5, dtype=torch.uint8, device=DEVICE)
    workspace = storage[start : start + size].fill_(0xFF)
    assert same_bits(checked(call, workspace=workspace), run(call))
    assert bool((storage[:start] == 0xA5).all() & (storage[start + size :] == 0xA5).all())


def _heads_first(q: Tensor) -> Tensor:
    return q.transpose(0, 1).contiguous().transpose(0, 1)


def _strided(tensor: Tensor) -> Tensor:
    """Every second number of a larger tensor of -1."""
    return torch.full((2 * len(tensor),), -1, dtype=tensor.dtype, device=DEVICE)[::2].copy_(tensor)


@pytest.mark.parametrize("cut", [False, True])
def test_the_same_numbers_give_the_same_bits_however_they_lie(cut: bool) -> None:
    call = arguments(make_batch([9000 if cut else 133, 0, 700], [1, 2, 3], num_heads=5, spread=0.7))
    plain = checked(call, max_q_len=3)
    latent, rope = call["q"].split([RANK, ROPE], -1)
    table = torch.full((6, 2 * call["block_table"].shape[1]), -1, dtype=torch.int32, device=DEVICE)
    for change in (
        {"q": torch.cat([call["q"], call["q"][..., :64]], -1)[..., :576]},
        {"q": _heads_first(call["q"])},
        {"q": (latent, rope)},
        {"q": (latent.contiguous(), rope.contiguous())},
        {"q": (_heads_first(latent), rope.contiguous())},
        {"kv_cache": torch.stack([torch.full_like(call["kv_cache"], torch.nan), call["kv_cache"]], 1)[:, 1]},
        {"block_table": table[::2, ::2].copy_(call["block_table"])},
        {"seq_lens": _strided(call["seq_lens"]), "cu_seqlens_q": _strided(call["cu_seqlens_q"])},
    ):
        for _ in range(2):
            # the second time straight to the driver
            assert same_bits(plain, run(call | change, max_q_len=3)), change.keys()


@pytest.mark.parametrize("extra", [0, 3, 8])
def test_out_and_lse_as_views(extra: int) -> None:
    call = arguments(make_batch([9000, 0, 700], [1, 2, 3], num_heads=5, spread=0.7))
    base = torch.full((6, 7, RANK + extra), -768.0, dtype=torch.bfloat16, device=DEVICE)
    lse_base = torch.full((7, 6), -768.0, device=DEVICE)
    out, lse = base[:, 1:6, :RANK], lse_base.t()[:, 1:6]
    check(run(call, max_q_len=3, out=out, lse=lse), call)
    for whole, view in ((base, out), (lse_base, lse)):
        view.fill_(-768.0)
        assert bool((whole == -768).all()), "memory between or around the rows was written"


@pytest.mark.parametrize("position", [0, 63, 64, 167, 168, 169])
@pytest.mark.parametrize("column", [0, 511, 575])
def test_one_broken_number_breaks_the_rows_that_see_it(position: int, column: int) -> None:
    call = arguments(make_batch([170, 133], [3, 2], num_heads=5))
    changed = call["kv_cache"].clone()
    changed[int(call["block_table"][0, position // 64]), position % 64, column] = torch.nan
    good, result = run(call, max_q_len=3), run(call | {"kv_cache": changed}, max_q_len=3)
    # query 0 sees the keys up to 167, query 1 those up to 168
    broken = [row for row in range(3) if position <= 167 + row]
    for row in broken:
        assert bool(result[0][row].isnan().all() & result[1][row].isnan().all()), row
    rest = [row for row in range(5) if row not in broken]
    assert same_bits(rows_of(good, rest), rows_of(result, rest))


@pytest.mark.parametrize("q_len", [1, 2])
def test_a_long_tail_beside_one_dominating_key_is_not_lost(q_len: int) -> None:
    """Each tile adds less than half an ulp to the sum of weights; all of them together move lse by 3e-5."""
    batch = make_batch([131072], [q_len], num_heads=8)
    keys, queries = batch.tokens[0], batch.queries[0]
    keys[...] = 0.0
    queries[...] = 0.0
    queries[..., 0] = 16.0
    # 20.1 nats below the first key, whose score is 0
    keys[:, 0] = -9.68
    keys[0, 0] = 0.0
    checked(arguments(batch), max_q_len=q_len)


def test_scores_far_from_zero() -> None:
    batch = make_batch([140, 9000], num_heads=16, spread=0.5)
    for sequence, keys in enumerate(batch.tokens):
        keys[:, -1] = -256.0
        batch.queries[sequence][..., -1] = 4096.0
    assert checked(arguments(batch) | EVEN)[1].max() < -1e5


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"seq_lens": [133, -1, 270, 5]}, [0, 3, 4, 5]),
        ({"seq_lens": [133, HUGE, 270, 5]}, [0, 3, 4, 5]),
        ({"cu_seqlens_q": [0, 1, 0, 5, 6]}, [0, 5]),
        ({"cu_seqlens_q": [0, 5, 3, 5, 6]}, [5]),
        ({"cu_seqlens_q": [-4, 1, 3, 5, 6]}, [1, 2, 3, 4, 5]),
        ({"cu_seqlens_q": [0, 1, 3, 5, 99]}, [0, 1, 2, 3, 4, 5]),
        ({"cu_seqlens_q": [0, HUGE, -HUGE, 5, 6]}, []),
        ({"cu_seqlens_q": [6, 5, 3, 1, 0]}, []),
        ({"cu_seqlens_q": [3, 1, 3, 5, 6]}, [3, 4, 5]),
    ],
    ids=str,
)  # fmt: skip
def test_lengths_and_query_starts_are_bounded(change: dict[str, list[int]], kept: list[int]) -> None:
    """``kept``: rows that one sequence claims, rightly, and no other; all rows are written, and nothing else."""
    call = arguments(make_batch([133, 120, 270, 5], [1, 2, 2, 1], num_heads=5))
    bad = call | {
        name: torch.tensor(values, dtype=torch.int32, device=DEVICE) for name, values in change.items()
    }
    out = torch.full((14, 5, RANK), -768.0, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((14, 5), -768.0, device=DEVICE)
    run(bad, max_q_len=2, out=out[4:-4], lse=lse[4:-4])
    for storage in (out, lse):
        assert bool((storage[:4] == -768).all() & (storage[-4:] == -768).all()), "guard rows were written"
        assert not bool((storage[4:-4] == -768).any()), "a row keeps what stood there"
    patched = tuple(part.clone() for part in run(call, max_q_len=2))
    for part, new in zip(patched, (out[4:-4], lse[4:-4]), strict=True):
        part[kept] = new[kept]
    check((patched[0], patched[1]), call)


def test_the_schedule_that_is_named_is_the_one_that_is_chosen() -> None:
    call = arguments(make_batch([9000, 5], num_heads=16, spread=0.7)) | EVEN
    plain = checked(call, **PERSISTENT)
    assert same_bits(plain, run(call, schedule="persistent"))
    assert same_bits(plain, run(call, backend=None))


def test_too_many_tiles_run_in_the_other_kernel(monkeypatch: pytest.MonkeyPatch, launched: list[int]) -> None:
    monkeypatch.setattr(choice, "_MOST_TILES_EACH", 1)
    # ragged queries of which one sequence may have more than 16 rows: still this backend's
    checked(arguments(make_batch([300, 0, 700], [1, 0, 2], num_heads=8)))
    assert launched == []
