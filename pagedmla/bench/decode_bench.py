"""Runs ``pagedmla bench``: every contender on every shape, checked against float64, then timed, then checked again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from pagedmla.bench.batch import DecodeBatch, ExpectedSequence, build_batch, expected_sequences
from pagedmla.bench.breakdown import Breakdown, profiled_parts, repeated
from pagedmla.bench.ceilings import Ceilings, Floor, floor_of, measure_ceilings, wall_clock_steps
from pagedmla.bench.graph_timing import REPEATS, CapturedStep, time_cold
from pagedmla.bench.machine import clocks
from pagedmla.bench.ours import OurDecode, OurStep
from pagedmla.bench.peers.peer import first_line, peer_errors
from pagedmla.bench.peers.planning import PlanTime, time_plan
from pagedmla.bench.shapes import DecodeShape
from pagedmla.bench.timing import StepTime, time_host, time_step
from pagedmla.bench.verify import Check, check_result


class Contender(Protocol):
    """What is timed: a peer that is loaded, or ``OurDecode``."""

    @property
    def name(self) -> str:
        """Heading of its column."""

    @property
    def version(self) -> str:
        """Of its software."""

    def supports(self, batch: DecodeBatch) -> str | None:
        """Why it does not take the batch, or None."""

    def prepare(self, batch: DecodeBatch) -> Callable[[], Tensor]:
        """A decode of ``batch`` without arguments, which returns out [num_tokens, num_heads, 512]."""


@dataclass(frozen=True)
class Measurement:
    """One contender on one shape: a time, or why there is none.

    Attributes:
        contender: its name.
        time: microseconds of a decode; None without a number.
        status: ``measured``; ``refused`` (not for this shape); ``wrong`` (a result failed its check); ``failed`` (it raised).
        detail: what was refused, wrong or raised; empty when measured.
        out_error, lse_error: as in ``Check``; None where no result was checked.
        runs_on: the backend of ours that ran; empty for peers.
        cold: as ``time``, with nothing of the input in the L2 cache; None unless asked for on a GPU.
        host: microseconds of the host for an eager call; None unless asked for.
        eager: microseconds of an eager call when many follow one another, the device waited for; None unless asked for.
        plan: what planning a step costs, apart from ``time``; None for who plans nothing ahead.
        breakdown: where the time goes; None unless asked for.
    """

    contender: str
    status: str
    time: StepTime | None = None
    detail: str = ""
    out_error: float | None = None
    lse_error: float | None = None
    runs_on: str = ""
    cold: StepTime | None = None
    host: StepTime | None = None
    eager: StepTime | None = None
    plan: PlanTime | None = None
    breakdown: Breakdown | None = None


@dataclass(frozen=True)
class Row:
    """One shape, measured.

    Attributes:
        shape: which.
        floor: its least time; None when the batch does not fit on the device.
        measurements: one for each contender, in order.
        detail: why there is no floor; empty when there is.
    """

    shape: DecodeShape
    floor: Floor | None
    measurements: tuple[Measurement, ...]
    detail: str = ""


@dataclass(frozen=True)
class How:
    """How each contender is measured.

    Attributes:
        rounds: of which the median counts.
        cold: also with an empty L2 cache.
        eager: also eager calls, and what they cost the host.
        breakdown: also the parts of the time.
    """

    rounds: int = 7
    cold: bool = False
    eager: bool = False
    breakdown: bool = False


_PLAIN = How()


@dataclass(frozen=True)
class BenchPlan:
    """What to measure.

    Attributes:
        device: where.
        shapes: rows, in order.
        ours: our contenders.
        peers: other projects' contenders, loaded.
        page_size: tokens a page, for shapes that name none.
        dtype: of queries and cache.
        how: rounds, and what is measured besides.
    """

    device: torch.device
    shapes: tuple[DecodeShape, ...]
    ours: tuple[OurDecode, ...]
    peers: tuple[Contender, ...] = ()
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    how: How = _PLAIN

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """Ours first."""
        return (*self.ours, *self.peers)


@dataclass
class BenchResult:
    """What came of a plan; rows are added as they are measured.

    Attributes:
        plan: what was asked.
        ceilings: of the same run.
        rows: those that are done.
        absent: why each contender that was asked for is not in the plan.
        clocks_before, clocks_after: of the GPU, around the rows that are done; None where nothing tells.
    """

    plan: BenchPlan
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    clocks_before: dict[str, float] | None = None
    clocks_after: dict[str, float] | None = None


def run_bench(
    plan: BenchPlan, absent: dict[str, str], row_done: Callable[[BenchResult], None] = lambda result: None
) -> BenchResult:
    """Measures ``plan`` row by row.

    Args:
        plan: what.
        absent: contenders that were asked for and are not in the plan, with the reason; kept in the result.
        row_done: called after each row, so that a run which is cut short leaves what it has.
    """
    with _current(plan.device):
        ceilings = measure_ceilings(plan.device, plan.dtype, plan.how.rounds)
        # right behind a second of products: the card is as busy as it will be
        result = BenchResult(plan, ceilings, absent=absent, clocks_before=clocks(plan.device))
        _release(plan.device)
        for shape in plan.shapes:
            result.rows.append(_measure_row(plan, shape, result.ceilings))
            if shape is plan.shapes[-1]:
                result.clocks_after = clocks(plan.device)
            _release(plan.device)
            row_done(result)
    return result


def _current(device: torch.device) -> AbstractContextManager[object]:
    # peers launch on the current device, whatever their tensors' is
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _release(device: torch.device) -> None:
    gc.collect()  # a graph and its captured results refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measure_row(plan: BenchPlan, shape: DecodeShape, ceilings: Ceilings) -> Row:
    try:
        batch = build_batch(shape, plan.page_size, plan.dtype, plan.device)
        expected = expected_sequences(batch)
    except torch.OutOfMemoryError as error:
        return Row(shape, None, (), f"does not fit on {plan.device}: {first_line(error)}")
    floor = floor_of(batch, ceilings, plan.how.rounds, plan.how.cold)
    measurements = []
    for contender in plan.contenders:
        measurements.append(measure(contender, batch, expected, plan.how))
        _release(plan.device)
    return Row(shape, floor, tuple(measurements))


def measure(
    contender: Contender, batch: DecodeBatch, expected: Sequence[ExpectedSequence], how: How = _PLAIN
) -> Measurement:
    """Times ``contender`` on ``batch`` if its result is right before and after: no number without two green checks.

    What it raises becomes a measurement without a number: one contender must not end the run.
    """
    refusal = contender.supports(batch)
    if refusal is not None:
        return Measurement(contender.name, "refused", detail=refusal)
    try:
        return _measure(contender, batch, expected, how)
    except peer_errors() as error:  # our own errors are RuntimeErrors and ValueErrors too
        return Measurement(contender.name, "failed", detail=first_line(error))


def _measure(
    contender: Contender, batch: DecodeBatch, expected: Sequence[ExpectedSequence], how: How
) -> Measurement:
    step = contender.prepare(batch)
    lse = step.lse if isinstance(step, OurStep) else None
    before = check_result(batch, expected, step(), lse)
    if before.detail:
        return _wrong(contender, before, "")
    device = batch.device
    if device.type == "cuda":
        captured = CapturedStep(step, device)
        _poison(step)
        time, result = captured.time(how.rounds), captured.result
        run, calls = captured.replay, REPEATS
    else:
        _poison(step)
        calls = wall_clock_steps(step)
        time, run = time_step(step, device, steps=calls, rounds=how.rounds), repeated(step, calls)
        result = step()
    after = check_result(batch, expected, result, lse)
    if after.detail:
        return _wrong(contender, after, "when repeated, ")
    found = Measurement(contender.name, "measured", time, "", after.out_error, after.lse_error)
    if isinstance(step, OurStep):
        found = replace(found, runs_on=step.runs_on)
    if how.cold and device.type == "cuda":
        found = replace(found, cold=time_cold(step, device, how.rounds))
    if how.eager:
        host = time_host(step, device, rounds=how.rounds)
        found = replace(found, host=host, eager=time_step(step, device, steps=20, rounds=how.rounds))
    if how.breakdown:
        parts = profiled_parts(run, calls, device)
        found = replace(found, breakdown=Breakdown(parts, time.median_us))
    return _with_plan(found, batch, step, how)


def _with_plan(found: Measurement, batch: DecodeBatch, step: Callable[[], Tensor], how: How) -> Measurement:
    """Last, and by itself: the decode keeps its number where its plan cannot be timed, and the detail says why."""
    try:
        return replace(found, plan=time_plan(found.contender, batch, step, how.rounds))
    except peer_errors() as error:
        return replace(found, detail=f"its plan was not timed: {first_line(error)}")


def _poison(step: Callable[[], Tensor]) -> None:
    """What is left of an earlier result must not pass for a later one's.  Peers own their outputs: only ours can be cleared."""
    if isinstance(step, OurStep):
        step.out.fill_(float("nan"))
        step.lse.fill_(float("nan"))


def _wrong(contender: Contender, check: Check, when: str) -> Measurement:
    return Measurement(
        contender.name,
        "wrong",
        detail=when + check.detail,
        out_error=check.out_error,
        lse_error=check.lse_error,
    )
