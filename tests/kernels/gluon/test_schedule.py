"""The schedule of the Gluon kernels on a CPU: their own code, run by ``schedule_model``, against work laid out in a list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .schedule_batches import (
    FEW_HEADS_BATCHES,
    INT32_MAX,
    INT32_MIN,
    MANY_HEADS_BATCHES,
    MUTANTS,
    exponential,
    spread,
)
from .schedule_call import KEYS, MANY_HEADS, Call
from .schedule_check import check
from .schedule_language import Language, Number, number
from .schedule_model import run, schedule

# what choice.py lets the kernel divide: quotients of fewer bits than a float has
MOST_QUOTIENT = 2**22
SMALLEST = MANY_HEADS.smallest

BATCHES = [
    pytest.param(call, id=f"{kernel}: {name}")
    for kernel, batches in (("few heads", FEW_HEADS_BATCHES), ("many heads", MANY_HEADS_BATCHES))
    for name, call in batches.items()
]

# no kernel and no tensors: an example is as long as its programs are many
many = settings(max_examples=max(60, settings().max_examples))


@pytest.mark.parametrize("call", BATCHES)
def test_all_work_is_done_once(call: Call) -> None:
    check(call, run(call, each_tile=True), each_tile=True)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_schedule_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    kernels = [
        batches
        for kernel, batches in (("few_heads", FEW_HEADS_BATCHES), ("many_heads", MANY_HEADS_BATCHES))
        if not {"few_heads", "many_heads"} - {kernel} & {mutant.function.split(".")[0]}
    ]
    calls = [call for batches in kernels for call in batches.values()]
    for call in sorted(calls, key=lambda call: call.programs):
        try:
            check(call, run(call, mutant, each_tile=True), each_tile=True)
        except (AssertionError, IndexError):
            return
    pytest.fail("no batch shows it")


@pytest.mark.parametrize(
    ("num_seqs", "workers", "smallest", "largest"),
    [
        # whole row tiles, and programs left over
        (128, 128, 64, 64),
        (264, 132, 128, 128),
        (256, 128, 128, 128),
        # equal parts of a row tile
        (64, 128, 32, 32),
        (1, 64, 1, 1),
        # row tiles in twos would be for 100: so borders are cut, and each may move by 6 tiles
        (200, 132, 96 - 2 * 6, 97 + 2 * 6),
    ],
)
def test_equal_lengths(num_seqs: int, workers: int, smallest: int, largest: int) -> None:
    call = Call([4096] * num_seqs)
    check_sizes(call, workers, smallest, largest)


@pytest.mark.parametrize(
    ("num_seqs", "seq_len", "workers", "smallest", "largest"),
    [
        # whole groups, and programs left over
        (64, 4096, 64, 64, 64),
        (128, 4096, 64, 128, 128),
        # equal parts of a group
        (32, 4096, 64, 32, 32),
        # no part is smaller than that
        (1, 60 * SMALLEST * KEYS, 60, SMALLEST, SMALLEST),
        (1, (2 * SMALLEST - 1) * KEYS, 1, 2 * SMALLEST - 1, 2 * SMALLEST - 1),
        # groups that are smaller are not put together
        (60, (SMALLEST - 1) * KEYS, 60, SMALLEST - 1, SMALLEST - 1),
    ],
)
def test_equal_lengths_with_many_heads(
    num_seqs: int, seq_len: int, workers: int, smallest: int, largest: int
) -> None:
    call = Call([seq_len] * num_seqs, num_heads=128, lanes=2, programs=66)
    check_sizes(call, workers, smallest, largest)


def check_sizes(call: Call, workers: int, smallest: int, largest: int) -> None:
    programs = run(call)
    check(call, programs)
    assert programs[0].shares.workers == workers
    sizes = [end - begin for begin, end in (program.share for program in programs[:workers])]
    assert smallest <= min(sizes) <= max(sizes) <= largest


def test_who_has_short_sequences_has_fewer_keys() -> None:
    # as many KV tiles in sequences of one as in a long sequence
    call = Call([KEYS] * 132 + [132 * KEYS], num_heads=64, lanes=1, programs=5)
    programs = run(call)
    check(call, programs)
    sizes = [end - begin for begin, end in (program.share for program in programs)]
    keys = [
        sum(last - first for first, last in (segment.keys for segment in program.computed[0, 0].segments))
        for program in programs
    ]
    assert keys[0] * (1 + MANY_HEADS.extra) == sizes[0]
    assert keys[-1] > 2 * keys[0]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Batches of all kinds that choice.py gives to the kernels, in small launches more often than in large ones."""
    num_seqs = draw(st.one_of(st.integers(1, 8), st.integers(1, 40), st.sampled_from((255, 256, 257, 300))))
    capacity = draw(st.sampled_from((0, 1, 63, 640, 5000, 1 << 20)))
    longest = draw(st.sampled_from((1, 200, 700, 5000, 200_000)))
    length = st.one_of(
        st.integers(0, longest), st.just(longest), st.just(0), st.sampled_from((INT32_MIN, INT32_MAX))
    )
    few = draw(st.lists(length, min_size=1, max_size=8))
    kind = draw(st.sampled_from(("some of few", "all sizes", "exponential", "one is long")))
    lens = {
        "some of few": [few[i * 7 % 11 % len(few)] for i in range(num_seqs)],
        "all sizes": [few[0], *spread(num_seqs, longest)][:num_seqs],
        "exponential": exponential(num_seqs, longest // 4),
        "one is long": [longest, *[few[0]] * num_seqs][:num_seqs],
    }[kind]
    lanes = draw(st.sampled_from((0, 0, 1, 2, 2, 3, 4)))
    given = {
        "num_heads": draw(st.sampled_from((16, 100, 128) if lanes else (1, 3, 8, 12, 16))),
        "rows": draw(st.sampled_from((16, 16, 32))),
        "lanes": lanes,
        "capacity": capacity,
        "programs": draw(st.sampled_from((1, 2, 3, 7, 16, 16, 60))),
    }
    if draw(st.booleans()):
        return Call(lens, even_q_len=draw(st.sampled_from((1, 1, 2, 5))), **given)
    steps = draw(st.lists(st.sampled_from((0, 0, 1, 1, 2, 5, -2)), min_size=1, max_size=9))
    starts = [draw(st.integers(0, 2))]
    for i in range(num_seqs):
        starts.append(starts[-1] + steps[i % len(steps)])
    num_tokens = max(1, starts[-1] + draw(st.sampled_from((-3, 0, 0, 1, 20))))
    return Call(lens, starts, num_tokens, **given)


@many
@given(calls(), st.integers(-2, 2))
def test_any_batch(call: Call, ulps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Number, "ulps", ulps)
        check(call, run(call))


@pytest.mark.parametrize("ulps", range(-2, 3))
def test_divide(ulps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Number, "ulps", ulps)
    divide = schedule(Language())["divide"]
    rng = np.random.default_rng(ulps + 2)
    # of all sizes, and on both sides of multiples
    b = np.exp2(rng.uniform(0, 31, 20000)).astype(np.int64)
    q = np.minimum(np.exp2(rng.uniform(0, 22, b.size)).astype(np.int64), MOST_QUOTIENT - 1)
    b, q = np.append(b, [1, 1, 512, INT32_MAX]), np.append(q, [MOST_QUOTIENT - 1, 0, MOST_QUOTIENT - 1, 1])
    a = np.concatenate([q * b + shift for shift in (-1, 0, 1)] + [(q + 1) * b - 1])
    b = np.tile(b, 4)
    fits = (a >= 0) & (a <= INT32_MAX) & (a // b < MOST_QUOTIENT)
    a, b = a[fits], b[fits]
    assert a.size > 20000
    np.testing.assert_array_equal(divide(number(a), number(b)), a // b)
