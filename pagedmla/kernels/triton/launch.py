"""The Triton backend's entry: which kernels run on which grid, over which workspace."""

from __future__ import annotations

from typing import Any

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.rules_triton import padded
from pagedmla.contract.target import Target
from pagedmla.kernels.policy import (
    CAUSAL_END_BLOCK_N,
    TritonDecodeConfig,
    TritonMergeConfig,
    triton_decode_config,
    triton_decode_configs,
    triton_merge_config,
)
from pagedmla.kernels.triton.decode import decode_kernel
from pagedmla.kernels.triton.grid import DecodeGrid, decode_grid, largest_grid, most_units
from pagedmla.kernels.triton.interpreted import INTERPRETED
from pagedmla.kernels.triton.merge import merge_partials_kernel
from pagedmla.kernels.triton.schedule import plan_persistent_kernel, plan_split_kernel
from pagedmla.kernels.triton.workspace import Workspace, WorkspaceLayout

_LOG2_E = 1.4426950408889634
# tile arithmetic is i32: a longer sequence than this fits no card
_MOST_TOKENS = 2**31 - 2**16


def decode(
    args: DecodeArguments,
    problem: DecodeProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: TritonDecodeConfig | None = None,
) -> None:
    """Writes every row of ``out`` and ``lse``; see ``pagedmla.decode``.

    Args:
        args, problem, out, lse: checked.
        config: for tuning; left out: the policy's.
    """
    if args.num_tokens == 0:
        return
    if args.num_seqs == 0 or args.kv_cache.shape[0] == 0 or args.block_table.shape[1] == 0:
        # nobody has a key
        out.zero_()
        lse.fill_(-torch.inf)
        return
    target = Target.detect(args.q.device)
    if config is None:
        config = triton_decode_config(problem, target, args.rows_hint)
    capacity = _capacity(args.block_table.shape[1], problem)
    units = most_units(args.num_tokens, args.num_seqs, args.num_heads, config.block_m, args.even_q_len)
    grid = decode_grid(problem, target, config, units, args.num_seqs, capacity, args.shared_row_tiles)
    layout = _layout(problem, config, grid, args.num_tokens)
    parts = layout.carve(args.workspace, args.q.device)
    # Triton launches on the current device, whatever the tensors say
    with torch.cuda.device_of(args.q):
        _launch_plan(args, config, grid, capacity, parts)
        _launch_decode(args, problem, config, grid, capacity, parts, out, lse)
        if grid.slots:
            _launch_merge(args, problem, target, config, grid, layout, parts, out, lse)


def workspace_size(problem: DecodeProblem, bounds: BatchBounds, target: Target) -> int:
    """Bytes of the partial states of every call within ``bounds``, whichever tiles the policy picks for it."""
    capacity = _capacity(bounds.max_pages_per_seq, problem)
    num_tokens = bounds.num_tokens(problem)
    largest = 0
    for config in triton_decode_configs(problem, target):
        units = most_units(num_tokens, bounds.max_num_seqs, problem.num_heads, config.block_m, None)
        grid = largest_grid(problem, target, config, units, bounds.max_num_seqs, capacity)
        largest = max(largest, _layout(problem, config, grid, num_tokens).num_bytes)
    return largest


def _capacity(max_pages: int, problem: DecodeProblem) -> int:
    return min(max_pages * problem.page_size, _MOST_TOKENS)


def _query_starts(args: DecodeArguments) -> torch.Tensor:
    # an even batch has none, and its kernels read none: any i32 pointer will do
    return args.cu_seqlens_q if args.cu_seqlens_q is not None else args.seq_lens


def _layout(
    problem: DecodeProblem, config: TritonDecodeConfig, grid: DecodeGrid, num_tokens: int
) -> WorkspaceLayout:
    return WorkspaceLayout(
        programs=grid.programs,
        segments=grid.segments,
        num_rows=num_tokens * problem.num_heads,
        places=grid.slots * config.block_m,
        columns=padded(problem.kv_lora_rank),
    )


