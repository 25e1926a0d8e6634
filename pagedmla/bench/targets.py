"""What this project wants to reach on one NVIDIA H200, as data, and the word on each that a run gives.

A target that is missed is a fact and no error: the command's exit status does not know of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from pagedmla.bench.figures import Figures
from pagedmla.bench.shapes import HEAD_COUNTS, QUERY_LENGTHS, named_shapes


@dataclass(frozen=True)
class Verdict:
    """What a run says about a target.

    Attributes:
        what: which, in a few words.
        got, limit: with their units.
        met: whether it is reached.
    """

    what: str
    got: str
    limit: str
    met: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.got}, limit {self.limit}: {'met' if self.met else 'missed'}"


class Goal(Protocol):
    """A target."""

    def verdict(self, figures: Figures, ours: str) -> Verdict | None:
        """The word on the contender ``ours``; None when the run has not what it takes."""


@dataclass(frozen=True)
class TimeAtMost:
    """A shape's time, microseconds."""

    shape: str
    limit_us: float

    def verdict(self, figures: Figures, ours: str) -> Verdict | None:
        """See ``Goal``."""
        us = figures.value(self.shape, ours)
        if us is None:
            return None
        return Verdict(self.shape, f"{us:.1f} us", f"{self.limit_us:g} us", us <= self.limit_us)


@dataclass(frozen=True)
class OverFloor:
    """A shape's time over a floor of the same run: ``floor_us``, ``read_us`` or ``arithmetic_us``."""

    shape: str
    limit: float
    floor: str = "floor_us"

    def verdict(self, figures: Figures, ours: str) -> Verdict | None:
        """See ``Goal``."""
        us, floor = figures.value(self.shape, ours), figures.floor(self.shape, self.floor)
        if us is None or floor is None:
            return None
        words = {"floor_us": "floor", "read_us": "read limit", "arithmetic_us": "matmul limit"}[self.floor]
        got = f"{us:.1f} us, {us / floor:.3f} of its {words}"
        return Verdict(self.shape, got, f"{self.limit:g}", us / floor <= self.limit)


@dataclass(frozen=True)
class MatmulShare:
    """A shape's operations a second over the matmul rate of the same run."""

    shape: str
    limit: float
    aim: float

    def verdict(self, figures: Figures, ours: str) -> Verdict | None:
        """See ``Goal``."""
        us, floor = figures.value(self.shape, ours), figures.floor(self.shape, "arithmetic_us")
        if us is None or floor is None:
            return None
        limit = f"{self.limit:g} at least (aim {self.aim:g})"
        return Verdict(self.shape, f"{floor / us:.3f} of the matmul rate", limit, floor / us >= self.limit)


@dataclass(frozen=True)
class AheadOfPeers:
    """Faster than the best peer in every standard row, and ``mean`` times as fast in the geometric mean."""

    mean: float | None

    def verdict(self, figures: Figures, ours: str) -> Verdict | None:
        """See ``Goal``."""
        found = {shape: figures.over_best_peer(shape, ours) for shape in figures.standard}
        ratios = {shape: ratio for shape, ratio in found.items() if ratio is not None}
        # a part of the rows says nothing of all of them
        if len(ratios) < len(named_shapes(["std"])):
            return None
        if self.mean is not None:
            product = 1.0
            for ratio in ratios.values():
                product *= ratio
            mean = product ** (1 / len(ratios))
            what = f"geometric mean over the best peer, {len(ratios)} rows"
            return Verdict(what, f"{mean:.2f}x", f"{self.mean:g}x at least", mean >= self.mean)
        ahead = sum(ratio > 1 for ratio in ratios.values())
        worst = min(ratios, key=ratios.__getitem__)
        got = f"{ahead} of {len(ratios)} rows, least {ratios[worst]:.2f}x at {worst}"
        return Verdict("faster than the best peer", got, "every row", ahead == len(ratios))


