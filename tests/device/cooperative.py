"""Programs that wait for one another, beside whatever else may hold the card: ``cooperative.py SCENARIO NUM_HEADS``.

A launch whose programs were resident in part would wait for ever, so each scenario runs in a process that test_cooperative.py
ends after a while.  'ok' is the last line.  Needs an NVIDIA Hopper GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import pagedmla  # noqa: E402

SCALE = 0.1
HUGE = 2**31 - 1
# cut into many pieces, into few, into none, and more sequences than programs
SHAPES: tuple[list[int], ...] = (
    [60000],
    [9000, 0, 131, 5000],
    [700] * 40,
    [64 * (1 + n % 9) for n in range(300)],
)

Result = tuple[Tensor, Tensor]


class Aborted(Exception):
    """Ends a capture."""


@triton.jit
def hold(out, turns):
    """Keeps a multiprocessor's threads busy for ``turns`` steps that need one another."""
    x = tl.arange(0, 1024) + tl.program_id(0)
    for _ in range(turns):
        x = x * 1103515245 + 12345
    tl.store(out + tl.program_id(0) * 1024 + tl.arange(0, 1024), x)


def make_call(lens: list[int], num_heads: int, seed: int = 0) -> dict[str, Any]:
    """One query token a sequence, permuted pages of 64 tokens, and a workspace that was never cleared."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    pages = [max(1, -(-n // 64)) for n in lens]
    table = torch.full((len(lens), max(pages)), -1, dtype=torch.int32, device="cuda")
    order = torch.randperm(sum(pages), generator=generator, device="cuda").int()
    for row, part in zip(table, order.split(pages), strict=True):
        row[: len(part)] = part
    bounds = pagedmla.BatchBounds(len(lens), max(pages))
    size = pagedmla.workspace_size(pagedmla.DecodeProblem(num_heads, SCALE), bounds, "cuda", "gluon")
    return {
        "q": torch.randn(len(lens), num_heads, 576, generator=generator, device="cuda").bfloat16(),
        "kv_cache": torch.randn(sum(pages), 64, 576, generator=generator, device="cuda").bfloat16(),
        "block_table": table,
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device="cuda"),
        "workspace": torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda"),
        "out": torch.empty(len(lens), num_heads, 512, dtype=torch.bfloat16, device="cuda"),
        "lse": torch.empty(len(lens), num_heads, device="cuda"),
    }


def decode(call: dict[str, Any], **options: Any) -> Result:
    return pagedmla.decode(**(call | options), softmax_scale=SCALE, backend="gluon")


def alone(call: dict[str, Any]) -> Result:
    """The result with nothing beside it, near that of another backend."""
    found = tuple(part.clone() for part in decode(call))
    others = {name: value for name, value in call.items() if name not in ("out", "lse", "workspace")}
    wanted = pagedmla.decode(**others, softmax_scale=SCALE, backend="triton")
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-4)
    return found[0], found[1]


def unequal(call: dict[str, Any], expected: Result) -> Tensor:
    """How many numbers of the call's outputs are not those expected; on the device."""
    return sum((call[name] != part).sum() for name, part in zip(("out", "lse"), expected, strict=True))  # type: ignore[return-value]


