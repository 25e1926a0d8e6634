"""The split-KV work plan: who attends to which KV tile, and where partial states go.  Host side, plain Python.

Kernels make this plan on the device, from the step's lengths, so that a captured graph stays right when lengths change.  This
module states what they must come to, and computes it independently; it is not on the decode path.

**Data.**  A KV tile is ``kv_tile`` consecutive tokens of a sequence; a row is a (query token, head) pair, numbered
``query token * num_heads + head``.  A *unit* is one row tile (at most ``rows_per_tile`` rows) of one sequence: its rows read
the same KV tiles.  A *segment* is a range of a unit's tiles that one worker attends to.  If it is the whole unit, the worker
writes the result ("final", slot None); otherwise it leaves a partial state in a *slot* of the workspace, to be merged.

With n tiles of keys in the unit, T tiles in all units laid end to end, and W = min(num_workers, T):

    persistent         worker w: global tiles [w*T//W, (w+1)*T//W)         slots 2*w and 2*w + 1
    split              split s of N: the unit's tiles [s*n//N, (s+1)*n//N)  slot unit*N + s
    fixed split size   split s: tiles [s*F, min((s+1)*F, n))                slot unit*N + s, N = ceil(capacity tiles / F)

**Invariants.**  ``plan_cover.check_cover`` looks for the breach of each one but the second:

1. Every (row, KV tile with keys) pair is in exactly one segment.
2. Persistent: two workers' shares differ by at most one tile, whatever the lengths are.  (A kernel may divide units and workers
   into lanes, each with a plan of its own for its units; then this holds within a lane.)
3. A slot is written at most once, so its size is known before the lengths are: 2 * num_workers, or units * N.
4. The pieces of a unit are consecutive workers, and rising slots, in the order of its keys: merging by rising slot is merging
   in KV order, the same in every run.
5. Every unit has a writer.  One without keys counts as a tile in the persistent schedule and has its (empty) splits in the
   others, so its rows are written: out 0, lse -inf.

**Bounded values.**  Lengths and query starts come from device memory and may hold anything.  They are bounded as the kernels
bound them: a length to 0 .. capacity, a start to 0 .. num_tokens, and one that falls to the largest before it.  The first start
counts as 0: query tokens before it lie in the first sequence's row tiles, and the decode kernel, which knows better, writes
(0, -inf) there.  So no plan leads outside the tensors, and every row has one unit, whatever the starts are.

**Example.**  Three sequences of 5, 0 and 9 tiles, one row tile each, on 4 workers.  T = 15, and the shares begin at global
tiles 0, 3, 7 and 11.

>>> units = plan_units([300, 0, 513], num_tokens=3, num_heads=16, rows_per_tile=16, kv_tile=64, capacity=1024)
>>> [(unit.first_tile, unit.kv_tiles) for unit in units]
[(0, 5), (5, 1), (6, 9)]
>>> for segment in plan_persistent(units, 4):
...     print(segment)
Segment(worker=0, unit=0, tile_begin=0, tile_end=3, slot=1)
Segment(worker=1, unit=0, tile_begin=3, tile_end=5, slot=2)
Segment(worker=1, unit=1, tile_begin=0, tile_end=1, slot=None)
Segment(worker=1, unit=2, tile_begin=0, tile_end=1, slot=3)
Segment(worker=2, unit=2, tile_begin=1, tile_end=5, slot=4)
Segment(worker=3, unit=2, tile_begin=5, tile_end=9, slot=6)
>>> from pagedmla.paging.plan_cover import check_cover
>>> check_cover(plan_persistent(units, 4), units)
[]

Two splits of each unit: the one without keys has two empty ones.

>>> [(s.unit, s.tile_begin, s.tile_end, s.slot) for s in plan_split(units, 2)]
[(0, 0, 2, 0), (0, 2, 5, 1), (1, 0, 0, 2), (1, 0, 0, 3), (2, 0, 4, 4), (2, 4, 9, 5)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pagedmla.contract.errors import InvalidArgument


@dataclass(frozen=True)
class Unit:
    """One row tile of one sequence, with all of the sequence's KV tiles.

    Attributes:
        number: its place among all units, by sequence, then by row tile.
        sequence: index in the batch; the number of sequences itself for the padding behind the last query token.
        row_tile: index among the sequence's row tiles.
        row_begin, row_end: rows [row_begin, row_end) of the call, row = query token * num_heads + head.
        key_tiles: KV tiles that hold keys; 0 for a sequence without keys.
        first_tile: global number of its first tile, with the tiles (``kv_tiles``) of all units laid end to end.
    """

    number: int
    sequence: int
    row_tile: int
    row_begin: int
    row_end: int
    key_tiles: int
    first_tile: int

    @property
    def kv_tiles(self) -> int:
        """Tiles that the persistent schedule counts: at least one, so that somebody writes the rows."""
        return max(1, self.key_tiles)

    @property
    def end_tile(self) -> int:
        """Global number of the tile after its last."""
        return self.first_tile + self.kv_tiles


@dataclass(frozen=True)
class Segment:
    """A range of one unit's tiles, attended to by one worker.

    Attributes:
        worker: persistent: the worker; split schedules: the program, unit * num_splits + split.
        unit: ``Unit.number``.
        tile_begin, tile_end: tiles [tile_begin, tile_end) of the unit, counted from its sequence's first token; equal for an
            empty split.
        slot: where the partial state goes; None: the worker writes the result itself.
    """

    worker: int
    unit: int
    tile_begin: int
    tile_end: int
    slot: int | None


def query_ranges(
    num_seqs: int, num_tokens: int, cu_seqlens_q: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Query tokens [begin, end) of each sequence, bounded to 0 .. num_tokens; each range begins where the one before it ends.

    Args:
        num_seqs: sequences of the batch.
        num_tokens: query tokens of the call, padding included.
        cu_seqlens_q: [num_seqs + 1] query starts, any values: the first counts as 0, and one that falls as the largest before
            it.  Left out: num_tokens / num_seqs query tokens for every sequence.

    Returns:
        num_seqs ranges and, with ``cu_seqlens_q``, one more: the padding from the largest start to ``num_tokens``.  Without
        sequences it is everything.

    Raises:
        InvalidArgument: the wrong number of starts, or query tokens that do not divide evenly where there are none.
    """
    if cu_seqlens_q is None:
        q_len = num_tokens // num_seqs if num_seqs else 0
        if q_len * num_seqs != num_tokens:
            wanted = f"a multiple of {num_seqs} query tokens, or cu_seqlens_q"
            raise InvalidArgument("q_rows", "num_tokens", wanted, str(num_tokens))
        return [(i * q_len, (i + 1) * q_len) for i in range(num_seqs)]
    if len(cu_seqlens_q) != num_seqs + 1:
        raise InvalidArgument("num_seqs", "cu_seqlens_q", f"{num_seqs + 1} starts", str(len(cu_seqlens_q)))
    inside = [0, *(min(max(start, 0), num_tokens) for start in cu_seqlens_q[1:]), num_tokens]
    return list(pairwise(accumulate(inside, max)))


