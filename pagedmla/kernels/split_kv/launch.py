"""One decode around a backend's own kernel: its sizes, the plan before it and the merge after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.rules_triton import padded
from pagedmla.contract.target import Target
from pagedmla.kernels.policy import TileConfig, TritonMergeConfig, triton_merge_config
from pagedmla.kernels.split_kv.direct import Launch, launch
from pagedmla.kernels.split_kv.grid import DecodeGrid, decode_grid, largest_grid, most_units
from pagedmla.kernels.split_kv.merge import merge_partials_kernel
from pagedmla.kernels.split_kv.schedule import plan_persistent_kernel, plan_split_kernel
from pagedmla.kernels.split_kv.workspace import Workspace, WorkspaceLayout

LOG2_E = 1.4426950408889634
"""Turns natural scores into those that exp2 wants."""

PLAN_WARPS = 4

# tile arithmetic is i32: a longer sequence than this fits no card
_MOST_TOKENS = 2**31 - 2**16


class Step(NamedTuple):
    """One decode and the sizes that it has.

    Attributes:
        args, problem, target, config: what is decoded where, in which tiles.
        capacity: tokens of one sequence that the block table can name.
        grid: programs and partial states.
        layout: bytes of the workspace.
    """

    args: DecodeArguments
    problem: DecodeProblem
    target: Target
    config: TileConfig
    capacity: int
    grid: DecodeGrid
    layout: WorkspaceLayout

    @property
    def query_starts(self) -> torch.Tensor:
        """i32, the query starts.  An even batch has none, and its kernels read none: any i32 pointer will do."""
        args = self.args
        return args.cu_seqlens_q if args.cu_seqlens_q is not None else args.seq_lens

    @property
    def ragged(self) -> bool:
        """Whether there are query starts."""
        return self.args.cu_seqlens_q is not None

    @property
    def causal(self) -> bool:
        """Whether a query may see less than another: one query token sees every key, and there is nothing to hide."""
        return self.args.causal and self.args.most_query_tokens > 1

    @property
    def num_pages(self) -> int:
        """Pages of the cache that a page id, an i32, can name."""
        return min(self.args.kv_cache.shape[0], 2**31 - 1)


def filled_without_keys(args: DecodeArguments, out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Whether nobody can have a key (or nobody asks); every row of ``out`` and ``lse`` is written then."""
    if args.num_tokens == 0:
        return True
    if args.num_seqs == 0 or args.kv_cache.shape[0] == 0 or args.block_table.shape[1] == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return True
    return False


def make_step(args: DecodeArguments, problem: DecodeProblem, target: Target, config: TileConfig) -> Step:
    """The sizes of a decode with ``config``'s tiles."""
    capacity = _capacity(args.block_table.shape[1], problem)
    units = most_units(args.num_tokens, args.num_seqs, args.num_heads, config.block_m, args.even_q_len)
    grid = decode_grid(problem, target, config, units, args.num_seqs, capacity, args.shared_row_tiles)
    return Step(
        args, problem, target, config, capacity, grid, _layout(problem, config, grid, args.num_tokens)
    )


def workspace_bytes(
    problem: DecodeProblem, bounds: BatchBounds, target: Target, configs: Iterable[TileConfig]
) -> int:
    """Bytes of the plan and the partial states of every call within ``bounds``, whichever of ``configs`` it runs with."""
    capacity = _capacity(bounds.max_pages_per_seq, problem)
    num_tokens = bounds.num_tokens(problem)
    largest = 0
    for config in configs:
        units = most_units(num_tokens, bounds.max_num_seqs, problem.num_heads, config.block_m, None)
        grid = largest_grid(problem, target, config, units, bounds.max_num_seqs, capacity)
        largest = max(largest, _layout(problem, config, grid, num_tokens).num_bytes)
    return largest


def _capacity(max_pages: int, problem: DecodeProblem) -> int:
    return min(max_pages * problem.page_size, _MOST_TOKENS)


def _layout(problem: DecodeProblem, config: TileConfig, grid: DecodeGrid, num_tokens: int) -> WorkspaceLayout:
    return WorkspaceLayout(
        programs=grid.programs,
        segments=grid.segments,
        num_rows=num_tokens * problem.num_heads,
        places=grid.slots * config.block_m,
        columns=padded(problem.kv_lora_rank),
    )


def launch_plan(step: Step, parts: Workspace) -> Launch:
    """Notes down who attends to what.  Launched on the current device, as everything of Triton's is."""
    args, grid, starts = step.args, step.grid, step.query_starts
    batch = (
        args.seq_lens, args.seq_lens.stride(0), starts, starts.stride(0),
        args.num_seqs, args.num_tokens, args.even_q_len or 0, args.num_heads, step.capacity,
    )  # fmt: skip
    places = (parts.segments, parts.shares, parts.row_pieces)
    constants = plan_constants(step.config, step.ragged)
    if grid.persistent:
        kernel, programs = plan_persistent_kernel, grid.programs
        sizes = (grid.num_lanes, grid.segments // grid.num_lanes)
    else:
        kernel, programs = plan_split_kernel, grid.units
        sizes = (grid.num_splits, grid.tiles_per_split)
    return launch(kernel, (programs,), (*places, *sizes, *batch), constants, num_warps=PLAN_WARPS)


def launch_merge(step: Step, parts: Workspace, out: torch.Tensor, lse: torch.Tensor) -> list[Launch]:
    """Unites the partial states, where there can be any."""
    grid, layout = step.grid, step.layout
    if not grid.slots:
        return []
    merge = triton_merge_config(step.problem, step.target, layout.num_rows)
    programs = (-(-layout.num_rows // merge.block_rows), layout.columns // merge.block_columns)
    arguments = (
        parts.partial_out, parts.partial_lse, parts.row_pieces, out, lse,
        layout.num_rows, step.args.num_heads, layout.places,
        out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
    )  # fmt: skip
    constants = merge_constants(step.problem, step.config, merge, grid.persistent)
    options = {"num_warps": merge.num_warps, **overlapped_launch(step.config)}
    return [launch(merge_partials_kernel, programs, arguments, constants, **options)]


def overlapped_launch(config: TileConfig) -> dict[str, bool]:
    """Launch options of a kernel that may start before the one before it ends (programmatic dependent launch)."""
    # older compilers and other vendors do not know the word: it is only said where it is wanted
    return {"launch_pdl": True} if config.overlapped_launches else {}


def plan_constants(config: TileConfig, ragged: bool) -> dict[str, Any]:
    """The compile-time arguments of the planning kernels."""
    return {
        "RAGGED": ragged,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "OVERLAPPED": config.overlapped_launches,
    }


def merge_constants(
    problem: DecodeProblem, config: TileConfig, merge: TritonMergeConfig, persistent: bool
) -> dict[str, Any]:
    """The compile-time arguments of the merge kernel."""
    return {
        "PERSISTENT": persistent,
        "D": problem.kv_lora_rank,
        "BLOCK_D": padded(problem.kv_lora_rank),
        "BLOCK_M": config.block_m,
        "BLOCK_ROWS": merge.block_rows,
        "BLOCK_COLUMNS": merge.block_columns,
        "BLOCK_PIECES": merge.block_pieces,
        "IN_ORDER": merge.in_order,
        "OVERLAPPED": config.overlapped_launches,
    }
