"""The PERF properties reject a call that waits or allocates, as their watch tells; the watch asks torch the right things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from conformance.properties.questions import CPU, each, expect_kept, verdict
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.properties import perf
from pagedmla.conformance.properties.perf import PROPERTIES, CudaWatch
from pagedmla.conformance.properties.property import Property


class FakeDevice:
    """A device that calls wait for and allocate on by saying so."""

    def __init__(self) -> None:
        self.forbidden, self.made = False, 0

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        self.forbidden = True
        try:
            yield
        finally:
            self.forbidden = False

    def wait(self) -> None:
        if self.forbidden:
            raise RuntimeError("called a synchronizing CUDA operation")

    def allocate(self) -> None:
        self.made += 1

    def allocations(self) -> int:
        return self.made


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(perf, "watch_of", lambda device: fake)
    return fake


class Claims(Ours):
    """The torch backend, and what else it does when it is prepared and at each run.

    Attributes:
        at_prepare, at_run: that; ``at_run`` is told how many runs there were.
    """

    features = Ours.features | {"no_sync"}

    def __init__(self, at_prepare: Callable[[], None], at_run: Callable[[int], None]) -> None:
        super().__init__("torch")
        self.at_prepare, self.at_run = at_prepare, at_run

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        self.at_prepare()
        prepared, runs = super().prepare(call, options, out, lse), 0

        def run() -> tuple[Tensor, Tensor | None]:
            nonlocal runs
            runs += 1
            self.at_run(runs)
            return prepared.run()

        return PreparedCall(run)


def test_it_is_asked_on_cuda_and_of_those_that_claim_it() -> None:
    class Silent(Ours):
        features = frozenset({"out"})

    claims = Claims(lambda: None, lambda runs: None)
    for prop in PROPERTIES:
        assert prop.objection(Silent("torch"), torch.device("cuda")) == "does not claim no_sync"
        assert prop.objection(claims, CPU) == "is asked on cuda only"
        assert prop.objection(claims, torch.device("cuda", 0)) is None


@each(PROPERTIES)
def test_what_happens_once_is_no_fault(prop: Property, device: FakeDevice) -> None:
    """Waiting and allocating while a call is prepared, and in its first run, which compiles."""

    def once(runs: int) -> None:
        if runs == 1:
            device.allocate()

    found = expect_kept(Claims(device.allocate, once), prop, examples=10)
    assert device.made >= 2 * found.examples > 0


@pytest.mark.parametrize(("name", "does"), [("no-waiting", "wait"), ("no-allocation", "allocate")])
def test_a_fault_is_caught_by_its_property_alone(name: str, does: str, device: FakeDevice) -> None:
    act = getattr(device, does)
    for every in (1, 4):
        faulty = Claims(lambda: None, lambda runs, every=every: act() if runs % every == 0 else None)  # type: ignore[misc]
        for prop in PROPERTIES:
            found = verdict(faulty, prop, examples=10)
            assert found.status == ("failed" if prop.name == name else "passed"), found


@each(PROPERTIES)
def test_a_call_that_does_nothing_is_not_fast_but_wrong(prop: Property, device: FakeDevice) -> None:
    class Nothing(Claims):
        def prepare(
            self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
        ) -> Prepared:
            return PreparedCall(lambda: (out, lse))  # type: ignore[arg-type, return-value]

    found = verdict(Nothing(lambda: None, lambda runs: None), prop, examples=10)
    assert found.status == "failed"
    assert "nan" in found.detail


def test_the_watch_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", log.append)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocation.all.allocated": 7})
    watch = CudaWatch(torch.device("cuda"))
    with watch.no_waiting():
        log.append("inside")
    with pytest.raises(KeyError), watch.no_waiting():
        raise KeyError
    assert log == ["synchronized", "error", "inside", 1, "synchronized", "error", 1]
    assert watch.allocations() == 7
