"""Which of the two kernels decodes a call, the one for few rows a sequence or the one for many, and how many programs of it.

Either is right for any number of query tokens, so what the host cannot know of ragged queries only costs time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import Refusal
from pagedmla.contract.target import Target
from pagedmla.kernels.gluon.few_heads.layouts import EXTRA as FEW_HEADS_EXTRA
from pagedmla.kernels.gluon.layouts import LATENT
from pagedmla.kernels.gluon.many_heads.layouts import EXTRA as MANY_HEADS_EXTRA
from pagedmla.kernels.gluon.workspace import PartialsLayout
from pagedmla.kernels.policy import GLUON_FEW_HEADS_CONFIG, GLUON_MANY_HEADS_CONFIG, GluonConfig
from pagedmla.kernels.split_kv.grid import most_units

# KV tiles for each program, at most: a kernel counts all tiles in i32, and divides them in float32, which has 24 bits
_MOST_TILES_EACH = 2**22
# tiles that a row tile counts more than it has, at most (shares.py)
_EXTRA_TILES = max(FEW_HEADS_EXTRA.value, MANY_HEADS_EXTRA.value)


@dataclass(frozen=True)
class Choice:
    """A kernel, and how its programs share out the work.

    Attributes:
        config: of the kernel.
        lanes: programs that go through the same keys side by side, with a row tile of a sequence each.
        team_programs: programs of each lane: the team among which the lane's work is shared out.
    """

    config: GluonConfig
    lanes: int
    team_programs: int

    @property
    def kernel(self) -> str:
        """Its name: few_heads or many_heads."""
        return "few_heads" if self.config is GLUON_FEW_HEADS_CONFIG else "many_heads"

    @property
    def programs(self) -> int:
        """Of the launch: all are resident, and wait for one another."""
        return self.lanes * self.team_programs

    @property
    def group_rows(self) -> int:
        """Rows of what is shared out: a row tile for each lane."""
        return self.lanes * self.config.block_rows

    @property
    def columns(self) -> int:
        """Latent columns of a program's part of the values."""
        return LATENT.value // self.config.column_parts

    @cached_property
    def layout(self) -> PartialsLayout:
        """Of the workspace.  Lanes keep their numbers apart, and so do the parts of their programs."""
        teams = self.lanes * self.config.column_parts
        return PartialsLayout(teams, self.team_programs, self.config.block_rows, self.columns)


def choose(args: DecodeArguments, compute_units: int) -> Choice:
    """The kernel for a call."""
    return choose_for(args.rows_hint, compute_units)


def choose_for(rows: int, compute_units: int) -> Choice:
    """The kernel for sequences of about ``rows`` (query token, head) pairs."""
    if rows <= GLUON_FEW_HEADS_CONFIG.block_rows:
        return few_heads(compute_units)
    return many_heads(lanes_for(rows), compute_units)


def possible_choices(problem: DecodeProblem, compute_units: int) -> tuple[Choice, ...]:
    """Those that ``choose`` may make for calls of ``problem``, whatever their numbers of query tokens."""
    choices = [many_heads(lanes, compute_units) for lanes in range(1, GLUON_MANY_HEADS_CONFIG.most_lanes + 1)]
    # a call that does not say how its query tokens are spread may look as if it had more of them
    if problem.num_heads <= GLUON_FEW_HEADS_CONFIG.block_rows:
        choices.append(few_heads(compute_units))
    return tuple(choices)


@lru_cache(maxsize=64)
def few_heads(compute_units: int) -> Choice:
    """The kernel for few rows."""
    return Choice(GLUON_FEW_HEADS_CONFIG, 1, min(compute_units, GLUON_FEW_HEADS_CONFIG.most_programs))


@lru_cache(maxsize=64)
def many_heads(lanes: int, compute_units: int) -> Choice:
    """The kernel for many rows."""
    programs = min(compute_units, GLUON_MANY_HEADS_CONFIG.most_programs)
    lanes = min(lanes, programs)
    return Choice(GLUON_MANY_HEADS_CONFIG, lanes, programs // lanes)


def lanes_for(rows: int) -> int:
    """Lanes for sequences of so many rows: the number that leaves the fewest row tiles empty, and the largest of those.

    A lane's row tile is as far through the keys as its neighbour's, so that they come from memory once.
    """
    config = GLUON_MANY_HEADS_CONFIG
    tiles = max(1, -(-rows // config.block_rows))
    return min(range(config.most_lanes, 0, -1), key=lambda lanes: -tiles % lanes)


def refuses_count(args: DecodeArguments) -> Refusal | None:
    """Why a call is too large for the kernel that is chosen for it, or None."""
    choice = choose(args, Target.detect(args.q.device).compute_units)
    units = most_units(args.num_tokens, args.num_seqs, args.num_heads, choice.group_rows, args.even_q_len)
    if units >= _MOST_TILES_EACH:
        # one of the quotients is a sequence's index
        wanted = f"less than {_MOST_TILES_EACH} row tiles ({choice.group_rows} rows) in all"
        return Refusal("gluon", "num_tiles", "block_table", wanted, str(units))
    capacity = args.block_table.shape[1] * args.kv_cache.shape[1]
    tiles = max(1, -(-capacity // choice.config.block_n)) + _EXTRA_TILES
    # with one unit more for each program, since shares are rounded up
    found = (units + choice.team_programs) * tiles
    most = _MOST_TILES_EACH * choice.team_programs
    if found < most:
        return None
    wanted = f"sequences times columns of less than {most} KV tiles ({choice.config.block_n} tokens) in all"
    return Refusal("gluon", "num_tiles", "block_table", wanted, f"{found} in {list(args.block_table.shape)}")
