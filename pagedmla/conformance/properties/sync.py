"""SYNC: the same bits every time, beside other work, on any stream, and with another prepared call under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import specs
from pagedmla.conformance.subject import (
    Broken,
    Result,
    Step,
    Subject,
    first_difference,
    raised_errors_are_broken,
)

# a card runs many calls at once, and that is where races are
_TURNS, _TURNS_ON_CUDA = 20, 100
_BUSY_EVERY, _BUSY_SIZE = 4, 4096
# so many matrix products, a fraction of a millisecond each, in front of inputs that are written late
_DELAYS = 8

_LATE = "prepared with nan in q and kv_cache, which are written just before the run, on its stream"

Raw = tuple[Tensor, Tensor | None]
Example = tuple[BatchSpec, Any]


def _mixed(scope: Scope) -> st.SearchStrategy[BatchSpec]:
    """Batches with holes and several query tokens: parts of a launch without work are in the mix."""
    drawn = st.booleans().flatmap(lambda even: specs(scope.configuration, max_q_len=2, even=even))
    return drawn.filter(lambda spec: sum(spec.query_counts) > 0)


@st.composite
def _one(draw: st.DrawFn, scope: Scope) -> Example:
    return draw(_mixed(scope)), draw(scope.options())


@st.composite
def _two(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, BatchSpec, Any]:
    return draw(_mixed(scope)), draw(_mixed(scope)), draw(scope.options())


def _many_times_the_same_bits(subject: Subject, example: Example) -> None:
    spec, options = example
    first = _alone(subject, spec, options)
    step = Step(spec, options, "a prepared call, run again and again")
    with raised_errors_are_broken(step):
        prepared = subject.adapter.prepare(subject.build(spec), options)
        keep_busy = _busy(subject.device)
        raws: list[Raw] = []
        with _streams(subject.device, 1) as (stream,):
            for turn in range(_turns(subject.device)):
                keep_busy(turn)
                with _on(stream):
                    raws.append(_copied(prepared.run()))
    for turn, raw in enumerate(raws):
        _compare(subject, first, raw, step, f"run {turn} of the same prepared call")


def _two_calls_do_not_meet(subject: Subject, example: tuple[BatchSpec, BatchSpec, Any]) -> None:
    *batches, options = example
    alone = [_alone(subject, spec, options) for spec in batches]
    steps = [Step(spec, options, "beside another prepared call, in turn with it") for spec in batches]
    raws: list[tuple[int, Raw]] = []
    with raised_errors_are_broken(steps[0]):
        prepared = [subject.adapter.prepare(subject.build(spec), options) for spec in batches]
        with _streams(subject.device, 2) as streams:
            for _ in range(_turns(subject.device) // 2):
                for which, stream in enumerate(streams):
                    with _on(stream):
                        raws.append((which, _copied(prepared[which].run())))
    for which, raw in raws:
        _compare(subject, alone[which], raw, steps[which], "alone, and beside another prepared call")


def _late_inputs_are_read_late(subject: Subject, example: Example) -> None:
    spec, options = example
    first = _alone(subject, spec, options)
    call, step = subject.build(spec), Step(spec, options, _LATE)
    contents = [(tensor, tensor.clone()) for tensor in (call.q, call.kv_cache)]
    with raised_errors_are_broken(step):
        for tensor, _ in contents:
            # a nan in every dtype but e4m3fnuz, which has it as another number
            tensor.view(torch.uint8).fill_(0xFF)
        prepared = subject.adapter.prepare(call, options)
        keep_busy = _busy(subject.device)
        with _streams(subject.device, 1) as (stream,), _on(stream):
            # work in front of the copies: whoever does not wait for this stream reads what was there before them
            for _ in range(_DELAYS):
                keep_busy(0, here=True)
            for tensor, content in contents:
                tensor.copy_(content)
            prepared.refresh()
            raw = _copied(prepared.run())
    _compare(subject, first, raw, step, "with inputs in place, and with inputs that were written just before")


def _alone(subject: Subject, spec: BatchSpec, options: Any) -> Result:
    """A right result of one run, in memory that no later one writes to.

    Not by ``subject.run``, which has torch use deterministic algorithms: those of the runs that follow may have other bits.
    """
    subject.require(spec, options)
    with raised_errors_are_broken(Step(spec, options)):
        raw = _copied(subject.adapter.prepare(subject.build(spec), options).run())
    result = subject.normalise(*raw, spec, options)
    subject.check(result, spec, options)
    return result


def _copied(raw: Raw) -> Raw:
    """A call may write to the same outputs every time."""
    return raw[0].clone(), None if raw[1] is None else raw[1].clone()


def _compare(subject: Subject, first: Result, raw: Raw, step: Step, what: str) -> None:
    difference = first_difference(first, subject.normalise(*raw, step.spec, step.options))
    if difference:
        raise Broken(f"{difference}: {what}", Step(step.spec, step.options), step)


def _turns(device: torch.device) -> int:
    return _TURNS_ON_CUDA if device.type == "cuda" else _TURNS


@contextmanager
def _streams(device: torch.device, count: int) -> Iterator[list[torch.cuda.Stream | None]]:
    """Side streams that begin after what was launched so far, and are waited for at the end; off CUDA None, no stream."""
    if device.type != "cuda":
        yield [None] * count
        return
    torch.cuda.synchronize(device)
    yield [torch.cuda.Stream(device) for _ in range(count)]
    torch.cuda.synchronize(device)


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _busy(device: torch.device) -> Callable[..., None]:
    """Launches a matrix product every few turns, on a stream of its own or ``here``, so that calls share the card with it."""
    if device.type != "cuda":
        return lambda turn, here=False: None
    matrix = torch.randn(_BUSY_SIZE, _BUSY_SIZE, dtype=torch.bfloat16, device=device)
    product, beside = torch.empty_like(matrix), torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))

    def launch(turn: int, here: bool = False) -> None:
        if turn % _BUSY_EVERY == 0:
            with _on(None if here else beside):
                torch.mm(matrix, matrix, out=product)

    return launch


PROPERTIES = (
    Property(
        "SYNC",
        "many-times",
        "the same prepared call gives the same bits every time, on a side stream and beside other kernels too",
        _one,
        _many_times_the_same_bits,
    ),
    Property(
        "SYNC",
        "two-calls",
        "two prepared calls that run in turn, on two streams where there are any, have the bits that each has alone",
        _two,
        _two_calls_do_not_meet,
    ),
    Property(
        "SYNC",
        "late-inputs",
        "a prepared call reads what was written just before it on its stream, and not sooner",
        _one,
        _late_inputs_are_read_late,
        needs=frozenset({"graph"}),
    ),
)
