"""What came of an examination: findings, their matrix, and their JSON."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pagedmla.contract.errors import InvalidArgument

STATUSES = ("hung", "died", "failed", "passed", "refused", "not applied")
"""Worst first.  A refusal is no worse than a pass: nothing is held against an implementation that says no."""

NAN_KIND, NAN_PROPERTY = "MEM", "poison"
"""Whose fault it is when nan around the tokens spoils a result."""

ONLY_WITH_NAN = "kept with finite numbers around the tokens, and broken by nan there"

BAD = frozenset({"hung", "died", "failed"})
"""What makes an examination fail."""


@dataclass(frozen=True)
class Finding:
    """What came of one property and one configuration.

    Attributes:
        kind: kind of fault, a key of ``properties.KINDS``.
        property: name of the property.
        promise: what it promises, a sentence.
        configuration: name of the configuration.
        status: one of ``STATUSES``.  died: the process ended, or its device's context was lost; hung: it was killed.
        examples: how many were run to their end.
        detail: what is wrong, or why nothing was asked; empty for most that passed.
        example: repr of the example that shows it, or that was running.
        reproducer: a script that shows it; empty where there is nothing to show.
        seconds: how long the property was asked for.
        only_with_nan: it failed, and is kept where finite numbers lie around the tokens.
    """

    kind: str
    property: str
    promise: str
    configuration: str
    status: str
    examples: int = 0
    detail: str = ""
    example: str = ""
    reproducer: str = ""
    seconds: float = 0.0
    only_with_nan: bool = False

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise InvalidArgument("status", "status", "one of " + ", ".join(STATUSES), repr(self.status))

    # the field of that name hides the decorator
    @builtins.property
    def bad(self) -> bool:
        """Whether it is held against the implementation."""
        return self.status in BAD

    @builtins.property
    def title(self) -> str:
        """Such as ``PAGE moved-pages, h16 p64 bf16``."""
        return f"{self.kind} {self.property}, {self.configuration}"


def blame_nan_once(findings: Sequence[Finding]) -> list[Finding]:
    """Findings in which nan around the tokens is held against one kind.

    Where ``NAN_PROPERTY`` failed, in whatever configuration, what other kinds keep without nan counts as kept, and says so.
    Where it did not fail, or was not asked, every finding stands: a fault is never without a finding.
    """
    blamed = any(
        found.kind == NAN_KIND and found.property == NAN_PROPERTY and found.status == "failed"
        for found in findings
    )
    if not blamed:
        return list(findings)
    return [
        replace(found, status="passed", detail=f"{ONLY_WITH_NAN}: see {NAN_KIND}", example="", reproducer="")
        if found.only_with_nan
        else found
        for found in findings
    ]


@dataclass(frozen=True)
class Cell:
    """One kind and one configuration.

    Attributes:
        status: the worst of its findings.
        examples: of all of them.
    """

    status: str
    examples: int


CELL_WORDS = {
    "passed": "ok",
    "failed": "FAILED",
    "died": "DIED",
    "hung": "HUNG",
    "refused": "no (refused)",
    "not applied": "-",
}
"""What a cell of the matrix says: words, since colours alone say nothing to some readers, and nothing in a log."""


def cell_text(cell: Cell | None) -> str:
    """A cell's word, with the number of examples where some were asked; None: nothing was asked."""
    if cell is None:
        return CELL_WORDS["not applied"]
    word = CELL_WORDS[cell.status]
    return word if cell.status in ("refused", "not applied") else f"{word} {cell.examples}"


@dataclass(frozen=True)
class Report:
    """A whole examination.

    Attributes:
        impl: what was examined, as ``--impl`` takes it.
        version: of the software.
        device: where its tensors were, in torch's words.
        seed: of the draws.
        examples: most examples of a property.
        findings: in the order of kinds, configurations and properties.
        seconds: how long it took.
        machine: the machine, in one line; empty when nobody filled it in.
        versions: of Python and of the packages that matter; None: not installed.
        command: the words after ``python`` that examine the same again; empty when it was no command.
        declared: what of its answers is not as in the contract, in words: it was judged by that.
    """

    impl: str
    version: str
    device: str
    seed: int
    examples: int
    findings: tuple[Finding, ...]
    seconds: float = 0.0
    machine: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    command: str = ""
    declared: tuple[str, ...] = ()

    @property
    def bad(self) -> tuple[Finding, ...]:
        """The findings that are held against the implementation."""
        return tuple(finding for finding in self.findings if finding.bad)

    def count(self, status: str) -> int:
        """How many findings have ``status``."""
        return sum(finding.status == status for finding in self.findings)

    def matrix(self) -> dict[tuple[str, str], Cell]:
        """(kind, configuration) -> the worst status and the examples of its findings."""
        cells: dict[tuple[str, str], Cell] = {}
        for finding in self.findings:
            key = finding.kind, finding.configuration
            before = cells.get(key, Cell("not applied", 0))
            worst = min(before.status, finding.status, key=STATUSES.index)
            cells[key] = Cell(worst, before.examples + finding.examples)
        return cells

    def kinds(self) -> list[str]:
        """Rows of the matrix, in the order in which they were asked."""
        return list(dict.fromkeys(finding.kind for finding in self.findings))

    def configurations(self) -> list[str]:
        """Columns of the matrix, likewise."""
        return list(dict.fromkeys(finding.configuration for finding in self.findings))

    def document(self) -> dict[str, Any]:
        """The report as JSON takes it; seconds are rounded to milliseconds."""
        whole = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "findings"}
        whole["versions"] = dict(self.versions)
        whole["declared"] = list(self.declared)
        whole["seconds"] = _milliseconds(self.seconds)
        whole["counts"] = {status: self.count(status) for status in STATUSES}
        whole["findings"] = [
            {**asdict(finding), "seconds": _milliseconds(finding.seconds)} for finding in self.findings
        ]
        return whole

    def to_json(self) -> str:
        """The report as one JSON document."""
        return json.dumps(self.document(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that ``to_json`` wrote.

        Raises:
            InvalidArgument: ``text`` is none.
        """
        try:
            given = json.loads(text)
            known = {f.name for f in fields(cls)}
            findings = tuple(Finding(**finding) for finding in given["findings"])
            declared = tuple(given.get("declared", ()))
            plain = {name: value for name, value in given.items() if name in known}
            return cls(**plain | {"findings": findings, "declared": declared})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument("report", "text", "a report as to_json writes it", repr(error)) from error


def _milliseconds(seconds: float) -> float:
    return round(seconds, 3) if math.isfinite(seconds) else 0.0
