"""Batches whose tokens are shared out over ranks by a plain loop, and how far a merge may be from one pass over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from batches import Batch, arguments, expect
from torch import Tensor

import pagedmla
from pagedmla.conformance import numerics
from pagedmla.conformance.merging import MergedBound, merged_bound, merged_difference
from pagedmla.contract.problem import out_dtype_of
from pagedmla.distributed import KeySharding, decode_local

Owner = Callable[[int, int, int], int]
"""(token, length of its sequence, ranks) -> rank"""

OWNERS: dict[str, tuple[KeySharding, Owner]] = {
    "contiguous": (KeySharding.contiguous(), lambda t, n, w: min(t // max(1, -(-n // w)), w - 1)),
    "contiguous(40)": (KeySharding.contiguous(40), lambda t, n, w: min(t // 40, w - 1)),
    "round_robin": (KeySharding.round_robin(), lambda t, n, w: t % w),
    "interleaved(3)": (KeySharding.interleaved(3), lambda t, n, w: t // 3 % w),
    "interleaved(16)": (KeySharding.interleaved(16), lambda t, n, w: t // 16 % w),
}
"""Each layout with the rank of a token, spelt out one token at a time."""


def shard(batch: Batch, owner: Owner, rank: int, num_ranks: int) -> Batch:
    """The batch with the tokens of one rank alone."""
    tokens = []
    for keys in batch.tokens:
        mine = [t for t in range(len(keys)) if owner(t, len(keys), num_ranks) == rank]
        tokens.append(keys[torch.tensor(mine, dtype=torch.int64)])
    return replace(batch, tokens=tuple(tokens))


def local_call(
    batch: Batch,
    owner: Owner,
    rank: int,
    num_ranks: int,
    page_size: int = 16,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """A rank's arguments: its own tokens in pages of its own, with NaN in all that it does not own, and GLOBAL lengths."""
    call = arguments(shard(batch, owner, rank, num_ranks), page_size, layout_seed=rank, device=device)
    return call | {"seq_lens": torch.tensor(batch.seq_lens, dtype=torch.int32, device=device)}


def virtual(
    batch: Batch,
    layout: str,
    num_ranks: int,
    page_size: int = 16,
    device: torch.device | str = "cpu",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Every rank's state, one after another in this process, merged in the order of the ranks."""
    sharding, owner = OWNERS[layout]
    states = []
    for rank in range(num_ranks):
        call = {"backend": "torch"} | local_call(batch, owner, rank, num_ranks, page_size, device) | options
        states.append(decode_local(**call, sharding=sharding, rank=rank, num_ranks=num_ranks))
    outs, lses = zip(*states, strict=True)
    return pagedmla.merge_states(outs, lses)


def unrolled(batch: Batch, owner: Owner, rank: int, num_ranks: int) -> Batch:
    """Every query as a sequence of its own, with the rank's tokens that it sees, chosen one by one."""
    queries, tokens = [], []
    for rows, keys in zip(batch.queries, batch.tokens, strict=True):
        for j in range(len(rows)):
            last = len(keys) - len(rows) + j if batch.causal else len(keys) - 1
            seen = [t for t in range(last + 1) if owner(t, len(keys), num_ranks) == rank]
            queries.append(rows[j : j + 1])
            tokens.append(keys[torch.tensor(seen, dtype=torch.int64)])
    return replace(batch, queries=tuple(queries), tokens=tuple(tokens), causal=True)


def bound_of(batch: Batch, owner: Owner, num_ranks: int, p_dtype: torch.dtype = torch.float32) -> MergedBound:
    """How far the merge of float32 arithmetic may be from one pass.

    ``conformance.merging`` derives the part that the ranks' own errors have.  The merge adds, for n states, at most (8 + 2 n +
    4 max |lse|) roundings of a weight in float32, and one rounding to the output's dtype.
    """
    pieces = [
        expect(arguments(unrolled(batch, owner, rank, num_ranks)), p_dtype=p_dtype)
        for rank in range(num_ranks)
    ]
    ranks = merged_bound(pieces)
    logs = torch.stack([piece.lse for piece in pieces])
    largest = torch.where(logs == -torch.inf, 0.0, logs.abs()).amax(0)
    merge = (8 + 2 * num_ranks + 4 * largest) * 2.0**-24
    sizes = torch.stack([piece.out.abs() + piece.bound.nan_to_num(0.0) for piece in pieces]).amax(0)
    whole = sizes * merge[..., None] + ranks.out
    dtype = out_dtype_of(batch.queries[0].dtype)
    rounding = torch.finfo(dtype).eps / 2 * (sizes + whole) + torch.finfo(dtype).smallest_normal
    seen = (logs != -torch.inf).any(0)
    return MergedBound(
        torch.where(seen[..., None], whole + rounding, 0.0), torch.where(seen, ranks.lse + merge, 0.0)
    )


def difference(
    result: tuple[Tensor, Tensor],
    batch: Batch,
    owner: Owner,
    num_ranks: int,
    p_dtype: torch.dtype = torch.float32,
) -> str:
    """Where a result is not attention over the whole, unsharded cache, in words; empty when it is."""
    whole: numerics.Expected = expect(arguments(batch))
    out, lse = result
    assert out.dtype == out_dtype_of(batch.queries[0].dtype)
    assert lse.dtype == torch.float32
    return merged_difference(
        (out.cpu().double(), lse.cpu().double()), whole, bound_of(batch, owner, num_ranks, p_dtype)
    )
