"""The checks that read device values: a debugging aid (``validate=True``), since each of them waits for the device."""

from __future__ import annotations

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.errors import InvalidArgument


def check_values(args: DecodeArguments) -> None:
    """Reads lengths, query starts, live page ids and scales, and reports the first one that is out of range.

    Expects ``check_arguments`` to have passed.

    Raises:
        InvalidArgument: with the argument, the sequence and the value.
    """
    _check_lengths(args)
    _check_query_starts(args)
    _check_live_pages(args)
    for name, scale in (("q_scale", args.q_scale), ("kv_scale", args.kv_scale)):
        if isinstance(scale, torch.Tensor):
            value = float(scale)
            if not (0.0 < value < float("inf")):
                raise InvalidArgument("scale", name, "a positive finite number", str(value))


def _check_lengths(args: DecodeArguments) -> None:
    capacity = args.block_table.shape[1] * args.kv_cache.shape[1]
    for sequence, length in enumerate(args.seq_lens.tolist()):
        if not 0 <= length <= capacity:
            wanted = f"0..{capacity} tokens (block_table's width times page_size)"
            raise InvalidArgument("seq_len", "seq_lens", wanted, f"{length} for sequence {sequence}")


def _check_query_starts(args: DecodeArguments) -> None:
    if args.cu_seqlens_q is None:
        return
    starts = args.cu_seqlens_q.tolist()
    if starts[0] != 0:
        raise InvalidArgument("query_start", "cu_seqlens_q", "0 for sequence 0", str(starts[0]))
    for sequence in range(args.num_seqs):
        start, stop = starts[sequence], starts[sequence + 1]
        if not start <= stop <= args.num_tokens:
            wanted = f"starts that never fall and stay within the {args.num_tokens} query tokens"
            raise InvalidArgument(
                "query_start", "cu_seqlens_q", wanted, f"{start}..{stop} for sequence {sequence}"
            )
        if args.max_q_len is not None and stop - start > args.max_q_len:
            wanted = f"at most max_q_len {args.max_q_len} query tokens a sequence"
            got = f"{stop - start} for sequence {sequence}"
            raise InvalidArgument("query_length", "cu_seqlens_q", wanted, got)


def _check_live_pages(args: DecodeArguments) -> None:
    num_pages, page_size, _ = args.kv_cache.shape
    pages_in_use = (args.seq_lens.to(torch.int64) + page_size - 1) // page_size
    columns = torch.arange(args.block_table.shape[1], device=args.block_table.device)
    outside = (args.block_table < 0) | (args.block_table >= num_pages)
    bad = outside & (columns < pages_in_use[:, None])
    if bool(bad.any()):
        sequence, column = bad.nonzero()[0].tolist()
        got = f"{int(args.block_table[sequence, column])} for page {column} of sequence {sequence}"
        raise InvalidArgument("page", "block_table", f"live page ids in 0..{num_pages - 1}", got)
