"""The Gluon backend's entry: one cooperative launch of one of its kernels, and nothing before or after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.errors import InvalidArgument
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.target import Target
from pagedmla.kernels.gluon.choice import Choice, choose, possible_choices
from pagedmla.kernels.gluon.few_heads.kernel import decode_few_heads
from pagedmla.kernels.gluon.many_heads.kernel import decode_many_heads
from pagedmla.kernels.gluon.tensors import (
    QueryParts,
    Rows,
    cache_rows,
    is_in_place,
    matrix_of,
    query_bytes,
    query_parts,
)
from pagedmla.kernels.gluon.workspace import Parts
from pagedmla.kernels.split_kv.direct import DirectLaunches, launch, repeatable
from pagedmla.kernels.split_kv.launch import LOG2_E, filled_without_keys

_ROPE = 64
# numbers of 16 bytes
_CHUNK = 8

OPTIONS: dict[str, Any] = {
    # of the first warpgroup that computes
    "num_warps": 4,
    # programs wait for one another: either all of them are resident, or none is started
    "launch_cooperative_grid": True,
}
"""Of the compilation and the launch."""


def decode(args: DecodeArguments, problem: DecodeProblem, out: Tensor, lse: Tensor) -> DirectLaunches | None:
    """Writes every row of ``out`` and ``lse``; see ``pagedmla.decode``.  Returns the launch, where it can be repeated.

    Queries whose rows do not lie at multiples of 16 bytes or, with many of them, not at even distances, are copied first: into
    the workspace where one is given, else into memory of torch's.

    Args:
        args, problem, out, lse: checked, and ``refuses_tensors`` has nothing against them.
    """
    if filled_without_keys(args, out, lse):
        return None
    choice = choose(args, Target.detect(args.q.device).compute_units)
    parts = choice.layout.carve(args.workspace, args.q.device)
    queries = query_parts(args, choice, _query_room(args, choice))
    # Triton launches on the current device, whatever the tensors say
    with torch.cuda.device_of(args.q):
        one = launch(
            kernel_of(choice),
            (choice.programs,),
            decode_arguments(args, problem, choice, parts, queries, out, lse),
            decode_constants(args, problem, choice),
            **OPTIONS,
        )
    # queries that were copied are none of the call's tensors, and such a call is not repeatable
    return repeatable([one], args, out, lse, parts.memory, parts.views)


def workspace_size(problem: DecodeProblem, bounds: BatchBounds, target: Target) -> int:
    """Bytes that every call within ``bounds`` uses, in either kernel: of partial states, of flags, and of a packed copy of the
    queries.
    """
    choices = possible_choices(problem, target.compute_units)
    queries = query_bytes(bounds.num_tokens(problem), problem.num_heads, problem.head_dim_qk)
    return max(choice.layout.num_bytes for choice in choices) + queries


def kernel_of(choice: Choice) -> Any:
    """The kernel that ``choice`` names."""
    return decode_few_heads if choice.kernel == "few_heads" else decode_many_heads


def _query_room(args: DecodeArguments, choice: Choice) -> Tensor | None:
    """What follows the partial states in a workspace, for queries that must be copied.

    Raises:
        InvalidArgument: it is too small for them.
    """
    if args.workspace is None or is_in_place(args, choice):
        return None
    used = choice.layout.num_bytes
    needed = used + query_bytes(args.num_tokens, args.num_heads, args.head_dim_qk)
    if args.workspace.numel() < needed:
        wanted = f"at least {needed} bytes (workspace_size tells how many)"
        raise InvalidArgument("workspace", "workspace", wanted, f"{args.workspace.numel()} bytes")
    return args.workspace[used:]


def decode_arguments(
    args: DecodeArguments,
    problem: DecodeProblem,
    choice: Choice,
    parts: Parts,
    queries: QueryParts,
    out: Tensor,
    lse: Tensor,
) -> tuple[Any, ...]:
    """What the kernel that is chosen is launched with, in its order, up to the compile-time arguments."""
    keys, rows_per_page = cache_rows(args.kv_cache)
    # an even batch has no query starts, and none is read: any i32 pointer will do
    starts = args.cu_seqlens_q if args.cu_seqlens_q is not None else args.seq_lens
    loaded = _pointers(queries) if choice.kernel == "few_heads" else _descriptors(queries, keys, choice)
    return (
        *loaded, rows_per_page,
        # a page id is an i32
        min(args.kv_cache.shape[0], 2**31 - 1),
        args.kv_cache, keys.stride // _CHUNK,
        args.block_table, args.block_table.stride(0), args.block_table.stride(1),
        args.seq_lens, args.seq_lens.stride(0), starts, starts.stride(0),
        args.num_seqs, args.num_tokens, args.even_q_len or 0, args.block_table.shape[1] * problem.page_size,
        out, out.stride(0), out.stride(1), lse, lse.stride(0), lse.stride(1),
        parts.partial_out, parts.partial_lse, parts.flags, problem.softmax_scale * LOG2_E,
    )  # fmt: skip


def _pointers(queries: QueryParts) -> tuple[Any, ...]:
    """Queries for the kernel whose threads copy rows: strides in 16 bytes; of a lone token or head, which has no next, any."""
    latent, rope, rope_column = queries
    return (
        latent, latent.stride(0) // _CHUNK, latent.stride(1) // _CHUNK,
        rope, rope.stride(0) // _CHUNK, rope.stride(1) // _CHUNK, rope_column,
    )  # fmt: skip


def _descriptors(queries: QueryParts, keys: Rows, choice: Choice) -> tuple[Any, ...]:
    """Queries and keys for the kernel that the copy engine copies for."""
    latent, rope = matrix_of(queries.latent), matrix_of(queries.rope)
    rows, columns = choice.config.block_rows, choice.columns
    return (
        latent.descriptor(columns, rows), rope.descriptor(_ROPE, rows), queries.rope_column,
        keys.descriptor(columns), keys.descriptor(_ROPE),
    )  # fmt: skip


def decode_constants(args: DecodeArguments, problem: DecodeProblem, choice: Choice) -> dict[str, Any]:
    """The compile-time arguments of a launch: everything that makes another compilation."""
    config, even = choice.config, args.even_q_len
    return constants(
        problem,
        choice,
        ragged=even is None,
        # one query token sees every key, and there is nothing to hide
        causal=args.causal and args.most_query_tokens > 1,
        scan=config.small_scan if args.num_seqs < config.small_scan else config.large_scan,
        one_row_tile=even is not None and even * args.num_heads <= choice.group_rows,
    )


def constants(
    problem: DecodeProblem, choice: Choice, *, ragged: bool, causal: bool, scan: int, one_row_tile: bool
) -> dict[str, Any]:
    """The compile-time arguments of the kernel that is chosen, by its names, in its order."""
    config = choice.config
    is_few = choice.kernel == "few_heads"
    gathers = is_few or problem.page_size % config.block_n != 0
    return {
        "RAGGED": ragged,
        "CAUSAL": causal,
        # a model's own number; with it, telling a row's query and head costs next to nothing
        "NUM_HEADS": problem.num_heads,
        "PAGE_SIZE": problem.page_size,
        **({} if is_few else {"LANES": choice.lanes}),
        "SCAN": scan,
        "ONE_ROW_TILE": one_row_tile,
        "LOADER_REGISTERS": config.gather_registers if gathers else config.loader_registers,
        **({"ROWS": config.block_rows} if is_few else {"COMPUTE_REGISTERS": config.compute_registers}),
    }
