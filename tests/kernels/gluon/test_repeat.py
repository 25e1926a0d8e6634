"""The same call gives the same bits, two hundred times and beside other work: a race between the warpgroups would show here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gluon_backend import DEVICE, arguments, check, checked, make_batch, needs_hopper, run
from torch import Tensor

# the oracle's matrices are large here
pytestmark = [needs_hopper, pytest.mark.all_threads]


def _differences(call: dict[str, Any], times: int, beside: bool) -> int:
    """How many numbers of out and lse differ from the first run's, over all of ``times`` runs."""
    first = run(call)
    check(first, call)
    out, lse = torch.empty_like(first[0]), torch.empty_like(first[1])
    found = torch.zeros((), dtype=torch.int64, device=DEVICE)
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()
    for step in range(times):
        if beside and step % 4 == 0:
            with torch.cuda.stream(busy):
                matrix @ matrix
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        run(call, out=out, lse=lse)
        found += (out.view(torch.int16) != first[0].view(torch.int16)).sum()
        found += (lse.view(torch.int32) != first[1].view(torch.int32)).sum()
    torch.cuda.synchronize()
    return int(found)


@pytest.mark.parametrize("num_heads", [5, 17, 20, 64, 128, 192])
def test_two_hundred_times_beside_another_kernel(num_heads: int) -> None:
    """Rows without keys and rows of no sequence are in the mix; a matrix product takes multiprocessors away."""
    call = arguments(make_batch([131, 0, 3000, 1, 700], [2, 1, 3, 0, 1], num_heads=num_heads))
    call["q"] = torch.cat([call["q"], torch.full_like(call["q"][:2], torch.nan)])
    assert _differences(call, 200, beside=True) == 0


@pytest.mark.usefixtures("few_workers")
@pytest.mark.parametrize("num_heads", [16, 20, 128])
def test_two_hundred_times_through_segments_without_keys(num_heads: int) -> None:
    """Nothing to wait for in most segments: the warpgroups and the loader run as far apart as the signals let them."""
    lens = [0, 0, 0, 5, 0, 0, 300, 0, 0, 0, 0, 129] * 6
    call = arguments(make_batch(lens, num_heads=num_heads)) | {"cu_seqlens_q": None}
    assert _differences(call, 200, beside=True) == 0


@pytest.mark.parametrize("num_heads", [16, 128])
def test_two_hundred_times_a_full_card(num_heads: int) -> None:
    lens = [(977 * place) % 900 for place in range(140)]
    call = arguments(make_batch(lens, num_heads=num_heads)) | {"cu_seqlens_q": None}
    assert _differences(call, 200, beside=False) == 0


@pytest.mark.parametrize(("one", "other"), [(20, 128), (5, 128), (5, 16)])
def test_two_threads_on_two_streams(one: int, other: int) -> None:
    calls = [
        arguments(make_batch([131, 0, 5000], [2, 1, 3], num_heads=one, seed=1)),
        arguments(make_batch([40, 700], [1, 1], num_heads=other, seed=2)),
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
            for step, (out, lse) in enumerate(results):
                assert torch.equal(out, alone[index][0]), (index, step)
                assert torch.equal(lse, alone[index][1]), (index, step)
