"""A launch of the Gluon kernels as their schedule sees it: what it is given, and what its programs did."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pagedmla.kernels.gluon import layouts, shares
from pagedmla.kernels.gluon.few_heads import consumer
from pagedmla.kernels.gluon.few_heads import layouts as few_layouts
from pagedmla.kernels.gluon.many_heads import halves
from pagedmla.kernels.gluon.many_heads import layouts as many_layouts

from .schedule_language import Pointer, number

KEYS = layouts.KEYS.value


class Kernel(NamedTuple):
    """What the schedule asks of a kernel.

    Attributes:
        few: pieces of a row tile that its first program adds to its own.
        smallest, extra: see ``share_of``.
        rows: of a row tile; 0 where a call says it.
        parts: warpgroups that compute, with a part of the values each.
    """

    few: int
    smallest: int
    extra: int
    rows: int
    parts: int


FEW_HEADS = Kernel(consumer.FEW.value, 1, few_layouts.EXTRA.value, 0, 1)
MANY_HEADS = Kernel(
    halves.FEW.value, many_layouts.SMALLEST.value, many_layouts.EXTRA.value, many_layouts.ROWS.value, 2
)


@dataclass(frozen=True)
class Call:
    """A launch's batch.

    Attributes:
        seq_lens, cu_seqlens_q: as they were given, garbage included; without query starts every sequence has ``even_q_len``.
        num_tokens: query tokens; of an even batch its sequences'.
        rows: of a row tile of the few-heads kernel.
        lanes: of the many-heads kernel; 0 for the few-heads one, which has one.
        programs: of each lane.
    """

    seq_lens: list[int]
    cu_seqlens_q: list[int] | None = None
    num_tokens: int = 0
    even_q_len: int = 1
    num_heads: int = 16
    rows: int = 16
    lanes: int = 0
    capacity: int = 1 << 20
    programs: int = 132

    @property
    def kernel(self) -> Kernel:
        return MANY_HEADS if self.lanes else FEW_HEADS

    @property
    def lane_rows(self) -> int:
        """Rows of a row tile."""
        return self.kernel.rows or self.rows

    @property
    def group_rows(self) -> int:
        """Rows of what is shared out: a row tile for each lane."""
        return self.lane_rows * max(1, self.lanes)

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """(first query token, query tokens, keys) of each sequence, and with query starts of the padding behind."""
        lens = [min(max(length, 0), self.capacity) for length in self.seq_lens]
        if self.cu_seqlens_q is None:
            yield from ((i * self.even_q_len, self.even_q_len, length) for i, length in enumerate(lens))
            return
        inside = [min(max(start, 0), self.num_tokens) for start in self.cu_seqlens_q[1:]]
        ends = list(itertools.accumulate([*inside, self.num_tokens], max))
        for begin, end, length in zip([0, *ends], ends, [*lens, 0], strict=False):
            yield begin, end - begin, length

    def batch(self) -> layouts.Batch:
        starts = self.cu_seqlens_q if self.cu_seqlens_q is not None else []
        tokens = self.num_tokens if self.cu_seqlens_q is not None else len(self.seq_lens) * self.even_q_len
        return layouts.Batch(
            Pointer(np.array(self.seq_lens, np.int32)), 1, Pointer(np.array(starts, np.int32)), 1,
            number(len(self.seq_lens)), number(tokens), number(self.even_q_len), number(self.capacity),
        )  # fmt: skip


@dataclass
class Segment:
    """What a program has of one row tile, as a warpgroup that computes sees it.

    Attributes:
        sequence, q_begin, q_len, kv_len, unit: what it takes the row tile for.
        begin: its first tile of all work.
        keys: (first, the one past the last) of the KV tiles of the sequence.
        steps: (the program's k, first KV tile) of each tile, or pair of tiles; in a short run of the last one.
        query_freed: times that it said that nobody needs the query.
        freed: (k or None, whether it has keys) of its last tile's place, when it said that nobody needs that.
        summed: the turn in which both warpgroups' sums were added.
    """

    sequence: int
    q_begin: int
    q_len: int
    kv_len: int
    unit: shares.Unit
    begin: int
    keys: tuple[int, int] = (0, 0)
    steps: list[tuple[int, int]] = field(default_factory=list)
    query_freed: int = 0
    freed: list[tuple[int | None, bool]] = field(default_factory=list)
    summed: list[int] = field(default_factory=list)


class Union(NamedTuple):
    """A row tile that all its workers unite, ``rows`` being (q_begin, q_len, its first row)."""

    first: int
    pieces: int
    mine: int
    rows: tuple[int, int, int]
    store_lse: bool


@dataclass
class Computed:
    """What a warpgroup that computes did.

    Attributes:
        stored: segments whose row tile it wrote at once, with the number of pieces that it united for it.
        published: slot of a segment's state.
        united: row tiles that it united with others.
        phases: of the queries that it waited for.
    """

    segments: list[Segment] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=dict)
    published: dict[int, int] = field(default_factory=dict)
    united: list[Union] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)


@dataclass
class Load:
    """A segment as the warps that load see it.

    Attributes:
        q_row: first query row.
        keys: as a ``Segment``'s.
        tiles: (k, or with pairs its parity and the tile of the pair), (sequence, KV tile); in a short run of the last step.
        tokens: keys of each, where they are copied one by one.
    """

    q_row: int
    keys: tuple[int, int] = (0, 0)
    tiles: list[tuple[Any, tuple[int, int]]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass
class Program:
    """What the programs of one number did, one of each lane.

    Attributes:
        share: (first tile, tile past the last); shares: what it takes all shares for.
        computed: by lane and part; loaded: by lane and the function that loads.
    """

    worker: int
    share: tuple[int, int]
    shares: shares.Shares
    computed: dict[tuple[int, int], Computed] = field(default_factory=dict)
    loaded: dict[tuple[int, str], list[Load]] = field(default_factory=dict)
