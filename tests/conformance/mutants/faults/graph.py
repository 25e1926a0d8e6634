"""Faults of kind GRAPH: what was true when the call was prepared."""

from __future__ import annotations

from typing import Any

from conformance.mutants.kernel import Kernel
from conformance.mutants.work import Item, Plan
from torch import Tensor


class StalePlan(Kernel):
    """A replay runs the plan of the capture (vllm #33638)."""

    kind = "GRAPH"

    def refresh(self) -> None:
        pass


class StaleSplits(Kernel):
    """The keys of a split are fixed at capture; a sequence that grows past them loses the rest (sparkinfer #715)."""

    kind = "GRAPH"

    def __init__(self, *args: Any) -> None:
        self.sizes: dict[int, list[int]] = {}
        super().__init__(*args)

    def plan_tile(self, plan: Plan, sequence: int, first_row: int, cuts: list[tuple[int, int]]) -> None:
        ends = self.sizes.setdefault(sequence, [end for _, end in cuts])
        length, starts = plan.lengths[sequence], [0, *ends]
        frozen = [(min(start, length), min(end, length)) for start, end in zip(starts, ends, strict=False)]
        super().plan_tile(plan, sequence, first_row, frozen)


class StaleTable(Kernel):
    """The block table is copied at capture, and pages move later."""

    kind = "GRAPH"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.copied = self.args.table.clone()

    def pages_of(self, item: Item, keys: Tensor) -> tuple[Tensor, Tensor]:
        columns = (keys // self.page_size).clamp(max=self.copied.shape[1] - 1)
        return self.copied[item.sequence][columns].long(), keys % self.page_size


class RowsOfTheCapture(Kernel):
    """Metadata is made for the sequences that were live at capture, and for no other (vllm #21691)."""

    kind = "GRAPH"

    def __init__(self, *args: Any) -> None:
        self.planned: set[int] | None = None
        super().__init__(*args)
        self.planned = {item.sequence for item in self.plan.items if self.plan.lengths[item.sequence]}
        self.plan = self.make_plan()

    def plan_tile(self, plan: Plan, sequence: int, first_row: int, cuts: list[tuple[int, int]]) -> None:
        cuts = cuts if self.planned is None or sequence in self.planned else [(0, 0)]
        super().plan_tile(plan, sequence, first_row, cuts)


class QueriesOfTheCapture(Kernel):
    """Replays read a copy of the queries that was made once."""

    kind = "GRAPH"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: dict[int, Tensor] = {}

    def gather_rows(self, part: Tensor, token: Tensor, head: Tensor) -> Tensor:
        kept = self.kept.setdefault(part.data_ptr(), part.clone())
        return super().gather_rows(kept, token, head)


FAULTS = (StalePlan, StaleSplits, StaleTable, RowsOfTheCapture, QueriesOfTheCapture)