def side_by_side(count: int, num_heads: int) -> None:
    """Two hundred rounds of a decode on each of ``count`` streams, none of which waits for another."""
    calls = [make_call(SHAPES[index % len(SHAPES)], num_heads, seed=index) for index in range(count)]
    expected = [alone(call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in calls]
    torch.cuda.synchronize()
    for _ in range(200):
        for call, stream, wanted, found in zip(calls, streams, expected, wrong, strict=True):
            with torch.cuda.stream(stream):
                call["out"].fill_(torch.nan)
                decode(call)
                found += unequal(call, wanted)
    # and with nothing between the launches of a stream
    for _ in range(500):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                decode(call)
    torch.cuda.synchronize()
    assert not any(map(int, wrong))
    for call, wanted in zip(calls, expected, strict=True):
        assert not int(unequal(call, wanted))


def two_streams(num_heads: int) -> None:
    side_by_side(2, num_heads)


def four_streams(num_heads: int) -> None:
    side_by_side(4, num_heads)


def both_kernels(num_heads: int) -> None:
    """Each on streams of its own, two hundred rounds, none of which waits for another."""
    calls = [make_call(lens, heads, seed=heads) for heads in (16, num_heads, 192) for lens in SHAPES[:2]]
    expected = [alone(call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(200):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                decode(call)
    torch.cuda.synchronize()
    for call, wanted in zip(calls, expected, strict=True):
        assert not int(unequal(call, wanted))


def beside_a_full_card(num_heads: int) -> None:
    """A kernel with every thread of every multiprocessor, and matrix products, come and go on another stream."""
    calls = [make_call(lens, num_heads, seed=index) for index, lens in enumerate(SHAPES)]
    expected = [alone(call) for call in calls]
    programs = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    room = torch.empty(programs * 1024, dtype=torch.int32, device="cuda")
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    hold[(programs,)](room, 10, num_warps=32)
    matrix @ matrix
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    busy, stream = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for step in range(100):
        with torch.cuda.stream(busy):
            hold[(programs - step,)](room, 20_000, num_warps=32)
            if step % 4 == 0:
                matrix @ matrix
        with torch.cuda.stream(stream):
            for call, wanted in zip(calls, expected, strict=True):
                call["out"].fill_(torch.nan)
                decode(call)
                wrong += unequal(call, wanted)
    torch.cuda.synchronize()
    assert not int(wrong)


def two_graphs(num_heads: int) -> None:
    """Two captures of several decodes each, replayed on two streams; then with other lengths, down to none."""
    calls = [make_call(SHAPES[0], num_heads, seed=0), make_call(SHAPES[1], num_heads, seed=1)]
    graphs, streams = [], [torch.cuda.Stream() for _ in calls]
    for call in calls:
        alone(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                decode(call)
        graphs.append(graph)
    full = [call["seq_lens"].clone() for call in calls]
    for share in (1.0, 0.3, 0.0, 0.01, 1.0):
        for call, lens in zip(calls, full, strict=True):
            call["seq_lens"].copy_((lens * share).int())
        expected = [alone(call) for call in calls]
        for call in calls:
            call["out"].fill_(torch.nan)
            call["lse"].fill_(torch.nan)
        torch.cuda.synchronize()
        for _ in range(100):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for call, wanted in zip(calls, expected, strict=True):
            assert not int(unequal(call, wanted)), share


def ten_thousand_launches(num_heads: int) -> None:
    """Shape after shape in one workspace, which holds what the one before left."""
    calls = [make_call(lens, num_heads, seed=index) for index, lens in enumerate(SHAPES)]
    workspace = max((call["workspace"] for call in calls), key=len)
    for call in calls:
        call["workspace"] = workspace
    expected = [alone(call) for call in calls]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(2500):
        for call, wanted in zip(calls, expected, strict=True):
            if step % 25 == 0:
                call["out"].fill_(torch.nan)
            decode(call)
            if step % 25 == 0:
                wrong += unequal(call, wanted)
        if step % 500 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert not int(wrong)


def an_aborted_capture(num_heads: int) -> None:
    """A launch that was captured and never run leaves its workspace as it was: the next launch there is right."""
    calls = [make_call(lens, num_heads, seed=index) for index, lens in enumerate(SHAPES)]
    expected = [alone(call) for call in calls]
    for call, wanted in zip(calls, expected, strict=True):
        before = call["workspace"].clone()
        graph = torch.cuda.CUDAGraph()
        with suppress(Aborted), torch.cuda.graph(graph):
            decode(call)
            raise Aborted
        del graph
        assert torch.equal(call["workspace"], before)
        call["out"].fill_(torch.nan)
        decode(call)
        assert not int(unequal(call, wanted))


def any_workspace(num_heads: int) -> None:
    """A workspace of zeros, of ones, of noise, and of another batch's states, before each of a hundred launches a batch."""
    calls = [make_call(lens, num_heads, seed=index) for index, lens in enumerate(SHAPES)]
    expected = [alone(call) for call in calls]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(100):
        for call, wanted in zip(calls, expected, strict=True):
            workspace = call["workspace"]
            if step % 4 == 0:
                workspace.fill_(0xFF if step % 8 else 0)
            elif step % 4 == 1:
                workspace.random_(0, 256)
            elif step % 4 == 2:
                other = calls[step % len(calls)]["workspace"]
                size = min(len(workspace), len(other))
                workspace[:size] = other[:size].clone()
            call["out"].fill_(torch.nan)
            decode(call)
            wrong += unequal(call, wanted)
    torch.cuda.synchronize()
    assert not int(wrong)


def any_lengths(num_heads: int) -> None:
    """Three hundred random batches, ragged and even, after one another in one workspace."""
    generator = torch.Generator().manual_seed(0)
    call = make_call([64 * 300] * 40, num_heads)
    for step in range(300):
        count = int(torch.randint(1, 41, (), generator=generator))
        longest = (1, 64, 700, 64 * 300)[step % 4]
        lens = torch.randint(0, longest + 1, (count,), generator=generator, dtype=torch.int32)
        given = {name: call[name][:count] for name in ("block_table", "q", "out", "lse")}
        given |= {"kv_cache": call["kv_cache"], "seq_lens": lens.cuda(), "workspace": call["workspace"]}
        if step % 2:
            cuts = torch.randint(0, count + 1, (count - 1,), generator=generator, dtype=torch.int32).sort()[0]
            ends = torch.tensor([0, count], dtype=torch.int32)
            given["cu_seqlens_q"] = torch.cat([ends[:1], cuts, ends[1:]]).cuda()
        alone(given)


def noise(num_heads: int) -> None:
    """Tables, lengths and query starts of random numbers: whatever the rows hold, the launch ends, and writes no others."""
    generator = torch.Generator().manual_seed(0)
    call = make_call([64 * 20] * 40, num_heads)
    good = alone(call)
    for step in range(100):
        low, high = (-HUGE, HUGE) if step % 2 else (-3, 50)
        size = {"block_table": (40, 20), "seq_lens": (40,), "cu_seqlens_q": (41,)}
        bad = {
            name: torch.randint(low, high, shape, generator=generator, dtype=torch.int64).int().cuda()
            for name, shape in size.items()
        }
        out = torch.full((48, num_heads, 512), -768.0, dtype=torch.bfloat16, device="cuda")
        lse = torch.full((48, num_heads), -768.0, device="cuda")
        decode(call | bad, out=out[4:-4], lse=lse[4:-4])
        for part in (out, lse):
            assert bool((part[:4] == -768).all() & (part[-4:] == -768).all()), step
            assert not bool((part[4:-4] == -768).any()), step
    decode(call)
    assert not int(unequal(call, good))


SCENARIOS: dict[str, Callable[[int], None]] = {
    scenario.__name__: scenario
    for scenario in (
        two_streams, four_streams, both_kernels, beside_a_full_card, two_graphs, ten_thousand_launches,
        an_aborted_capture, any_workspace, any_lengths, noise,
    )
}  # fmt: skip

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](int(sys.argv[2]))
    torch.cuda.synchronize()
    print("ok")  # noqa: T201
