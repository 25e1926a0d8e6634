"""The launch of the few-heads kernel, and its workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.errors import InvalidArgument
from pagedmla.contract.problem import DecodeProblem
from pagedmla.kernels.gluon.choice import num_programs
from pagedmla.kernels.gluon.few_heads.kernel import decode_few_heads
from pagedmla.kernels.gluon.tensors import QueryRows, cache_rows
from pagedmla.kernels.policy import GLUON_FEW_HEADS_CONFIG
from pagedmla.kernels.split_kv.direct import Launch, launch
from pagedmla.kernels.split_kv.launch import LOG2_E
from pagedmla.kernels.split_kv.workspace import ALIGNMENT

_RANK, _ROPE = 512, 64
_FLAG_BYTES = 8

OPTIONS: dict[str, Any] = {
    "num_warps": GLUON_FEW_HEADS_CONFIG.num_warps,
    # programs wait for one another: either all of them are resident, or none is started
    "launch_cooperative_grid": True,
}
"""Of the compilation and the launch."""


class Parts(NamedTuple):
    """Parts of a workspace, and the ``memory`` that they are of; see ``few_heads.layouts.Partials``."""

    memory: Tensor
    flags: Tensor
    partial_lse: Tensor
    partial_out: Tensor

    @property
    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Each part with the memory."""
        return [(part, self.memory) for part in self[1:]]


@dataclass(frozen=True)
class FewHeadsLayout:
    """Sizes of the parts.  Nothing of them is cleared before a launch.

    Attributes:
        programs: of the launch; each has two slots for partial states, and each slot a flag for every program.
        block_rows: rows of a row tile.
    """

    programs: int
    block_rows: int

    @property
    def num_bytes(self) -> int:
        """Bytes that ``carve`` takes at most, whatever the workspace's address."""
        return sum(size for size, _ in self._parts()) + ALIGNMENT

    def carve(self, workspace: Tensor | None, device: torch.device) -> Parts:
        """The parts, in ``workspace`` or in fresh memory of torch's.

        Raises:
            InvalidArgument: the workspace is too small.
        """
        if workspace is None:
            workspace = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        elif workspace.numel() < self.num_bytes:
            wanted = f"at least {self.num_bytes} bytes (workspace_size tells how many)"
            raise InvalidArgument("workspace", "workspace", wanted, f"{workspace.numel()} bytes")
        elif (address := workspace.untyped_storage().data_ptr()) % _FLAG_BYTES:
            # torch gives no view of wider numbers into such memory
            wanted = f"memory whose storage begins at a multiple of {_FLAG_BYTES} bytes"
            raise InvalidArgument("workspace", "workspace", wanted, hex(address))
        start = -workspace.data_ptr() % ALIGNMENT
        parts = []
        for size, dtype in self._parts():
            parts.append(workspace[start : start + size].view(dtype))
            start += size
        return Parts(workspace, *parts)

    def _parts(self) -> tuple[tuple[int, torch.dtype], ...]:
        # every size is a multiple of ALIGNMENT: a slot's part is, but for the flags, of which there is an even number
        slots = 2 * self.programs
        return (
            (slots * self.programs * _FLAG_BYTES, torch.int64),
            (slots * self.block_rows * 4, torch.float32),
            (slots * self.block_rows * _RANK * 4, torch.float32),
        )


def layout_of(compute_units: int, block_rows: int) -> FewHeadsLayout:
    """The layout of a launch on so many compute units."""
    return FewHeadsLayout(num_programs(compute_units), block_rows)


def launch_decode(
    args: DecodeArguments,
    problem: DecodeProblem,
    layout: FewHeadsLayout,
    parts: Parts,
    queries: QueryRows,
    out: Tensor,
    lse: Tensor,
) -> Launch:
    """Decodes in one launch, on the current device."""
    return launch(
        decode_few_heads,
        (layout.programs,),
        decode_arguments(args, problem, layout, parts, queries, out, lse),
        decode_constants(args, problem, layout.block_rows),
        **OPTIONS,
    )


def decode_arguments(
    args: DecodeArguments,
    problem: DecodeProblem,
    layout: FewHeadsLayout,
    parts: Parts,
    queries: QueryRows,
    out: Tensor,
    lse: Tensor,
) -> tuple[Any, ...]:
    """What the kernel is launched with, in its order, up to the compile-time arguments."""
    keys, rows_per_page = cache_rows(args.kv_cache)
    # an even batch has no query starts, and none is read: any i32 pointer will do
    starts = args.cu_seqlens_q if args.cu_seqlens_q is not None else args.seq_lens
    return (
        queries.latent.descriptor(_RANK, layout.block_rows), queries.rope.descriptor(_ROPE, layout.block_rows),
        queries.rope_column, keys.descriptor(_RANK), keys.descriptor(_ROPE), rows_per_page,
        # a page id is an i32
        min(args.kv_cache.shape[0], 2**31 - 1),
        args.block_table, args.block_table.stride(0), args.block_table.stride(1),
        args.seq_lens, args.seq_lens.stride(0), starts, starts.stride(0),
        args.num_seqs, args.num_tokens, args.even_q_len or 0, args.block_table.shape[1] * problem.page_size,
        out, out.stride(0), out.stride(1), lse, lse.stride(0), lse.stride(1),
        parts.partial_out, parts.partial_lse, parts.flags, problem.softmax_scale * LOG2_E,
    )  # fmt: skip


def decode_constants(args: DecodeArguments, problem: DecodeProblem, block_rows: int) -> dict[str, Any]:
    """The compile-time arguments of a launch: everything that makes another compilation."""
    config = GLUON_FEW_HEADS_CONFIG
    even = args.even_q_len
    return constants(
        problem,
        ragged=even is None,
        # one query token sees every key, and there is nothing to hide
        causal=args.causal and args.most_query_tokens > 1,
        block_rows=block_rows,
        scan=config.small_scan if args.num_seqs < config.small_scan else config.large_scan,
        one_row_tile=even is not None and even * args.num_heads <= block_rows,
    )


def constants(
    problem: DecodeProblem,
    *,
    ragged: bool,
    causal: bool,
    block_rows: int,
    scan: int,
    one_row_tile: bool,
) -> dict[str, Any]:
    """The compile-time arguments by the kernel's names, in its order."""
    return {
        "RAGGED": ragged,
        "CAUSAL": causal,
        # a model's own number; with it, telling a row's query and head costs next to nothing
        "NUM_HEADS": problem.num_heads,
        "PAGE_SIZE": problem.page_size,
        "ROWS": block_rows,
        "SCAN": scan,
        "ONE_ROW_TILE": one_row_tile,
        "LOADER_REGISTERS": GLUON_FEW_HEADS_CONFIG.loader_registers,
    }
