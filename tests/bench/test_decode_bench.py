"""No number without a green check before and after; one contender that fails does not end the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla.bench import decode_bench
from pagedmla.bench.batch import DecodeBatch, expected_sequences
from pagedmla.bench.ceilings import Ceilings
from pagedmla.bench.contenders import our_contenders
from pagedmla.bench.decode_bench import BenchPlan, How, measure, run_bench
from pagedmla.bench.ours import OurDecode
from pagedmla.bench.shapes import named_shapes
from pagedmla.bench.timing import StepTime, time_host
from pagedmla.contract.errors import InvalidArgument, Unsupported

from .conftest import small_batch

CPU = torch.device("cpu")
OURS = OurDecode("torch", "split")
DECODE = pagedmla.decode


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_bench, "wall_clock_steps", lambda step: 1)
    monkeypatch.setattr(
        decode_bench, "measure_ceilings", lambda *a: Ceilings(torch.float32, 1e12, 1e12, "a test")
    )


class PlantedPeer:
    """A peer that is right unless ``spoil`` says otherwise."""

    name = "planted"
    version = "0"

    def __init__(
        self, spoil: Callable[[Tensor], Tensor] = lambda out: out, refuses: str | None = None
    ) -> None:
        self.spoil = spoil
        self.refuses = refuses

    def supports(self, batch: DecodeBatch) -> str | None:
        return self.refuses

    def prepare(self, batch: DecodeBatch) -> Callable[[], Tensor]:
        step = OURS.prepare(batch)
        return lambda: self.spoil(step())


def test_a_right_result_gets_a_time_and_its_errors() -> None:
    batch = small_batch(131, 17)
    found = measure(OURS, batch, expected_sequences(batch), How(rounds=3, eager=True, cold=True))
    assert (found.status, found.detail) == ("measured", "")
    assert found.time is not None
    assert 0 < found.time.fastest_us <= found.time.median_us <= found.time.slowest_us
    assert found.host is not None
    assert found.eager is not None
    # nothing empties a CPU's caches here, and nothing is planned ahead
    assert (found.cold, found.plan, found.breakdown, found.runs_on) == (None, None, None, "torch")
    assert found.out_error is not None
    assert 0 < found.out_error < 6e-3
    assert found.lse_error is not None
    assert found.lse_error < 1e-5


@pytest.mark.parametrize("broken", ["out", "lse", "unwritten"])
def test_a_wrong_decode_is_refused_a_number(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def wrong(*arguments: object, **options: Tensor) -> None:
        if broken != "unwritten":
            DECODE(*arguments, **options)  # type: ignore[arg-type]
            options[broken][-1, 0] *= 1.5

    monkeypatch.setattr(pagedmla, "decode", wrong)
    batch = small_batch(131, 17)
    found = measure(OURS, batch, expected_sequences(batch))
    assert (found.status, found.time, found.host) == ("wrong", None, None)
    assert "out" in found.detail if broken != "lse" else "lse of sequence 1" in found.detail


def test_a_result_that_is_wrong_only_when_repeated_is_refused_too() -> None:
    calls = []

    def spoil_later(out: Tensor) -> Tensor:
        calls.append(0)
        return out if len(calls) == 1 else out * 2

    batch = small_batch(131, 17)
    found = measure(PlantedPeer(spoil_later), batch, expected_sequences(batch))
    assert (found.status, found.time) == ("wrong", None)
    assert found.detail.startswith("when repeated, out of sequence")


def test_a_decode_that_writes_once_only_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def once(*arguments: object, **options: Tensor) -> None:
        calls.append(0)
        if len(calls) == 1:
            DECODE(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pagedmla, "decode", once)
    batch = small_batch(131, 17)
    found = measure(OURS, batch, expected_sequences(batch))
    assert (found.status, found.detail) == ("wrong", "when repeated, out is not finite everywhere")


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), AssertionError(), KeyError("x"), Unsupported("a", "b", "c", "d")]
)
def test_what_a_contender_raises_is_its_result(error: Exception) -> None:
    def fail(out: Tensor) -> Tensor:
        raise error

    batch = small_batch(17)
    found = measure(PlantedPeer(fail), batch, expected_sequences(batch))
    assert (found.status, found.time) == ("failed", None)
    assert type(error).__name__ in found.detail


def test_rows_come_one_by_one_with_every_contender() -> None:
    shapes = named_shapes(["tiny"])
    peers = (PlantedPeer(refuses="not this one"), PlantedPeer(lambda out: out + 1))
    plan = BenchPlan(CPU, shapes, (OURS,), peers, page_size=16, how=How(rounds=1))
    seen = []
    result = run_bench(plan, {"gone": "not here"}, lambda result: seen.append(len(result.rows)))
    assert seen == [1, 2]
    assert result.absent == {"gone": "not here"}
    for row, shape in zip(result.rows, shapes, strict=True):
        assert row.shape is shape
        assert [m.status for m in row.measurements] == ["measured", "refused", "wrong"]
        assert row.floor is not None
        assert row.floor.read_us == pytest.approx(shape.bytes_moved(2) / 1e12 * 1e6)
        assert row.floor.arithmetic_us == pytest.approx(shape.flops() / 1e12 * 1e6)


def test_a_shape_that_does_not_fit_is_a_row_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> DecodeBatch:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(decode_bench, "build_batch", full)
    result = run_bench(BenchPlan(CPU, named_shapes(["tiny"]), (OURS,)), {})
    assert [(row.floor, row.measurements) for row in result.rows] == [(None, ()), (None, ())]
    assert all("no room" in row.detail for row in result.rows)


def test_the_table_decides_which_of_ours_take_part() -> None:
    shapes = named_shapes(["tiny"])
    found, refused = our_contenders(CPU, shapes, 16, torch.bfloat16, ["torch"])
    assert [contender.name for contender in found] == ["torch/split"]
    assert list(refused) == ["torch/persistent"]
    assert "schedule" in refused["torch/persistent"]
    found, refused = our_contenders(CPU, shapes, 16, torch.bfloat16, ["torch"], ["auto", "split"])
    assert ([contender.name for contender in found], refused) == (["torch/auto", "torch/split"], {})
    with pytest.raises(Unsupported, match="persistent"):
        our_contenders(CPU, shapes, 16, torch.bfloat16, ["torch"], ["persistent"])
    with pytest.raises(InvalidArgument, match="backend"):
        our_contenders(CPU, shapes, 16, torch.bfloat16, ["cutlass"])
    with pytest.raises(InvalidArgument, match="schedule"):
        our_contenders(CPU, shapes, 16, torch.bfloat16, [], ["dynamic"])


def test_unnamed_it_is_what_a_user_gets() -> None:
    shapes = named_shapes(["tiny"])
    found, refused = our_contenders(CPU, shapes, 16, torch.bfloat16)
    assert (found, refused) == ((OurDecode(),), {})
    found, _ = our_contenders(CPU, shapes, 16, torch.bfloat16, ["auto", "torch"])
    assert [contender.name for contender in found] == ["pagedmla", "torch/split"]
    assert OurDecode(schedule="split").name == "pagedmla/split"
    with pytest.raises(Unsupported, match="persistent"):
        our_contenders(CPU, shapes, 16, torch.bfloat16, ["auto"], ["persistent"])
    # asked at run time as a user asks: no backend is named, and the row says which one that led to
    batch = small_batch(131, 17)
    step = OurDecode().prepare(batch)
    assert (step.backend, step.schedule, step.runs_on) == (None, None, "torch")
    assert measure(OurDecode(), batch, expected_sequences(batch)).runs_on == "torch"


def test_a_plan_that_cannot_be_timed_costs_the_decode_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no plan today")

    monkeypatch.setattr(decode_bench, "time_plan", fail)
    batch = small_batch(17)
    found = measure(PlantedPeer(), batch, expected_sequences(batch))
    assert (found.status, found.plan) == ("measured", None)
    assert "no plan today" in found.detail


def test_the_parts_of_a_decode_are_asked_for() -> None:
    batch = small_batch(131, 17)
    found = measure(OURS, batch, expected_sequences(batch), How(rounds=1, breakdown=True))
    assert found.breakdown is not None
    assert found.time is not None
    assert found.breakdown.decode_us == found.time.median_us
    names = [part.name for part in found.breakdown.parts]
    assert any("mm" in name for name in names), names
    assert all(part.us >= 0 and part.launches > 0 for part in found.breakdown.parts)


def test_clocks_are_read_before_the_first_row_and_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    result: list[object] = []
    monkeypatch.setattr(decode_bench, "clocks", lambda device: {"sm_mhz": float(seen.append(0) or len(seen))})
    plan = BenchPlan(CPU, named_shapes(["tiny"]), (OURS,), page_size=16, how=How(rounds=1))
    found = run_bench(plan, {}, lambda part: result.append(part.clocks_after))
    assert (found.clocks_before, found.clocks_after) == ({"sm_mhz": 1.0}, {"sm_mhz": 2.0})
    assert result == [None, {"sm_mhz": 2.0}]


def test_host_time_counts_every_call() -> None:
    calls = []
    found = time_host(lambda: calls.append(0), "cpu", calls=4, rounds=3)
    assert len(calls) == 4 * (3 + 1)
    assert 0 < found.fastest_us <= found.median_us <= found.slowest_us
    assert StepTime.of([3.0, 1.0, 2.0]) == StepTime(1.0, 2.0, 3.0)
