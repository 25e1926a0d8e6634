"""What the plan step hands to the run step of the kernel in ``kernel.py``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Item:
    """A tile of rows of one sequence against a range of its keys: one workgroup's work.

    Attributes:
        sequence: index of the sequence.
        first_row: first row of the tile; a sequence's rows are its query tokens times its heads, heads innermost.
        first_key, end_key: the keys, in tokens; an empty range is a split without keys.
        slot: where its partial state goes; None: it is the only split and writes the result itself.
    """

    sequence: int
    first_row: int
    first_key: int
    end_key: int
    slot: int | None


@dataclass(frozen=True)
class Merge:
    """The reduction of one tile of rows over its splits.

    Attributes:
        sequence, first_row: the tile, as in ``Item``.
        slots: where the partial states are.
    """

    sequence: int
    first_row: int
    slots: range


@dataclass
class Plan:
    """The work of a launch, and the numbers on the device that it was made from.

    Attributes:
        lengths: keys of each sequence, in tokens, bounded by the table.
        starts: first query token of each sequence, and the end, bounded by the queries.
        items: in launch order.
        merges: tiles of rows with several splits.
        orphans: query tokens of no sequence.
        slots: partial states, of ``ROWS`` rows each.
    """

    lengths: list[int]
    starts: list[int]
    items: list[Item] = field(default_factory=list)
    merges: list[Merge] = field(default_factory=list)
    orphans: list[int] = field(default_factory=list)
    slots: int = 0
