"""What only a card can show of the Triton backend: streams, threads, repeats, compilations, real sizes, other devices."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from batches import same_bits
from torch import Tensor
from triton import knobs
from triton_backend import (
    INVARIANT,
    MODES,
    ON_CARD,
    PERSISTENT,
    SPLITS,
    arguments,
    check,
    checked,
    make_batch,
    run,
)

pytestmark = pytest.mark.skipif(not ON_CARD, reason="needs a CUDA device")

REAL = {"dims": (512, 64), "q_dtype": torch.bfloat16}


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 32, 64, 480])
def test_page_sizes(page_size: int) -> None:
    call = arguments(
        make_batch([page_size + 1, 0, 131, page_size], [1, 1, 3, 2], num_heads=16, **REAL), page_size
    )
    for mode in MODES:
        checked(call, **mode)


@pytest.mark.parametrize("num_heads", [1, 20, 128])
def test_long_sequences(num_heads: int) -> None:
    """More tiles than workers: whole row tiles, cut ones, and shares over several sequences."""
    lens = [4097, 0, 9001, 131, 6144, 1, 2048]
    batch = make_batch(lens, [1, 1, 2, 1, 0, 2, 1], num_heads=num_heads, spread=0.7, **REAL)
    call = arguments(batch, 64)
    for mode in MODES:
        checked(call, **mode)


def test_many_short_sequences() -> None:
    """More sequences than workers, and more than a block of the plan's scan."""
    lens = [(37 * place) % 300 for place in range(700)]
    call = arguments(make_batch(lens, num_heads=16, **REAL), 64)
    for mode in MODES:
        checked(call, **mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_side_stream(mode: dict[str, Any]) -> None:
    """All launches go to the current stream: what it writes just before is what they read."""
    call = arguments(make_batch([131, 0, 2000], [2, 1, 3], num_heads=16, **REAL), 64)
    expected = checked(call, **mode)
    late = {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}
    late["q"].fill_(torch.nan)
    late["seq_lens"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late["q"].copy_(call["q"])
        late["seq_lens"].copy_(call["seq_lens"])
        result = run(late, **mode)
    stream.synchronize()
    assert same_bits(expected, result)


def test_two_threads_on_two_streams() -> None:
    calls = [
        arguments(make_batch([131, 0, 5000], [2, 1, 3], num_heads=16, seed=1, **REAL), 64),
        arguments(make_batch([40, 700], [1, 1], num_heads=3, dims=(64, 16), seed=2), 16),
    ]
    alone = [checked(call) for call in calls]

    def repeat(index: int) -> list[tuple[Tensor, Tensor]]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [run(calls[index]) for _ in range(50)]
        stream.synchronize()
        return results

    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        for index, results in enumerate(pool.map(repeat, range(2))):
            assert all(same_bits(alone[index], result) for result in results)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_two_hundred_times_beside_another_kernel(mode: dict[str, Any]) -> None:
    """Rows without keys and rows of no sequence are in the mix; a matrix product takes multiprocessors away."""
    call = arguments(make_batch([131, 0, 3000, 1, 700], [2, 1, 3, 0, 1], num_heads=16, **REAL), 64)
    call["q"] = torch.cat([call["q"], torch.full_like(call["q"][:2], torch.nan)])
    first = run(call, **mode)
    check(first, call)
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    busy = torch.cuda.Stream()
    out, lse = torch.empty_like(first[0]), torch.empty_like(first[1])
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for turn in range(200):
        if turn % 4 == 0:
            with torch.cuda.stream(busy):
                matrix @ matrix
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        run(call, out=out, lse=lse, **mode)
        differences += (out.view(torch.int16) != first[0].view(torch.int16)).sum()
        differences += (lse.view(torch.int32) != first[1].view(torch.int32)).sum()
    assert differences.item() == 0


@contextmanager
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that are compiled, or loaded from Triton's cache of compiled ones, in here."""
    names: list[str] = []

    def listen(*, src: Any, **_: Any) -> None:
        names.append(str(getattr(src, "name", src)))

    with monkeypatch.context() as patch:
        patch.setattr(knobs.compilation, "listener", listen)
        yield names


@pytest.mark.parametrize("ragged", [False, True])
def test_a_sweep_of_steps_compiles_a_bounded_number_of_kernels(
    ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch sizes, lengths, table widths and pool sizes are no compile-time constants."""
    # a size that no other test has, so that nothing is there already; the hint keeps the rows of a tile the same
    dims = (96, 16)

    def sweep(sizes: range) -> None:
        for count in sizes:
            lens = [(31 * count * (place + 1)) % (7 * count + 40) for place in range(count)]
            call = arguments(
                make_batch(lens, num_heads=16, dims=dims),
                16,
                spare_columns=count % 5,
                spare_pages=1 + count % 3,
            )
            starts = {} if ragged else {"cu_seqlens_q": None}
            result = run(call | starts, max_q_len=1)
            if count % 25 == 1:
                check(result, call)

    with compilations(monkeypatch) as first:
        sweep(range(1, 301, 6))
    assert any("decode" in name for name in first)
    for kernel, most in (("decode", 2), ("plan", 2), ("merge", 6)):
        assert sum(kernel in name for name in first) <= most, first
    with compilations(monkeypatch) as again:
        sweep(range(2, 300, 7))
    assert len(again) <= 1, again


def test_the_device_is_the_tensors_device_whatever_is_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    call = arguments(make_batch([131, 0, 700], [2, 1, 3], num_heads=16, **REAL), 64)
    there = {name: v.to("cuda:1") if isinstance(v, Tensor) else v for name, v in call.items()}
    for mode in (PERSISTENT, SPLITS, INVARIANT):
        with torch.cuda.device(0):
            result = run(there, **mode)
        assert result[0].device == torch.device("cuda:1")
        check(result, there)
