"""Batch-invariant decode: a row's bits depend on its query, its keys and nothing else.

Floating-point sums depend on their order, and a matrix product's order on its shape.  So every product here has one shape,
[16, head_dim_qk] x [head_dim_qk, 256] and back, whatever the batch: heads and keys that are missing are zeros, key blocks
start at multiples of 256 tokens of the sequence, blocks are taken in order, and query tokens are taken one by one.  Within
one machine, torch build and thread count, a row's result is then the same alone, in a batch, at any position in it, with
any neighbours, and at any query length.
"""

from __future__ import annotations

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.kernels.policy import TorchDecodeConfig
from pagedmla.kernels.torch.pages import PageReader
from pagedmla.kernels.torch.queries import gather_queries, score_scale, value_scale
from pagedmla.kernels.torch.scratch import Scratch
from pagedmla.kernels.torch.streaming import SoftmaxState
from pagedmla.kernels.torch.work_items import token_owners


def attend_invariant(
    args: DecodeArguments, config: TorchDecodeConfig, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Writes every row that sees a key."""
    owners = token_owners(args)
    block = config.invariant_kv_block
    capacity = args.block_table.shape[1] * args.kv_cache.shape[1]
    if args.q.device.type == "cpu":
        num_blocks = [-(-keys // block) for keys in owners.visible.tolist()]
    else:
        # lengths stay on the device: look at every block that the table could hold, and mask
        num_blocks = [-(-capacity // block)] * args.num_tokens
    reader = PageReader(args)
    scratch = Scratch(args.workspace, args.q.device)
    for token, count in enumerate(num_blocks):
        if count:
            scratch.reset()
            sequence, visible = owners.sequences[token : token + 1], owners.visible[token : token + 1]
            token_out, token_lse = _attend_token(
                args, config, reader, scratch, token, sequence, visible, count
            )
            out[token] = token_out.to(out.dtype)
            lse[token] = token_lse


def _attend_token(
    args: DecodeArguments,
    config: TorchDecodeConfig,
    reader: PageReader,
    scratch: Scratch,
    token: int,
    sequence: torch.Tensor,
    visible: torch.Tensor,
    num_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token: out f32 [num_heads, kv_lora_rank], lse f32 [num_heads]."""
    block, tile = config.invariant_kv_block, config.invariant_rows
    num_tiles = -(-args.num_heads // tile)
    queries = scratch.take((num_tiles, tile, args.head_dim_qk)).zero_()
    row = torch.full((1, 1), token, device=args.q.device)  # made there: a copy from the host would wait
    queries.view(-1, args.head_dim_qk)[: args.num_heads] = gather_queries(args, row, scratch)[0]
    buffers = reader.buffers(scratch, block)
    products = scratch.take((1, tile, block))
    weighted = scratch.take((num_tiles, 1, tile, args.kv_lora_rank))
    states = [SoftmaxState.empty(weighted[number]) for number in range(num_tiles)]
    scale = score_scale(args)
    offsets = torch.arange(block, device=args.q.device)[None]
    for number in range(num_blocks):
        positions = offsets + number * block
        live = positions < visible[:, None]
        keys = reader.read(sequence, positions, live, buffers)
        for rows, state in zip(queries, states, strict=True):
            torch.bmm(rows[None], keys.transpose(1, 2), out=products)
            products.mul_(scale).masked_fill_(~live[:, None], -torch.inf)
            state.update(products, keys[..., : args.kv_lora_rank])
    finished = [state.finish() for state in states]
    out = torch.cat([state_out[0] for state_out, _ in finished])[: args.num_heads]
    factor = value_scale(args)
    return out if factor is None else out * factor, torch.cat([state_lse[0] for _, state_lse in finished])[
        : args.num_heads
    ]
