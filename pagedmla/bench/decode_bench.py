"""Runs ``pagedmla bench``: every contender on every shape, checked against float64, then timed, then checked again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pagedmla.bench.batch import DecodeBatch, ExpectedSequence, build_batch, expected_sequences
from pagedmla.bench.ceilings import Ceilings, Floor, floor_of, measure_ceilings, wall_clock_steps
from pagedmla.bench.graph_timing import CapturedStep
from pagedmla.bench.ours import OurDecode, OurStep
from pagedmla.bench.peers.peer import first_line, peer_errors
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
        host: microseconds of the host for an eager call; None unless asked for.
    """

    contender: str
    status: str
    time: StepTime | None = None
    detail: str = ""
    out_error: float | None = None
    lse_error: float | None = None
    host: StepTime | None = None


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
class BenchPlan:
    """What to measure.

    Attributes:
        device: where.
        shapes: rows, in order.
        ours: our contenders.
        peers: other projects' contenders, loaded.
        page_size: tokens a page.
        dtype: of queries and cache.
        rounds: of which the median counts.
        eager: also time the host.
    """

    device: torch.device
    shapes: tuple[DecodeShape, ...]
    ours: tuple[OurDecode, ...]
    peers: tuple[Contender, ...] = ()
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 7
    eager: bool = False

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
    """

    plan: BenchPlan
    ceilings: Ceilings
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


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
        result = BenchResult(
            plan, measure_ceilings(plan.device, plan.dtype, plan.page_size, plan.rounds), absent=absent
        )
        _release(plan.device)
        for shape in plan.shapes:
            result.rows.append(_measure_row(plan, shape, result.ceilings))
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
    floor = floor_of(batch, ceilings, plan.rounds)
    measurements = []
    for contender in plan.contenders:
        measurements.append(measure(contender, batch, expected, plan.rounds, plan.eager))
        _release(plan.device)
    return Row(shape, floor, tuple(measurements))


def measure(
    contender: Contender,
    batch: DecodeBatch,
    expected: Sequence[ExpectedSequence],
    rounds: int = 7,
    eager: bool = False,
) -> Measurement:
    """Times ``contender`` on ``batch`` if its result is right before and after: no number without two green checks.

    What it raises becomes a measurement without a number: one contender must not end the run.
    """
    refusal = contender.supports(batch)
    if refusal is not None:
        return Measurement(contender.name, "refused", detail=refusal)
    try:
        return _measure(contender, batch, expected, rounds, eager)
    except peer_errors() as error:  # our own errors are RuntimeErrors and ValueErrors too
        return Measurement(contender.name, "failed", detail=first_line(error))


def _measure(
    contender: Contender, batch: DecodeBatch, expected: Sequence[ExpectedSequence], rounds: int, eager: bool
) -> Measurement:
    step = contender.prepare(batch)
    lse = step.lse if isinstance(step, OurStep) else None
    before = check_result(batch, expected, step(), lse)
    if before.detail:
        return _wrong(contender, before, "")
    if batch.device.type == "cuda":
        captured = CapturedStep(step, batch.device)
        _poison(step)
        time, result = captured.time(rounds), captured.result
    else:
        _poison(step)
        time = time_step(step, batch.device, steps=wall_clock_steps(step), rounds=rounds)
        result = step()
    after = check_result(batch, expected, result, lse)
    if after.detail:
        return _wrong(contender, after, "when repeated, ")
    host = time_host(step, batch.device, rounds=rounds) if eager else None
    return Measurement(contender.name, "measured", time, "", after.out_error, after.lse_error, host)


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
