"""Which of the two kernels decodes a call: the one for few rows a sequence, or the one for many.

Either is right for any number of query tokens, so what the host cannot know of ragged queries only costs time.
"""

from __future__ import annotations

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.rules_gluon import FEW_ROWS
from pagedmla.contract.support import Refusal
from pagedmla.contract.target import Target
from pagedmla.kernels.policy import GLUON_FEW_HEADS_CONFIG
from pagedmla.kernels.split_kv.grid import is_split, most_units

# KV tiles for each program, at most: the kernel counts all tiles in i32, and divides them in float32, which has 24 bits
_MOST_TILES_EACH = 2**22


def few_heads_rows(args: DecodeArguments, problem: DecodeProblem, compute_units: int) -> int | None:
    """Rows of the few-heads kernel's row tile for a call, or None where the many-heads kernel decodes it."""
    if is_split(problem):
        return None
    block_rows = next((rows for rows in GLUON_FEW_HEADS_CONFIG.block_rows if args.rows_hint <= rows), None)
    if block_rows is None or _tiles(args, block_rows, compute_units) >= _most_tiles(compute_units):
        return None
    return block_rows


def possible_rows(problem: DecodeProblem) -> tuple[int, ...]:
    """The row tiles that ``few_heads_rows`` may name for calls of ``problem``."""
    if is_split(problem):
        return ()
    # a call that does not say how its query tokens are spread may look as if it had more of them
    return tuple(rows for rows in GLUON_FEW_HEADS_CONFIG.block_rows if problem.num_heads <= rows)


def num_programs(compute_units: int) -> int:
    """Programs of a few-heads launch: all are resident, and wait for one another."""
    return min(compute_units, GLUON_FEW_HEADS_CONFIG.most_programs)


def refuses_count(args: DecodeArguments) -> Refusal | None:
    """Why a call of few rows is too large for the few-heads kernel, or None.

    Such a call is left to the Triton backend, whose row tiles are smaller than those of the many-heads kernel.
    """
    problem = args.problem()
    if is_split(problem) or problem.num_heads * problem.max_q_len > FEW_ROWS:
        return None
    compute_units = Target.detect(args.q.device).compute_units
    most = _most_tiles(compute_units)
    found = _tiles(args, FEW_ROWS, compute_units)
    if found < most:
        return None
    wanted = f"sequences times columns of less than {most} KV tiles ({GLUON_FEW_HEADS_CONFIG.block_n} tokens) in all"
    return Refusal("gluon", "num_tiles", "block_table", wanted, f"{found} in {list(args.block_table.shape)}")


def _most_tiles(compute_units: int) -> int:
    return _MOST_TILES_EACH * num_programs(compute_units)


def _tiles(args: DecodeArguments, block_rows: int, compute_units: int) -> int:
    """KV tiles of all row tiles, at most; with one row tile more for each program, since shares are rounded up."""
    units = most_units(args.num_tokens, args.num_seqs, args.num_heads, block_rows, args.even_q_len)
    capacity = args.block_table.shape[1] * args.kv_cache.shape[1]
    tiles = max(1, -(-capacity // GLUON_FEW_HEADS_CONFIG.block_n))
    return (units + num_programs(compute_units)) * tiles
