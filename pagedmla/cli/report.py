"""The support table as a report: what a backend takes on a target, what it refuses, and why.

Made from ``pagedmla.contract.support`` alone, for ``pagedmla info`` and docs/support.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedmla.contract.support import AXES, BACKENDS, Axis, refusals, sample_problems
from pagedmla.contract.target import Target


@dataclass(frozen=True)
class AxisReport:
    """One axis of the table, for one backend.

    Attributes:
        field: the field or fields of DecodeProblem.
        rule: what is accepted, in words.
        taken: the sampled values that some accepted problem has.
        refused: the sampled values that no accepted problem has.
    """

    field: str
    rule: str
    taken: tuple[str, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True)
class RefusalGroup:
    """All refusals of one code.

    Attributes:
        code: the error's code.
        argument: the argument at fault.
        given: for each thing that the backend takes, in words, the values that were refused.
    """

    code: str
    argument: str
    given: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class BackendReport:
    """What a backend takes on a target.

    Attributes:
        name: the word that ``backend=`` takes.
        summary: one line about it.
        accepted: how many sampled problems it takes.
        sampled: how many were asked about.
        axes: per axis, what is taken.
        refusals: why the rest is not, grouped by code.
    """

    name: str
    summary: str
    accepted: int
    sampled: int
    axes: tuple[AxisReport, ...]
    refusals: tuple[RefusalGroup, ...]


def report_backend(backend: str, target: Target) -> BackendReport:
    """Asks the table about every sampled problem for ``backend`` on ``target``."""
    taken: list[object] = []
    refused: dict[tuple[str, str], dict[str, list[str]]] = {}
    problems = list(sample_problems())
    for problem in problems:
        found = refusals(problem, target, backend)
        if not found:
            taken.append(problem)
        for refusal in found:
            by_wanted = refused.setdefault((refusal.code, refusal.argument), {})
            given = by_wanted.setdefault(refusal.wanted, [])
            if refusal.got not in given:
                given.append(refusal.got)
    groups = tuple(
        RefusalGroup(code, argument, {wanted: tuple(given) for wanted, given in by_wanted.items()})
        for (code, argument), by_wanted in refused.items()
    )
    axes = tuple(_report_axis(axis, taken) for axis in AXES)
    return BackendReport(backend, BACKENDS[backend].summary, len(taken), len(problems), axes, groups)


def report_all(target: Target) -> list[BackendReport]:
    """A report of every backend that is built, best first."""
    return [report_backend(name, target) for name in BACKENDS]


def _report_axis(axis: Axis, taken: list[object]) -> AxisReport:
    accepted: list[str] = []
    refused: list[str] = []
    for sample in axis.samples:
        seen = any(
            all(getattr(problem, field) == value for field, value in sample.items()) for problem in taken
        )
        (accepted if seen else refused).append(" / ".join(_word(value) for value in sample.values()))
    return AxisReport(axis.field, axis.rule, tuple(accepted), tuple(refused))


def _word(value: object) -> str:
    return str(value).removeprefix("torch.")
