"""The Gluon backend's entry: the few-heads kernel by itself, or the many-heads kernel between ``split_kv``'s plan and merge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.errors import InvalidArgument
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.target import Target
from pagedmla.kernels.gluon.choice import few_heads_rows, possible_rows
from pagedmla.kernels.gluon.few_heads import launch as few_heads
from pagedmla.kernels.gluon.many_heads import decode_many_heads
from pagedmla.kernels.gluon.tensors import QueryRows, cache_rows, is_in_place, query_bytes, query_rows
from pagedmla.kernels.policy import GLUON_DECODE_CONFIG
from pagedmla.kernels.split_kv.direct import DirectLaunches, launch, repeatable
from pagedmla.kernels.split_kv.launch import (
    LOG2_E,
    Step,
    filled_without_keys,
    launch_merge,
    launch_plan,
    make_step,
    workspace_bytes,
)
from pagedmla.kernels.split_kv.workspace import Workspace

_HALF, _ROPE = 256, 64


def decode(args: DecodeArguments, problem: DecodeProblem, out: Tensor, lse: Tensor) -> DirectLaunches | None:
    """Writes every row of ``out`` and ``lse``; see ``pagedmla.decode``.  Returns the launches, where they can be repeated.

    Queries whose rows do not lie at even distances, or not at multiples of 16 bytes, are copied first: into the workspace where
    one is given, else into memory of torch's.

    Args:
        args, problem, out, lse: checked, and ``refuses_tensors`` has nothing against them.
    """
    if filled_without_keys(args, out, lse):
        return None
    target = Target.detect(args.q.device)
    block_rows = few_heads_rows(args, problem, target.compute_units)
    if block_rows is not None:
        return _decode_few_heads(args, problem, target, block_rows, out, lse)
    return _decode_many_heads(args, problem, target, out, lse)


def _decode_few_heads(
    args: DecodeArguments, problem: DecodeProblem, target: Target, block_rows: int, out: Tensor, lse: Tensor
) -> DirectLaunches | None:
    layout = few_heads.layout_of(target.compute_units, block_rows)
    parts = layout.carve(args.workspace, args.q.device)
    queries = query_rows(args, _query_room(args, layout.num_bytes))
    with torch.cuda.device_of(args.q):
        one = few_heads.launch_decode(args, problem, layout, parts, queries, out, lse)
    return repeatable([one], args, out, lse, parts.memory, parts.views)


def _decode_many_heads(
    args: DecodeArguments, problem: DecodeProblem, target: Target, out: Tensor, lse: Tensor
) -> DirectLaunches | None:
    step = make_step(args, problem, target, GLUON_DECODE_CONFIG)
    parts = step.layout.carve(args.workspace, args.q.device)
    queries = query_rows(args, _query_room(args, step.layout.num_bytes))
    # Triton launches on the current device, whatever the tensors say
    with torch.cuda.device_of(args.q):
        planned = launch_plan(step, parts)
        decoded = launch(
            decode_many_heads,
            (step.grid.programs,),
            decode_arguments(step, parts, queries, out, lse),
            decode_constants(problem, step.ragged, step.causal),
            num_warps=GLUON_DECODE_CONFIG.num_warps,
        )
        merged = launch_merge(step, parts, out, lse)
    # queries that were copied are none of the call's tensors, and such a call is not repeatable
    return repeatable([planned, decoded, *merged], args, out, lse, parts.memory, parts.views)


def workspace_size(problem: DecodeProblem, bounds: BatchBounds, target: Target) -> int:
    """Bytes that every call within ``bounds`` uses, in either kernel: of partial states, of the plan or the flags, and of a
    packed copy of the queries.
    """
    queries = query_bytes(bounds.num_tokens(problem), problem.num_heads, problem.head_dim_qk)
    many = workspace_bytes(problem, bounds, target, [GLUON_DECODE_CONFIG])
    few = [few_heads.layout_of(target.compute_units, rows).num_bytes for rows in possible_rows(problem)]
    return max([many, *few]) + queries


def _query_room(args: DecodeArguments, used: int) -> Tensor | None:
    """What follows the first ``used`` bytes of a workspace, for queries that must be copied.

    Raises:
        InvalidArgument: it is too small for them.
    """
    if args.workspace is None or is_in_place(args):
        return None
    needed = used + query_bytes(args.num_tokens, args.num_heads, args.head_dim_qk)
    if args.workspace.numel() < needed:
        wanted = f"at least {needed} bytes (workspace_size tells how many)"
        raise InvalidArgument("workspace", "workspace", wanted, f"{args.workspace.numel()} bytes")
    return args.workspace[used:]


def decode_arguments(
    step: Step, parts: Workspace, queries: QueryRows, out: Tensor, lse: Tensor
) -> tuple[Any, ...]:
    """What the many-heads kernel is launched with, in its order, up to the compile-time arguments."""
    args = step.args
    keys, rows_per_page = cache_rows(args.kv_cache)
    return (
        parts.shares, parts.segments,
        queries.latent.descriptor(_HALF), queries.rope.descriptor(_ROPE), queries.rope_column,
        keys.descriptor(_HALF), keys.descriptor(_ROPE), rows_per_page, step.num_pages,
        args.block_table, args.block_table.stride(0), args.block_table.stride(1),
        args.seq_lens, args.seq_lens.stride(0), step.query_starts, args.num_seqs, step.capacity,
        out, out.stride(0), out.stride(1), lse, lse.stride(0), lse.stride(1),
        parts.partial_out, parts.partial_lse, step.problem.softmax_scale * LOG2_E,
    )  # fmt: skip


def decode_constants(problem: DecodeProblem, ragged: bool, causal: bool) -> dict[str, Any]:
    """The compile-time arguments of the many-heads kernel: everything that makes another compilation."""
    return {
        "RAGGED": ragged,
        "CAUSAL": causal,
        # a model's own number; with it, telling a row's query and head costs next to nothing
        "NUM_HEADS": problem.num_heads,
        "PAGE_SIZE": problem.page_size,
    }
