"""One rank's part of a decode over sharded keys: which of its own keys each query sees, and the attention to those.

Causality is a matter of global positions: query j of n sees keys 0 .. seq_len - n + j of the whole sequence.  A rank's own keys
are another sequence, and bottom-right alignment with *their* number is wrong in every layout.  Take 5 tokens round-robin on two
ranks and n = 2 queries, at positions 3 and 4:

    rank 0 holds 0 2 4:   query 0 sees 0 2,   query 1 sees 0 2 4     one more, as causal=True would have it
    rank 1 holds 1 3:     query 0 sees 1 3,   query 1 sees 1 3       the same; causal=True would hide token 3 from query 0

What holds in every layout is that a query sees a prefix of a rank's keys (sharding.py), so a length says it all:

    length of (query j, rank) = how many of the first seq_len - n + j + 1 tokens the rank holds.

Queries of one sequence have lengths of their own, so each becomes a sequence of one query token that shares its row of the
block table, and is decoded with causal=False.  Lengths are made on the device from the global ones: nothing is read on the
host, and a captured graph stays right when they change.  The price is that n query tokens of a sequence read the rank's keys
n times.  Without causality, all queries of a sequence see all its keys; nothing is unrolled then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedmla.contract.arguments import Scale, expect
from pagedmla.contract.errors import InvalidArgument, check_type
from pagedmla.decode import Query, decode
from pagedmla.distributed.sharding import KeySharding, check_rank, check_sharding


@dataclass(frozen=True)
class LocalRows:
    """A step's tables for one rank, for ``pagedmla.decode(..., causal=False)``; the same in every layer.

    Attributes:
        block_table: i32 [rows, max_pages], the rank's own pages.
        seq_lens: i32 [rows], keys that the row's queries see on this rank; 0 where they see none.
        cu_seqlens_q: None where rows have the same number of query tokens each, else as it was given.
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None


def local_rows(
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    num_tokens: int,
    sharding: KeySharding,
    rank: int,
    num_ranks: int,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
) -> LocalRows:
    """Works out, on the device, how many of ``rank``'s keys each query sees.

    Args:
        block_table: i32 [num_seqs, max_pages], pages of this rank's tokens, in order.
        seq_lens: i32 [num_seqs], GLOBAL: keys of each sequence on all ranks, this step's tokens included.
        num_tokens: query tokens of the batch.
        sharding: which rank holds which token.
        cu_seqlens_q: i32 [num_seqs + 1]; left out: the same number of query tokens for all.
        causal: by global position, as in the module's text; otherwise every query sees every key.

    Returns:
        Tables with a row for each query token, or for each sequence where that says the same.

    Raises:
        InvalidArgument: names the argument, what was wanted and what came.
    """
    check_rank(rank, num_ranks)
    check_type("block_table", block_table, Tensor)
    check_type("seq_lens", seq_lens, Tensor)
    expect(seq_lens, "seq_lens", (None,), (torch.int32,), None)
    num_seqs = seq_lens.shape[0]
    expect(block_table, "block_table", (num_seqs, None), (torch.int32,), seq_lens.device)
    check_sharding(sharding, num_seqs, seq_lens.device)
    lengths = seq_lens.to(torch.int64).clamp(min=0)
    if cu_seqlens_q is not None:
        check_type("cu_seqlens_q", cu_seqlens_q, Tensor)
        expect(cu_seqlens_q, "cu_seqlens_q", (num_seqs + 1,), (torch.int32,), seq_lens.device)
    elif num_tokens % num_seqs if num_seqs else num_tokens:
        wanted = f"the same number of query tokens for each of {num_seqs} sequences, or cu_seqlens_q"
        raise InvalidArgument("num_tokens", "q", wanted, f"{num_tokens} tokens")
    if not causal or num_tokens == 0 or (cu_seqlens_q is None and num_tokens == num_seqs):
        own = sharding.owned(lengths, lengths, rank, num_ranks)
        return LocalRows(block_table, own.to(torch.int32), cu_seqlens_q)
    if num_seqs == 0:
        # query tokens that belong to no sequence see nothing
        return LocalRows(
            block_table.new_zeros(num_tokens, block_table.shape[1]), seq_lens.new_zeros(num_tokens), None
        )
    if cu_seqlens_q is None:
        q_len = num_tokens // num_seqs
        hidden = torch.arange(q_len - 1, -1, -1, device=seq_lens.device)
        seen = (lengths[:, None] - hidden).clamp(min=0)
        own = sharding.owned(seen, lengths[:, None], rank, num_ranks)
        table = block_table[:, None].expand(-1, q_len, -1).reshape(num_tokens, -1)
        return LocalRows(table, own.flatten().to(torch.int32), None)
    return _ragged_rows(block_table, lengths, num_tokens, sharding, rank, num_ranks, cu_seqlens_q)


