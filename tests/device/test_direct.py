"""On a card: a repeated call gives, to the bit, what launches through Triton give; in a graph and on another stream, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla import BatchBounds, DecodePlan, DecodeProblem
from pagedmla.kernels.repeat import MEMO

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SCALE = 0.1
BACKENDS = [
    "triton",
    pytest.param("gluon", marks=pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA Hopper GPU")),
]
MODES: list[dict[str, Any]] = [{}, {"num_kv_splits": 3}, {"num_kv_splits": 1}]


def make_call(num_heads: int, seed: int, pair: bool = False) -> dict[str, Any]:
    """Four sequences of up to 300 keys, in permuted pages."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    q = torch.randn(4, num_heads, 576, generator=generator, device="cuda").bfloat16()
    lens = torch.tensor([300, 0, 1, 129], dtype=torch.int32, device="cuda")
    table = torch.randperm(20, generator=generator, device="cuda").int().view(4, 5)
    cache = torch.randn(20, 64, 576, generator=generator, device="cuda").bfloat16()
    query = tuple(part.contiguous() for part in q.split([512, 64], -1)) if pair else q
    return {"q": query, "kv_cache": cache, "block_table": table, "seq_lens": lens}


def decode(call: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    return pagedmla.decode(**call, softmax_scale=SCALE, **options)


@contextmanager
def forbidding_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any launch through Triton in here is an error."""
    from triton.runtime.jit import JITFunction

    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError("launched through Triton")

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", refuse)
        yield


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_repeated_call_is_the_same_to_the_bit(
    backend: str, num_heads: int, mode: dict[str, Any], pair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"backend": backend} | mode
    if backend == "gluon" and mode:
        pytest.skip("the Triton backend's: Gluon's kernels cut keys into equal shares")
    calls = [make_call(num_heads, seed, pair) for seed in range(3)]
    wanted = []
    for call in calls:
        MEMO.clear()
        wanted.append(decode(call, **options))
    assert not same(wanted[0], wanted[1])
    with forbidding_triton(monkeypatch):
        for call, expected in zip(calls, wanted, strict=True):
            assert same(decode(call, **options), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capture_of_a_repeated_step_replays(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [make_call(128, seed) for seed in range(2)]
    plan = DecodePlan(DecodeProblem(128, SCALE), BatchBounds(4, 5), "cuda", backend=backend)
    out, lse = (
        torch.empty(4, 128, 512, dtype=torch.bfloat16, device="cuda"),
        torch.empty(4, 128, device="cuda"),
    )
    q, cache = calls[0]["q"].clone(), calls[0]["kv_cache"].clone()
    wanted = []
    for call in calls:
        MEMO.clear()
        plan.update(call["block_table"], call["seq_lens"])
        wanted.append(tuple(part.clone() for part in plan.run(call["q"], call["kv_cache"])))
    plan.run(q, cache, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with forbidding_triton(monkeypatch), torch.cuda.graph(graph):
        plan.run(q, cache, out=out, lse=lse)
    for call, expected in zip(calls, wanted, strict=True):
        q.copy_(call["q"])
        cache.copy_(call["kv_cache"])
        plan.update(call["block_table"], call["seq_lens"])
        out.fill_(torch.nan)
        plan.workspace.fill_(0xFF)
        graph.replay()
        assert same((out, lse), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_launched_on_the_current_stream(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(128, 0)
    wanted = decode(call, backend=backend)
    stream = torch.cuda.Stream()
    late = call["q"].clone()
    for _ in range(2):
        late.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), forbidding_triton(monkeypatch):
            # the decode reads what this stream wrote before it, however late that is
            torch.cuda._sleep(20_000_000)
            late.copy_(call["q"])
            found = decode(call | {"q": late}, backend=backend)
        torch.cuda.synchronize()
        assert same(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_on_the_queries_is_refused_on_a_known_call(backend: str) -> None:
    call = make_call(128, 0)
    room = torch.empty(4, 128, 576, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):
        decode(call, backend=backend, out=room[..., :512])
    with pytest.raises(pagedmla.InvalidArgument, match="overlap"):
        decode(call, backend=backend, out=call["q"][..., :512])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_launch_hook_sees_the_kernels_of_a_known_call(backend: str) -> None:
    from triton import knobs

    call = make_call(128, 0)
    for _ in range(2):
        decode(call, backend=backend)
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        decode(call, backend=backend)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert any("decode" in name for name in seen)
    count = len(seen)
    decode(call, backend=backend)
    assert len(seen) == count