def plan_units(
    seq_lens: Sequence[int],
    *,
    num_tokens: int,
    num_heads: int,
    rows_per_tile: int,
    kv_tile: int,
    capacity: int,
    cu_seqlens_q: Sequence[int] | None = None,
) -> list[Unit]:
    """All units of a call, in order; a sequence without query tokens has none.

    Args:
        seq_lens: [num_seqs] keys of each sequence in tokens, any values.
        num_tokens: query tokens of the call, padding included.
        num_heads: heads, hence rows of a query token.
        rows_per_tile: rows of a full row tile.
        kv_tile: tokens of a KV tile.
        capacity: tokens that a row of the block table can hold (width * page_size); no sequence is longer.
        cu_seqlens_q: [num_seqs + 1] query starts, see ``query_ranges``.

    Raises:
        InvalidArgument: a size that is not positive, or what ``query_ranges`` refuses.
    """
    for name, value in (("num_heads", num_heads), ("rows_per_tile", rows_per_tile), ("kv_tile", kv_tile)):
        _check_at_least(1, name, value)
    _check_at_least(0, "num_tokens", num_tokens)
    _check_at_least(0, "capacity", capacity)
    # the padding's pseudo-sequence has no keys
    lengths = [min(max(length, 0), capacity) for length in seq_lens] + [0]
    units: list[Unit] = []
    first_tile = 0
    for sequence, (begin, end) in enumerate(query_ranges(len(seq_lens), num_tokens, cu_seqlens_q)):
        key_tiles = -(-lengths[sequence] // kv_tile)  # rounded up
        row_end = end * num_heads
        for row_tile, row in enumerate(range(begin * num_heads, row_end, rows_per_tile)):
            last = min(row + rows_per_tile, row_end)
            unit = Unit(len(units), sequence, row_tile, row, last, key_tiles, first_tile)
            first_tile = unit.end_tile
            units.append(unit)
    return units


def plan_persistent(units: Sequence[Unit], num_workers: int) -> list[Segment]:
    """The persistent schedule: every worker takes an equal share of all tiles, crossing the borders of units.

    A worker needs two slots, and uses each at most once.  Its share is one interval of global tiles, [lo, hi), and a partial
    state comes only from a unit that lies on both sides of lo or of hi.  At most one unit holds tiles lo - 1 and lo; it began
    in an earlier worker and takes slot 2*w.  At most one unit holds hi - 1 and hi; if it begins in this worker it takes
    2*w + 1, and if it does not it holds lo - 1 too, is the unit of slot 2*w, and takes nothing else.

    Args:
        units: all units of the call, as ``plan_units`` orders them.
        num_workers: workers that are launched; those past the number of tiles get nothing.

    Returns: segments in the order of global tiles, hence by worker, then in the order the worker takes them.
    """
    _check_at_least(1, "num_workers", num_workers)
    num_tiles = units[-1].end_tile if units else 0
    workers = min(num_workers, num_tiles)
    segments = []
    for unit in units:
        owners = unit_workers(unit, num_tiles, workers)
        for worker in owners:
            begin = max(worker * num_tiles // workers - unit.first_tile, 0)
            end = min((worker + 1) * num_tiles // workers - unit.first_tile, unit.kv_tiles)
            slot = None if len(owners) == 1 else partial_slot(worker, owners)
            segments.append(Segment(worker, unit.number, begin, end, slot))
    return segments


def unit_workers(unit: Unit, num_tiles: int, num_workers: int) -> range:
    """The workers of the persistent schedule among which ``unit`` is cut, in KV order; as many as it has pieces.

    Global tile t belongs to the largest w with w*T//W <= t, that is w*T < (t + 1)*W, that is w <= ((t + 1)*W - 1)//T.

    Args:
        unit: the unit.
        num_tiles: T, tiles of all units.
        num_workers: W, workers that have tiles: at most ``num_tiles``.
    """
    first = ((unit.first_tile + 1) * num_workers - 1) // num_tiles
    last = (unit.end_tile * num_workers - 1) // num_tiles
    return range(first, last + 1)


def partial_slot(worker: int, owners: range) -> int:
    """Slot of the partial state that ``worker``, one of a unit's ``owners``, leaves in the persistent schedule."""
    return 2 * worker + 1 if worker == owners[0] else 2 * worker


def plan_split(units: Sequence[Unit], num_splits: int) -> list[Segment]:
    """The split schedule: every unit is cut into ``num_splits`` ranges of its key tiles, empty ones included.

    Each split writes its slot, an empty one the state of no keys.  One split is final and has no slot.
    """
    _check_at_least(1, "num_splits", num_splits)
    return [
        _split(unit, s, num_splits, s * unit.key_tiles // num_splits, (s + 1) * unit.key_tiles // num_splits)
        for unit in units
        for s in range(num_splits)
    ]


def plan_fixed_splits(units: Sequence[Unit], tiles_per_split: int, capacity_tiles: int) -> list[Segment]:
    """The batch-invariant schedule: splits of ``tiles_per_split`` tiles, so that a row's cuts depend on its length alone.

    Args:
        units: all units of the call.
        tiles_per_split: F, KV tiles of a full split.
        capacity_tiles: tiles that the longest possible sequence has; gives the number of splits, see ``fixed_split_count``.

    Raises:
        InvalidArgument: a size that is not positive, or a unit with more tiles than the capacity.
    """
    num_splits = fixed_split_count(tiles_per_split, capacity_tiles)
    longest = max((unit.key_tiles for unit in units), default=0)
    _check_at_least(longest, "capacity_tiles", capacity_tiles)
    segments = []
    for unit in units:
        # past the unit's end both bounds stop there: an empty split
        cuts = [min(s * tiles_per_split, unit.key_tiles) for s in range(num_splits + 1)]
        segments += [_split(unit, s, num_splits, cuts[s], cuts[s + 1]) for s in range(num_splits)]
    return segments


def fixed_split_count(tiles_per_split: int, capacity_tiles: int) -> int:
    """Splits of the batch-invariant schedule: enough for the capacity, and one where that is nothing."""
    _check_at_least(1, "tiles_per_split", tiles_per_split)
    _check_at_least(0, "capacity_tiles", capacity_tiles)
    return max(1, -(-capacity_tiles // tiles_per_split))


def _split(unit: Unit, split: int, num_splits: int, begin: int, end: int) -> Segment:
    program = unit.number * num_splits + split
    return Segment(program, unit.number, begin, end, None if num_splits == 1 else program)


def _check_at_least(least: int, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(name, name, f"a whole number >= {least}", repr(value))
