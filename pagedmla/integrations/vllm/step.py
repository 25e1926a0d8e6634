"""One step of an engine: tables that stay where the engine keeps them, and one call of ``pagedmla.decode`` a layer.

An engine's block table, lengths and query starts already are slices of buffers that never move, so a captured graph may read
them in place.  Nothing is copied, expanded, filled or summed up: ``StepBuffers.step`` launches nothing, and looks at no
number but the query starts that the engine has on the host anyway.  Memory that layers write lies in ``StepBuffers``, made
once: layers of a step run one after the other, and each has read its result before the next one writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pagedmla.contract.errors import PlanMismatch
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.target import Target
from pagedmla.decode import Query, decode, workspace_size
from pagedmla.integrations.vllm.selection import require_kernel


def query_lengths(query_starts: Sequence[int], num_tokens: int) -> tuple[int, bool]:
    """What the host can tell the kernels about a step's query tokens.

    Even batches need no query starts, and have kernels of their own.  A batch that was padded for a graph is even as well:
    where each of the first sequences has n query tokens and the others, which pad, have none, the rows that would be theirs
    stand at the end, n to each.  Padding has length 0, so these rows see no key, as rows that nobody owns do.

    Args:
        query_starts: of each sequence, and the end of the last one.
        num_tokens: rows of q, padding included.

    Returns:
        (most query tokens of one sequence, at least 1; whether the batch is even).
    """
    lengths = [end - start for start, end in pairwise(query_starts)]
    most = max(1, *lengths) if lengths else 1
    owners = query_starts[-1] // most if lengths else 0
    padding = len(lengths) - owners
    even = num_tokens == len(lengths) * most and lengths == [most] * owners + [0] * padding
    return most, even


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step, the same for all layers; made by ``StepBuffers.step``.

    Attributes:
        block_table: i32 [num_seqs, max_pages], the engine's own.
        seq_lens: i32 [num_seqs], keys in tokens, this step's included; 0 for padding.
        cu_seqlens_q: i32 [num_seqs + 1], or None for an even batch.
        max_q_len: most query tokens of one sequence.
        out: [num_tokens, num_heads, kv_lora_rank], which every layer writes.
        lse: f32 [num_tokens, num_heads], natural logarithm, likewise.
        workspace: uint8.
        batch_invariant: a row's bits do not depend on the other rows.
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    max_q_len: int
    out: Tensor
    lse: Tensor
    workspace: Tensor
    batch_invariant: bool

    def attend(self, q: Query, kv_cache: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """Decodes one layer.

        Args:
            q: [num_tokens, num_heads, head_dim_qk], or the pair (q_nope, q_pe), with whatever strides they come.
            kv_cache: [num_pages, page_size, head_dim_qk].
            softmax_scale: the layer's.

        Returns:
            (out, lse), the step's own: right until the next layer writes them.  Rows of padding, and rows without keys, are
            (0, -inf).

        Raises:
            PlanMismatch: another number of query tokens or heads than the step was made for.
            InvalidArgument, Unsupported: as ``pagedmla.decode``.
        """
        first = q if isinstance(q, Tensor) else q[0]
        if first.shape[:2] != self.lse.shape:
            wanted = f"[num_tokens, num_heads] = {list(self.lse.shape)}, as the step"
            raise PlanMismatch("shape", "q", wanted, str(list(first.shape[:2])))
        return decode(
            q,
            kv_cache,
            self.block_table,
            self.seq_lens,
            softmax_scale=softmax_scale,
            cu_seqlens_q=self.cu_seqlens_q,
            kv_lora_rank=self.out.shape[2],
            out=self.out,
            lse=self.lse,
            batch_invariant=self.batch_invariant,
            workspace=self.workspace,
            max_q_len=self.max_q_len,
        )


class StepBuffers:
    """What the steps of one metadata builder write, at addresses that never change.

    Attributes:
        problem, bounds: what it was made for; ``problem.num_heads`` counts the heads of q, those of other ranks included where
            q was gathered.
        out: [max_num_tokens, num_heads, kv_lora_rank] of q's dtype.
        lse: f32 [max_num_tokens, num_heads].
        workspace: uint8.
    """

    def __init__(
        self, problem: DecodeProblem, bounds: BatchBounds, device: torch.device | str = "cpu"
    ) -> None:
        """Makes the buffers.

        Raises:
            InvalidArgument: an unknown device.
            Unsupported: no kernel takes the problem there, with every reason.
        """
        require_kernel(problem, Target.detect(device))
        self.problem, self.bounds = problem, bounds
        rows = (bounds.num_tokens(problem), problem.num_heads)
        self.out = torch.empty((*rows, problem.kv_lora_rank), dtype=problem.out_dtype, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)
        num_bytes = workspace_size(problem, bounds, device)
        self.workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def step(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor,
        query_starts_on_host: Tensor,
        num_tokens: int,
    ) -> DecodeStep:
        """A step over the engine's own tables.  Launches nothing, copies nothing, reads nothing that is on a device.

        Args:
            block_table: i32 [num_seqs, max_pages].
            seq_lens: i32 [num_seqs], tokens.
            query_starts: i32 [num_seqs + 1].
            query_starts_on_host: the same numbers on the CPU.
            num_tokens: rows of q, padding included.

        Raises:
            PlanMismatch: a capacity is exceeded.
        """
        num_seqs = seq_lens.shape[0]
        capacity = self.lse.shape[0]
        if num_seqs > self.bounds.max_num_seqs:
            wanted = f"at most {self.bounds.max_num_seqs} sequences"
            raise PlanMismatch("max_num_seqs", "seq_lens", wanted, str(num_seqs))
        if num_tokens > capacity:
            raise PlanMismatch("max_num_tokens", "q", f"at most {capacity} query tokens", str(num_tokens))
        max_q_len, even = query_lengths(query_starts_on_host.tolist(), num_tokens)
        return DecodeStep(
            block_table,
            seq_lens,
            None if even else query_starts,
            max_q_len,
            self.out[:num_tokens],
            self.lse[:num_tokens],
            self.workspace,
            self.problem.batch_invariant,
        )
