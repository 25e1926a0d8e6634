"""The Triton backend's entry: its decode kernel between the plan and the merge of ``split_kv``."""

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
    triton_decode_config,
    triton_decode_configs,
)
from pagedmla.kernels.split_kv.direct import DirectLaunches, Launch, launch, repeatable
from pagedmla.kernels.split_kv.interpreted import INTERPRETED
from pagedmla.kernels.split_kv.launch import (
    LOG2_E,
    Step,
    filled_without_keys,
    launch_merge,
    launch_plan,
    make_step,
    overlapped_launch,
    workspace_bytes,
)
from pagedmla.kernels.split_kv.workspace import Workspace
from pagedmla.kernels.triton.decode import decode_kernel


def decode(
    args: DecodeArguments,
    problem: DecodeProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    config: TritonDecodeConfig | None = None,
) -> DirectLaunches | None:
    """Writes every row of ``out`` and ``lse``; see ``pagedmla.decode``.  Returns the launches, where they can be repeated.

    Args:
        args, problem, out, lse: checked.
        config: for tuning; left out: the policy's.
    """
    if filled_without_keys(args, out, lse):
        return None
    target = Target.detect(args.q.device)
    if config is None:
        config = triton_decode_config(problem, target, args.rows_hint)
    step = make_step(args, problem, target, config)
    parts = step.layout.carve(args.workspace, args.q.device)
    q_pe = _rotated_queries(args, problem)
    # Triton launches on the current device, whatever the tensors say
    with torch.cuda.device_of(args.q):
        planned = launch_plan(step, parts)
        decoded = _launch_decode(step, config, parts, q_pe, out, lse)
        merged = launch_merge(step, parts, out, lse)
    views = parts.views if q_pe is args.q_pe else [*parts.views, (q_pe, args.q)]
    return repeatable([planned, decoded, *merged], args, out, lse, parts.memory, views)


def workspace_size(problem: DecodeProblem, bounds: BatchBounds, target: Target) -> int:
    """Bytes that every call within ``bounds`` uses, whichever tiles the policy picks for it."""
    return workspace_bytes(problem, bounds, target, triton_decode_configs(problem, target))


def _rotated_queries(args: DecodeArguments, problem: DecodeProblem) -> torch.Tensor:
    """Without a pair, the rotated part is the end of the same rows; without RoPE nothing is read."""
    if args.q_pe is not None:
        return args.q_pe
    return args.q[:, :, problem.kv_lora_rank :] if problem.qk_rope_head_dim else args.q


def _launch_decode(
    step: Step,
    config: TritonDecodeConfig,
    parts: Workspace,
    q_pe: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Launch:
    args, problem, starts = step.args, step.problem, step.query_starts
    packed = args.kv_cache.stride()[:2] == (problem.page_size * problem.head_dim_qk, problem.head_dim_qk)
    arguments = (
        parts.shares, parts.segments,
        args.q, args.q.stride(0), args.q.stride(1),
        q_pe, q_pe.stride(0), q_pe.stride(1),
        args.kv_cache, args.kv_cache.stride(0), args.kv_cache.stride(1),
        step.num_pages,
        args.block_table, args.block_table.stride(0), args.block_table.stride(1),
        args.seq_lens, args.seq_lens.stride(0), starts, starts.stride(0),
        args.num_seqs, args.num_tokens, step.capacity,
        out, out.stride(0), out.stride(1), lse, lse.stride(0), lse.stride(1),
        parts.partial_out, parts.partial_lse, problem.softmax_scale * LOG2_E,
    )  # fmt: skip
    constants = decode_constants(problem, config, step.ragged, step.causal, packed)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **overlapped_launch(config)}
    return launch(decode_kernel, (step.grid.programs,), arguments, constants, **options)


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
