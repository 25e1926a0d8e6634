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
from pagedmla.kernels.torch.queries import score_scale, value_scale
from pagedmla.kernels.torch.scratch import Scratch
from pagedmla.kernels.torch.softmax_states import SoftmaxStates
from pagedmla.kernels.torch.work_items import token_owners

# the states of 64 row tiles take 16 MiB; more heads go through the keys again
_HEADS_AT_ONCE = 1024


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
    factor = value_scale(args)
    for token, count in enumerate(num_blocks):
        if count == 0:
            continue
        sequence, visible = owners.sequences[token : token + 1], owners.visible[token : token + 1]
        for first in range(0, args.num_heads, _HEADS_AT_ONCE):
            heads = slice(first, min(first + _HEADS_AT_ONCE, args.num_heads))
            scratch.reset()
            some_out, some_lse = _attend_heads(
                args, config, reader, scratch, token, heads, sequence, visible, count
            )
            out[token, heads] = (some_out if factor is None else some_out * factor).to(out.dtype)
            lse[token, heads] = some_lse


def _attend_heads(
    args: DecodeArguments,
    config: TorchDecodeConfig,
    reader: PageReader,
    scratch: Scratch,
    token: int,
    heads: slice,
    sequence: torch.Tensor,
    visible: torch.Tensor,
    num_blocks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some heads of one query token: out f32 [heads, kv_lora_rank], lse f32 [heads]."""
    block, tile = config.invariant_kv_block, config.invariant_rows
    num_heads = heads.stop - heads.start
    num_tiles = -(-num_heads // tile)
    queries = scratch.take((num_tiles, tile, args.head_dim_qk)).zero_()
    rows = queries.view(-1, args.head_dim_qk)[:num_heads]
    width = args.q.shape[2]
    rows[:, :width].copy_(args.q[token, heads])
    if args.q_pe is not None:
        rows[:, width:].copy_(args.q_pe[token, heads])
    rows.mul_(score_scale(args))
    buffers = reader.buffers(scratch, block)
    products = scratch.take((1, tile, block))
    places = min(num_blocks, config.invariant_blocks_united)
    states = [
        SoftmaxStates(places, 1, tile, args.kv_lora_rank, scratch, args.q.device) for _ in range(num_tiles)
    ]
    offsets = torch.arange(block, device=args.q.device)[None]
    for number in range(num_blocks):
        positions = offsets + number * block
        dead = positions >= visible[:, None]
        keys = reader.read(reader.locate(sequence[:, None], positions), buffers).masked_fill_(
            dead[..., None], 0.0
        )
        values = keys[..., : args.kv_lora_rank]
        for tile_rows, state in zip(queries, states, strict=True):
            torch.bmm(tile_rows[None], keys.transpose(1, 2), out=products)
            state.take_in(products.masked_fill_(dead[:, None], -torch.inf), values)
    finished = [state.finish() for state in states]
    out = torch.cat([state_out[0] for state_out, _ in finished])[:num_heads]
    return out, torch.cat([state_lse[0] for _, state_lse in finished])[:num_heads]