def _launch_plan(
    args: DecodeArguments, config: TritonDecodeConfig, grid: DecodeGrid, capacity: int, parts: Workspace
) -> None:
    starts = _query_starts(args)
    batch = (
        args.seq_lens, args.seq_lens.stride(0), starts, starts.stride(0),
        args.num_seqs, args.num_tokens, args.even_q_len or 0, args.num_heads, capacity,
    )  # fmt: skip
    places = (parts.segments, parts.shares, parts.row_pieces)
    constants = plan_constants(config, args.cu_seqlens_q is not None)
    if grid.persistent:
        sizes = (grid.num_lanes, grid.segments // grid.num_lanes)
        plan_persistent_kernel[(grid.programs,)](*places, *sizes, *batch, **constants, num_warps=PLAN_WARPS)
    else:
        sizes = (grid.num_splits, grid.tiles_per_split)
        plan_split_kernel[(grid.units,)](*places, *sizes, *batch, **constants, num_warps=PLAN_WARPS)


def _launch_decode(
    args: DecodeArguments,
    problem: DecodeProblem,
    config: TritonDecodeConfig,
    grid: DecodeGrid,
    capacity: int,
    parts: Workspace,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    rank, rope = problem.kv_lora_rank, problem.qk_rope_head_dim
    # without a pair, the rotated part is the end of the same rows; without RoPE nothing is read
    q_pe = args.q_pe if args.q_pe is not None else args.q[:, :, rank:] if rope else args.q
    starts = _query_starts(args)
    # one query token sees every key: the causal rule has nothing to hide
    causal = args.causal and args.most_query_tokens > 1
    packed = args.kv_cache.stride()[:2] == (problem.page_size * problem.head_dim_qk, problem.head_dim_qk)
    decode_kernel[(grid.programs,)](
        parts.shares, parts.segments,
        args.q, args.q.stride(0), args.q.stride(1),
        q_pe, q_pe.stride(0), q_pe.stride(1),
        args.kv_cache, args.kv_cache.stride(0), args.kv_cache.stride(1),
        # page ids are i32
        min(args.kv_cache.shape[0], 2**31 - 1),
        args.block_table, args.block_table.stride(0), args.block_table.stride(1),
        args.seq_lens, args.seq_lens.stride(0), starts, starts.stride(0),
        args.num_seqs, args.num_tokens, capacity,
        out, out.stride(0), out.stride(1), lse, lse.stride(0), lse.stride(1),
        parts.partial_out, parts.partial_lse, problem.softmax_scale * _LOG2_E,
        **decode_constants(problem, config, args.cu_seqlens_q is not None, causal, packed),
        num_warps=config.num_warps, num_stages=config.num_stages, **overlapped_launch(config),
    )  # fmt: skip


def _launch_merge(
    args: DecodeArguments,
    problem: DecodeProblem,
    target: Target,
    config: TritonDecodeConfig,
    grid: DecodeGrid,
    layout: WorkspaceLayout,
    parts: Workspace,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    merge = triton_merge_config(problem, target, layout.num_rows)
    programs = (-(-layout.num_rows // merge.block_rows), layout.columns // merge.block_columns)
    merge_partials_kernel[programs](
        parts.partial_out, parts.partial_lse, parts.row_pieces, out, lse,
        layout.num_rows, args.num_heads, layout.places,
        out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
        **merge_constants(problem, config, merge, grid.persistent), num_warps=merge.num_warps,
        **overlapped_launch(config),
    )  # fmt: skip


PLAN_WARPS = 4


def overlapped_launch(config: TritonDecodeConfig) -> dict[str, bool]:
    """Launch options of a kernel that may start before the one before it ends (programmatic dependent launch)."""
    # older compilers and other vendors do not know the word: it is only said where it is wanted
    return {"launch_pdl": True} if config.overlapped_launches else {}


def plan_constants(config: TritonDecodeConfig, ragged: bool) -> dict[str, Any]:
    """The compile-time arguments of the planning kernels."""
    return {
        "RAGGED": ragged,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "OVERLAPPED": config.overlapped_launches,
    }


def decode_constants(
    problem: DecodeProblem, config: TritonDecodeConfig, ragged: bool, causal: bool, packed: bool
) -> dict[str, Any]:
    """The compile-time arguments of the decode kernel: everything that makes another compilation."""
    return {
        "RAGGED": ragged,
        "CAUSAL": causal,
        # a model's own number; with it, telling a row's query and head costs next to nothing
        "NUM_HEADS": problem.num_heads,
        "PAGE_SIZE": problem.page_size,
        # packed pages are the rule; any other strides are read at run time
        "PACKED": problem.head_dim_qk if packed else 0,
        "D": problem.kv_lora_rank,
        "BLOCK_D": padded(problem.kv_lora_rank),
        "R": problem.qk_rope_head_dim,
        "BLOCK_R": padded(problem.qk_rope_head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "END_BLOCK_N": min(config.block_n, CAUSAL_END_BLOCK_N),
        "ORDERED": problem.batch_invariant,
        "KEYS_ON_M": config.keys_on_m,
        "WIDEN": INTERPRETED,
        "OVERLAPPED": config.overlapped_launches,
    }


def merge_constants(
    problem: DecodeProblem, config: TritonDecodeConfig, merge: TritonMergeConfig, persistent: bool
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