@dataclass(frozen=True)
class OverOther:
    """A shape's time over another shape's."""

    shape: str
    other: str
    limit: float

    def verdict(self, figures: Figures, ours: str) -> Verdict | None:
        """See ``Goal``."""
        us, other = figures.value(self.shape, ours), figures.value(self.other, ours)
        if us is None or other is None:
            return None
        what = f"{self.shape} over {self.other}"
        got = f"{us:.1f} over {other:.1f} us, {us / other:.3f}"
        return Verdict(what, got, f"{self.limit:g}", us / other <= self.limit)


@dataclass(frozen=True)
class LargestStep:
    """The largest ratio of neighbours in a list of shapes."""

    what: str
    shapes: tuple[str, ...]
    limit: float

    def verdict(self, figures: Figures, ours: str) -> Verdict | None:
        """See ``Goal``."""
        found = [(shape, figures.value(shape, ours)) for shape in self.shapes]
        times = [(shape, us) for shape, us in found if us is not None]
        if len(times) < len(self.shapes):
            return None
        step, before, after = max((b / a, first, second) for (first, a), (second, b) in pairwise(times))
        return Verdict(
            self.what, f"{step:.2f}x from {before} to {after}", f"{self.limit:g}x", step <= self.limit
        )


@dataclass(frozen=True)
class HostAtMost:
    """What an eager call costs the host in the worst row, microseconds; only where that was timed."""

    limit_us: float

    def verdict(self, figures: Figures, ours: str) -> Verdict | None:
        """See ``Goal``."""
        times = {s: us for s in figures.rows if (us := figures.value(s, ours, "host_us")) is not None}
        if not times:
            return None
        worst = max(times, key=times.__getitem__)
        got = f"{times[worst]:.1f} us at {worst}"
        return Verdict(
            "host time of an eager call", got, f"{self.limit_us:g} us", times[worst] <= self.limit_us
        )


_QUERIES = tuple(f"B128 S4096 H16{f' q{n}' if n > 1 else ''}" for n in QUERY_LENGTHS)

GOALS: tuple[Goal, ...] = (
    AheadOfPeers(mean=None),
    AheadOfPeers(mean=1.35),
    TimeAtMost("B1 S4096 H16", 9),
    TimeAtMost("B1 S32768 H16", 15),
    TimeAtMost("B1 S131072 H16", 43),
    TimeAtMost("B16 S4096 H16", 25),
    TimeAtMost("B64 S4096 H16", 74),
    TimeAtMost("B256 S1024 H16", 75),
    TimeAtMost("B4 S641,45118,1730,1696 H16", 22),
    OverFloor("B64 S~exp4096 H16", 1.2),
    OverFloor("B64 S~exp4096 H128", 1.2),
    OverFloor("B128 S4096 H16", 1.04, "read_us"),
    OverFloor("B128 S8192 H16", 1.04, "read_us"),
    MatmulShare("B128 S8192 H128", 0.80, aim=0.85),
    MatmulShare("B128 S16384 H128", 0.80, aim=0.85),
    *(
        OverOther(f"{shape} p1", shape, 1.10)
        for shape in ("B64 S4096 H16", "B128 S4096 H16", "B64 S4096 H128")
    ),
    *(OverOther(shape, _QUERIES[0], 1.15) for shape in _QUERIES[1:]),
    LargestStep(
        f"largest step between head counts, 1 to {HEAD_COUNTS[-1]}",
        tuple(f"B64 S4096 H{count}" for count in HEAD_COUNTS),
        1.3,
    ),
    HostAtMost(20),
)


def verdicts(figures: Figures, ours: str) -> Iterator[Verdict]:
    """The word on every target that the run has the rows for; none where the run is of something else.

    The targets are of bf16, and of pages of 64 tokens where a shape names none, on a GPU.
    """
    run = figures.document
    if not (
        run["device"].startswith("cuda") and run["dtype"] == "bfloat16" and run["page_size_tokens"] == 64
    ):
        return
    for goal in GOALS:
        found = goal.verdict(figures, ours)
        if found is not None:
            yield found
