"""The torch backend's entry: bounds, items, passes, merge, rows written."""

from __future__ import annotations

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.target import Target
from pagedmla.kernels.policy import TorchDecodeConfig, torch_decode_config
from pagedmla.kernels.torch.invariant import attend_invariant
from pagedmla.kernels.torch.item_group import ItemGroup, Passes
from pagedmla.kernels.torch.merge import merge_states
from pagedmla.kernels.torch.pages import PageReader, gathered_bytes_per_token
from pagedmla.kernels.torch.queries import gather_queries, value_scale
from pagedmla.kernels.torch.scratch import ALIGNMENT, Scratch
from pagedmla.kernels.torch.streaming import attend
from pagedmla.kernels.torch.work_items import device_passes, host_passes


def decode(args: DecodeArguments, problem: DecodeProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes every row of ``out`` and ``lse``; see ``pagedmla.decode``.

    Products are formed in float32, whatever autocast says; torch's float32 matmul precision is respected, so a process that
    asks torch for reduced precision gets it here too.
    """
    # rows that nobody owns, and those that see no key, are not in any work item
    out.zero_()
    lse.fill_(-torch.inf)
    if (
        args.num_tokens == 0
        or args.num_seqs == 0
        or args.kv_cache.shape[0] == 0
        or args.block_table.shape[1] == 0
    ):
        return
    config = torch_decode_config(problem, on_cpu=args.q.device.type == "cpu")
    with torch.no_grad(), torch.autocast(args.q.device.type, enabled=False):
        if args.batch_invariant:
            attend_invariant(args, config, out, lse)
            return
        _run(args, config, out, lse)


def workspace_size(problem: DecodeProblem, bounds: BatchBounds, target: Target) -> int:
    """Bytes that hold the large intermediates of one pass.

    A pass is bounded by the config, not by the batch, so this depends on the problem and the target alone.  Index vectors
    and the rows that are written out come from torch's allocator all the same.
    """
    config = torch_decode_config(problem, on_cpu=target.vendor == "cpu")
    rows_per_item = _tile(problem.num_heads, config) * problem.num_heads
    # the accumulators of at least two blocks
    rows = max(config.max_rows_per_pass, 2 * rows_per_item)
    scores = max(config.max_scores_per_pass, rows_per_item * config.min_kv_block)
    tokens = config.kv_tokens_per_pass
    per_token = gathered_bytes_per_token(problem.head_dim_qk, problem.layout.dtype)
    floats = scores + rows * (problem.kv_lora_rank + problem.head_dim_qk)
    return tokens * per_token + 4 * floats + 8 * ALIGNMENT


def _tile(num_heads: int, config: TorchDecodeConfig) -> int:
    limit = config.query_tokens_per_item(num_heads)
    return 1 << (limit - 1).bit_length()


def _run(args: DecodeArguments, config: TorchDecodeConfig, out: torch.Tensor, lse: torch.Tensor) -> None:
    if args.q.device.type == "cpu":
        all_passes = host_passes(args, config)
    else:
        all_passes = device_passes(args, config, Target.detect(args.q.device).compute_units)
    reader = PageReader(args)
    scratch = Scratch(args.workspace, args.q.device)
    for passes in all_passes:
        _write(passes[0], *_attend_all(passes, args, config, reader, scratch), args, out, lse)


def _attend_all(
    passes: Passes, args: DecodeArguments, config: TorchDecodeConfig, reader: PageReader, scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends to all key ranges of the same units: out f32 [units, rows, dv], lse f32 [units, rows]."""
    merged: list[tuple[torch.Tensor, torch.Tensor]] = []
    for group in passes:
        # the next pass reuses the memory that the state so far lies in
        merged = [(state_out.clone(), state_lse) for state_out, state_lse in merged]
        scratch.reset()
        queries = gather_queries(args, group, scratch)
        outs, lses = attend(group, queries, args.kv_lora_rank, config.max_rows_per_pass, reader, scratch)
        outs = outs.unflatten(0, (group.splits, group.num_units))
        lses = lses.unflatten(0, (group.splits, group.num_units))
        # what earlier passes over the same units left behind comes first: states are merged in the order of their keys
        states = [*merged, *zip(outs, lses, strict=True)]
        merged = [_merge(states)]
    return merged[0]


def _merge(states: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(states) == 1:
        return states[0]
    return merge_states([out for out, _ in states], [lse for _, lse in states])


def _write(
    group: ItemGroup,
    group_out: torch.Tensor,
    group_lse: torch.Tensor,
    args: DecodeArguments,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    factor = value_scale(args)
    if factor is not None:
        group_out.mul_(factor)
    num_rows = group.num_units * group.tile
    rows_out = group_out.view(num_rows, args.num_heads, args.kv_lora_rank)
    rows_lse = group_lse.view(num_rows, args.num_heads)
    if group.consecutive is not None:
        out[group.consecutive].copy_(rows_out)
        lse[group.consecutive].copy_(rows_lse)
        return
    tokens = group.tokens.flatten()
    if group.has_empty_places:
        real = tokens >= 0
        tokens, rows_out, rows_lse = tokens[real], rows_out[real], rows_lse[real]
    out.index_copy_(0, tokens, rows_out.to(out.dtype))
    lse.index_copy_(0, tokens, rows_lse)
