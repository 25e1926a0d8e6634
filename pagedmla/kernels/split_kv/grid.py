"""How many programs a decode launches and how much it may note down, from what the host knows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.target import Target
from pagedmla.kernels.policy import TileConfig

MOST_LANES = 8
"""Row tiles of one sequence that are worked on side by side, at most."""


@dataclass(frozen=True)
class DecodeGrid:
    """The grid of one decode.

    Attributes:
        persistent: the schedule; otherwise split.
        units: row tiles, at most.
        num_lanes: persistent: workers that share the row tiles of the same keys.
        programs: of the decode kernel.
        num_splits: parts of a row tile's keys in the split schedule.
        tiles_per_split: KV tiles of a split in batch-invariant mode, else 0 (equal parts).
        slots: partial states that may be written; 0 means that every row is written at once.
        segments: segments that may be noted down.
    """

    persistent: bool
    units: int
    num_lanes: int
    programs: int
    num_splits: int
    tiles_per_split: int
    slots: int
    segments: int


def most_units(num_tokens: int, num_seqs: int, num_heads: int, block_m: int, even_q_len: int | None) -> int:
    """Row tiles of a batch, at most: what the host can say without the query starts.

    A sequence's last tile may be short; with ragged queries the padding counts as one more sequence.
    """
    if even_q_len is not None:
        return num_seqs * -(-even_q_len * num_heads // block_m)
    return num_tokens * num_heads // block_m + min(num_tokens, num_seqs + 1)


def decode_grid(
    problem: DecodeProblem,
    target: Target,
    config: TileConfig,
    units: int,
    num_seqs: int,
    capacity: int,
    rows: int = 0,
) -> DecodeGrid:
    """The grid for ``units`` row tiles of ``num_seqs`` sequences of at most ``capacity`` tokens.

    ``rows``: of each sequence that has queries, where the host knows that they are alike; else 0.
    """
    workers = target.compute_units * config.programs_per_compute_unit
    kv_tiles = max(1, -(-capacity // config.block_n))
    if not is_split(problem):
        num_lanes = min(lane_count(problem.num_heads, config.block_m, rows), workers)
        workers -= workers % num_lanes
        # the numbers of row tiles have a gap for each sequence without queries
        segments = num_lanes * (workers // num_lanes + units + num_seqs + 1)
        return DecodeGrid(
            persistent=True,
            units=units,
            num_lanes=num_lanes,
            programs=workers,
            num_splits=1,
            tiles_per_split=0,
            slots=2 * workers,
            segments=segments,
        )
    tiles_per_split = 0
    if problem.batch_invariant:
        tiles_per_split = config.invariant_split // config.block_n
        splits = -(-kv_tiles // tiles_per_split)
    else:
        # more splits than tiles are empty ones
        splits = min(problem.num_kv_splits or automatic_splits(units, workers, kv_tiles), kv_tiles)
    programs = units * splits
    return DecodeGrid(
        persistent=False,
        units=units,
        num_lanes=1,
        programs=programs,
        num_splits=splits,
        tiles_per_split=tiles_per_split,
        slots=programs if splits > 1 else 0,
        segments=programs,
    )


def lane_count(num_heads: int, block_m: int, rows: int) -> int:
    """Lanes that give each the same number of a sequence's row tiles; workers of a lane without tiles would stand idle.

    Where the host does not know how many rows a sequence has, it has a multiple of ``num_heads``.
    """
    if rows == 0 and num_heads % block_m:
        return 1
    row_tiles = -(-(rows or num_heads) // block_m)
    return next(lanes for lanes in range(min(row_tiles, MOST_LANES), 0, -1) if row_tiles % lanes == 0)


def largest_grid(
    problem: DecodeProblem,
    target: Target,
    config: TileConfig,
    units: int,
    num_seqs: int,
    capacity: int,
) -> DecodeGrid:
    """A grid that needs the memory of any decode of at most so many row tiles, sequences and tokens."""
    grid = decode_grid(problem, target, config, units, num_seqs, capacity)
    if grid.persistent:
        # whatever the number of lanes, and however few workers it leaves over
        return replace(grid, segments=MOST_LANES * grid.segments)
    if not problem.batch_invariant and problem.num_kv_splits is None:
        # fewer row tiles are cut into more splits: units * ceil(workers / units) < units + workers
        most = units + target.compute_units * config.programs_per_compute_unit
        return replace(grid, programs=most, slots=most, segments=most)
    return grid


def is_split(problem: DecodeProblem) -> bool:
    """Whether a problem runs in the split schedule: where it is asked for, or where only it can do what is asked."""
    return problem.schedule == "split" or problem.num_kv_splits is not None or problem.batch_invariant


def automatic_splits(units: int, workers: int, kv_tiles: int) -> int:
    """Splits that bring ``units`` row tiles to one program a worker, with at least one KV tile each."""
    return max(1, min(-(-workers // max(units, 1)), kv_tiles))
