"""The GRAPH properties hold for a right decode, and each rejects one that keeps something from the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance.properties.questions import (
    CPU,
    TENSORS,
    each,
    each_configuration,
    each_fault,
    expect_broken,
    expect_kept,
    verdict,
)
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Adapter, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call, build_spec
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.properties.graph import PROPERTIES, _captured
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.spec import BatchSpec

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


class Keeps(Ours):
    """Keeps a tensor's first content.

    Attributes:
        name: of the tensor.
        refreshed: whether a refresh reads it anew, as it should.
    """

    def __init__(self, name: str, refreshed: bool = False) -> None:
        super().__init__("torch")
        self.kept, self.refreshed = name, refreshed

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        content = getattr(call, self.kept)
        if content is None:
            return super().prepare(call, options, out, lse)
        copied = content.clone()
        prepared = super().prepare(replace(call, **{self.kept: copied}), options, out, lse)
        return PreparedCall(prepared.run, (lambda: copied.copy_(content)) if self.refreshed else None)


class PlannedForTheFirstLengths(Ours):
    """Splits, tiles or a grid made for the longest length of the first step: more keys than that are not looked at."""

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        most = call.seq_lens.max().item()
        lens = torch.empty_like(call.seq_lens)
        prepared = super().prepare(replace(call, seq_lens=lens), options, out, lse)

        def run() -> tuple[Tensor, Tensor | None]:
            lens.copy_(call.seq_lens.clamp(max=most))
            return prepared.run()

        return PreparedCall(run)


class LeavesDeadRows(Ours):
    """Outputs that are made once, and dead rows that nobody writes after that."""

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        prepared = super().prepare(call, options)
        kept = [torch.clone(made) for made in prepared.run()]  # type: ignore[arg-type]

        def run() -> tuple[Tensor, Tensor | None]:
            now, now_lse = prepared.run()
            live = now_lse != -torch.inf  # type: ignore[operator]
            for target, source in zip([out if out is not None else kept[0], lse if lse is not None else kept[1]],
                                      (now, now_lse), strict=True):  # fmt: skip
                target[live] = source[live]  # type: ignore[index]
            return out if out is not None else kept[0], lse if lse is not None else kept[1]

        return PreparedCall(run)


FAULTS = [
    ("replayed-walk", Keeps("q")),
    ("replayed-walk", Keeps("seq_lens")),
    ("replayed-walk", Keeps("block_table")),
    ("replayed-walk", Keeps("kv_cache")),
    ("replayed-growth", PlannedForTheFirstLengths("torch")),
    ("replayed-growth", LeavesDeadRows("torch")),
    ("replayed-ragged", Keeps("cu_seqlens_q")),
]


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Adapter) -> None:
    assert len(expect_broken(faulty, BY_NAME[name], examples=60).steps) > 1


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)


@pytest.mark.parametrize("name", ["seq_lens", "block_table", "cu_seqlens_q"])
@each(PROPERTIES)
def test_metadata_that_a_refresh_makes_anew_is_no_fault(prop: Property, name: str) -> None:
    expect_kept(Keeps(name, refreshed=True), prop)


def test_it_is_asked_of_those_that_claim_it() -> None:
    class Once(Ours):
        features = frozenset({"out"})

    assert all(prop.objection(Once("torch"), CPU) == "does not claim graph" for prop in PROPERTIES)


@each(PROPERTIES)
def test_all_steps_have_the_same_shapes(prop: Property) -> None:
    examples: list[tuple[BatchSpec, ...]] = []
    recording = replace(prop, test=lambda subject, example: examples.append(example[0]))
    verdict(Ours("torch"), recording)
    for specs in examples:
        calls = [build_spec(spec) for spec in specs]
        shapes = {tuple(getattr(call, name).shape for name in TENSORS) for call in calls}
        assert len(shapes) == 1
        assert len({call.cu_seqlens_q is None for call in calls}) == 1
    assert any(len(specs) > 3 for specs in examples)


def test_a_replay_gives_what_the_capture_wrote_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of things on CUDA, with a graph that runs the call again: warm first, captured once, nan before a replay."""
    log: list[str] = []
    out, lse = torch.zeros(2), torch.zeros(2)
    before: list[bool] = []

    def run() -> tuple[Tensor, Tensor | None]:
        log.append("run")
        before.append(bool(out.isnan().all() & lse.isnan().all()))
        return out.fill_(len(log)), lse.fill_(len(log))

    def place(name: str) -> Any:
        @contextlib.contextmanager
        def entered(*_: object) -> Iterator[None]:
            log.append(name)
            yield
            log.append(f"end of {name}")

        return entered

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "device": place("device"),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": place("side stream"),
        "CUDAGraph": lambda: SimpleNamespace(replay=run),
        "graph": place("capture"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    replay = _captured(PreparedCall(run), torch.device("cuda"))
    capture = log.index("capture")
    assert log[:capture].count("run") >= 1
    assert log[capture : log.index("end of capture")] == ["capture", "run"]
    assert not any(before)
    for _ in range(2):
        assert [part is kept for part, kept in zip(replay(), (out, lse), strict=True)] == [True, True]
        assert before[-1]
        assert bool((out == out[0]).all() & out.isfinite().all())