def _ragged_rows(
    block_table: Tensor,
    lengths: Tensor,
    num_tokens: int,
    sharding: KeySharding,
    rank: int,
    num_ranks: int,
    cu_seqlens_q: Tensor,
) -> LocalRows:
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=lengths.device)
    ends = cu_seqlens_q[1:].contiguous()
    # the first sequence that ends past the token; starts may be out of order on the device, an index may not
    sequence = torch.searchsorted(ends, tokens, right=True)
    belongs = (sequence < len(lengths)) & (tokens >= cu_seqlens_q[0])
    sequence = sequence.clamp(max=len(lengths) - 1)
    hidden = ends[sequence].to(torch.int64) - 1 - tokens
    seen = torch.minimum((lengths[sequence] - hidden).clamp(min=0), lengths[sequence])
    # each token a "sequence" of its own, in a layout that may have one number a sequence
    layout = sharding
    if isinstance(sharding.run, Tensor):
        layout = KeySharding.contiguous(sharding.run[sequence])
    own = layout.owned(seen, lengths[sequence], rank, num_ranks)
    return LocalRows(block_table[sequence], torch.where(belongs, own, 0).to(torch.int32), None)


def decode_local(
    q: Query,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    sharding: KeySharding,
    rank: int,
    num_ranks: int,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    kv_lora_rank: int = 512,
    q_scale: Scale = None,
    kv_scale: Scale = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str | None = None,
    schedule: str | None = None,
    num_kv_splits: int | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of all queries to the keys of one rank: a state for ``merge_states``, with no communication.

    Args:
        block_table: i32 [num_seqs, max_pages], pages of this rank's tokens.
        seq_lens: i32 [num_seqs], GLOBAL lengths; how many keys are this rank's follows from ``sharding``.
        sharding, rank, num_ranks: which tokens are this rank's.
        the others: as for ``pagedmla.decode``.

    Returns:
        (out, lse) of ``pagedmla.decode``: out rounded to its dtype, (0, -inf) where no key of this rank is seen.

    Raises:
        InvalidArgument, Unsupported: as ``pagedmla.decode``.
    """
    first = q[0] if isinstance(q, (tuple, list)) and q else q
    check_type("q", first, Tensor)
    expect(first, "q", (None, None, None), (first.dtype,), None)
    rows = local_rows(
        block_table,
        seq_lens,
        num_tokens=first.shape[0],
        sharding=sharding,
        rank=rank,
        num_ranks=num_ranks,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
    )
    return decode(
        q,
        kv_cache,
        rows.block_table,
        rows.seq_lens,
        softmax_scale=softmax_scale,
        cu_seqlens_q=rows.cu_seqlens_q,
        causal=False,
        kv_lora_rank=kv_lora_rank,
        q_scale=q_scale,
        kv_scale=kv_scale,
        out=out,
        lse=lse,
        backend=backend,
        schedule=schedule,
        num_kv_splits=num_kv_splits,
        batch_invariant=batch_invariant,
    )
