"""Device values, bounded before anything is addressed with them.

Lengths, query starts and page ids come from the caller's device memory, where a fault of the caller may have put anything.
Bounding them costs a few operations on vectors and means that no value can lead outside the tensors given, or to the rows
of another sequence.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from pagedmla.contract.arguments import DecodeArguments


def host_key_counts(args: DecodeArguments) -> list[int]:
    """``key_counts`` for lengths that are in host memory, as numbers."""
    num_pages, page_size, _ = args.kv_cache.shape
    capacity = args.block_table.shape[1] * page_size if num_pages else 0
    return [min(max(length, 0), capacity) for length in args.seq_lens.tolist()]


def host_query_starts(args: DecodeArguments) -> list[int]:
    """``query_starts`` for values that are in host memory, as numbers."""
    if args.cu_seqlens_q is None:
        q_len = args.even_q_len or 0
        return [number * q_len for number in range(args.num_seqs + 1)]
    bounded = (min(max(start, 0), args.num_tokens) for start in args.cu_seqlens_q.tolist())
    return list(accumulate(bounded, max))


def key_counts(args: DecodeArguments) -> torch.Tensor:
    """i64 [num_seqs]: keys of each sequence, within 0 .. what its table row can hold (0 when the pool has no pages)."""
    num_pages, page_size, _ = args.kv_cache.shape
    capacity = args.block_table.shape[1] * page_size if num_pages else 0
    return args.seq_lens.to(torch.int64).clamp(0, capacity)


def query_starts(args: DecodeArguments) -> torch.Tensor:
    """i64 [num_seqs + 1]: rising, within 0..num_tokens, so that every query row has at most one owner."""
    if args.cu_seqlens_q is None:
        numbers = torch.arange(args.num_seqs + 1, device=args.q.device)
        return numbers * (args.even_q_len or 0)
    return args.cu_seqlens_q.to(torch.int64).clamp(0, args.num_tokens).cummax(0).values
