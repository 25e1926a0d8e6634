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
) -> None:
    """Writes every row of ``out`` and ``lse``; see ``pagedmla.decode``.

    Args:
        args, problem, out, lse: checked.
        config: for tuning; left out: the policy's.
    """
    if filled_without_keys(args, out, lse):
        return
    target = Target.detect(args.q.device)
    if config is None:
        config = triton_decode_config(problem, target, args.rows_hint)
    step = make_step(args, problem, target, config)
    parts = step.layout.carve(args.workspace, args.q.device)
    # Triton launches on the current device, whatever the tensors say
    with torch.cuda.device_of(args.q):
        launch_plan(step, parts)
        _launch_decode(step, config, parts, out, lse)
        launch_merge(step, parts, out, lse)


def workspace_size(problem: DecodeProblem, bounds: BatchBounds, target: Target) -> int:
    """Bytes that every call within ``bounds`` uses, whichever tiles the policy picks for it."""
    return workspace_bytes(problem, bounds, target, triton_decode_configs(problem, target))


def _launch_decode(
    step: Step, config: TritonDecodeConfig, parts: Workspace, out: torch.Tensor, lse: torch.Tensor
) -> None:
    args, problem, starts = step.args, step.problem, step.query_starts
    rank, rope = problem.kv_lora_rank, problem.qk_rope_head_dim
    # without a pair, the rotated part is the end of the same rows; without RoPE nothing is read
    q_pe = args.q_pe if args.q_pe is not None else args.q[:, :, rank:] if rope else args.q
    packed = args.kv_cache.stride()[:2] == (problem.page_size * problem.head_dim_qk, problem.head_dim_qk)
    decode_kernel[(step.grid.programs,)](
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
        **decode_constants(problem, config, step.ragged, step.causal, packed),
        num_warps=config.num_warps, num_stages=config.num_stages, **overlapped_launch(config),
    )  # fmt: skip


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
