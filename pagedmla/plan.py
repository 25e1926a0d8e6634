"""``DecodePlan``: a decode whose buffers are made once, for engines that capture graphs."""

from __future__ import annotations

from itertools import count
from operator import is_not
from typing import Any

import torch

from pagedmla.contract.arguments import Scale
from pagedmla.contract.errors import InvalidArgument, PlanMismatch, check_type
from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.support import choose_backend
from pagedmla.contract.target import Target
from pagedmla.decode import Query, decode
from pagedmla.dispatch import workspace_bytes
from pagedmla.kernels.repeat import MEMO, Call, identify, is_plain
from pagedmla.ops import call_of
from pagedmla.paging.metadata import DecodeMetadata

_NUMBERS = count()
"""Tells plans from each other."""


class DecodePlan:
    """Persistent buffers and fixed choices for one problem on one device.

    ``update`` copies a step's tables in stream order, without a sync and without allocating; ``run`` reads them on the device.
    A graph captured around ``run`` (or around both) therefore stays right for every later length within the bounds.

    A plan serves one call at a time: an ``update`` or a ``run`` on another stream waits for the one before.

        plan = DecodePlan(problem, BatchBounds(max_num_seqs=64, max_pages_per_seq=512), "cuda")
        plan.update(block_table, seq_lens)
        out, lse = plan.run(q, kv_cache)

    Attributes:
        problem, bounds, device: what the plan was made for.
        backend: the backend that runs it; where none was named, a cache that it cannot read leads a run to the next best.
        metadata: the persistent block table, lengths and query starts.
        workspace: uint8, the kernel's intermediates.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        bounds: BatchBounds,
        device: torch.device | str = "cpu",
        *,
        backend: str | None = None,
    ) -> None:
        """Makes the buffers.

        Args:
            problem: the static half of every call.
            bounds: capacities; the block table counts pages of ``problem.page_size`` tokens.
            device: where everything lives.
            backend: a backend's name, or None for the best that takes the problem.

        Raises:
            InvalidArgument: an unknown device or backend.
            Unsupported: the problem is refused, with every reason.
        """
        check_type("problem", problem, DecodeProblem)
        check_type("bounds", bounds, BatchBounds)
        target = Target.detect(device)
        self.problem = problem
        self.bounds = bounds
        self.backend = choose_backend(problem, target, backend)
        self._named_backend = backend
        self.metadata = DecodeMetadata(bounds, problem.page_size, csr=False, device=device)
        self.device = self.metadata.block_table.device
        num_bytes = workspace_bytes(problem, bounds, target, backend)
        self.workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._even_tokens = 0
        self._number = next(_NUMBERS)
        self._whole: tuple[Any, ...] = ()
        self._places: list[tuple[int, int]] = []

    def update(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None
    ) -> None:
        """Copies a step's tables into the plan's buffers; sequences beyond the step's become inert.

        Args:
            block_table: i32 [num_seqs, width], width <= max_pages_per_seq; never cut silently.
            seq_lens: i32 [num_seqs], tokens, this step's included.
            cu_seqlens_q: i32 [num_seqs + 1]; left out: ``problem.max_q_len`` query tokens for every sequence.

        Raises:
            InvalidArgument: wrong rank, dtype, device or matching lengths.
            PlanMismatch: a capacity is exceeded; nothing was copied.
        """
        self.metadata.update(block_table, seq_lens, cu_seqlens_q, q_len=self.problem.max_q_len)
        self._even_tokens = seq_lens.shape[0] * self.problem.max_q_len if cu_seqlens_q is None else 0

    def run(
        self,
        q: Query,
        kv_cache: torch.Tensor,
        *,
        q_scale: Scale = None,
        kv_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decodes the step that ``update`` brought.

        Args:
            q: [num_tokens, num_heads, head_dim_qk] or the pair; rows past the step's query tokens are padding and get
                (0, -inf).
            kv_cache: [num_pages, page_size, head_dim_qk].
            q_scale, kv_scale: fp8 only, see ``pagedmla.decode``.
            out, lse: to write into; left out: new tensors.

        Returns:
            (out, lse) as ``pagedmla.decode``.

        Raises:
            PlanMismatch: heads, dims, dtype, layout, page size or device differ from the plan's, or a capacity is exceeded.
            InvalidArgument: what ``pagedmla.decode`` would refuse.
        """
        call = None
        # as in decode(): a step that was made before goes the short way.  Scales are rare, and decode() knows them too
        if q_scale is None and kv_scale is None and not torch.compiler.is_compiling() and is_plain():
            call = self._call(q, kv_cache, out, lse)
            if call is not None and (made := MEMO.again(call, out, lse)) is not None:
                return made
        self._check_run(q, kv_cache)
        problem, metadata = self.problem, self.metadata
        made = decode(
            q,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            softmax_scale=problem.softmax_scale,
            cu_seqlens_q=metadata.cu_seqlens_q,
            causal=problem.causal,
            kv_lora_rank=problem.kv_lora_rank,
            q_scale=q_scale,
            kv_scale=kv_scale,
            out=out,
            lse=lse,
            backend=self._named_backend,
            schedule=problem.schedule,
            num_kv_splits=problem.num_kv_splits,
            batch_invariant=problem.batch_invariant,
            workspace=self.workspace,
            max_q_len=problem.max_q_len,
        )
        if call is not None:
            self._remember(call, q, kv_cache, (None, None) if out is None and lse is None else made)
        return made

    def _remember(
        self,
        call: Call,
        q: Query,
        kv_cache: torch.Tensor,
        outputs: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        """Lets a run lead to what the operator remembers of it."""
        problem, metadata = self.problem, self.metadata
        same = call_of(
            (
                *(q if isinstance(q, tuple) else (q, None)), kv_cache,
                metadata.block_table, metadata.seq_lens, metadata.cu_seqlens_q,
                float(problem.softmax_scale), problem.causal, problem.kv_lora_rank, None, None, None, None,
                self._named_backend, problem.schedule, problem.num_kv_splits, problem.batch_invariant,
                self.workspace, problem.max_q_len, False,
            ),
            *outputs,
        )  # fmt: skip
        if same is not None:
            MEMO.also(call, same, kept=same.addresses[len(call.addresses) :])

    def _call(self, q: Any, kv_cache: Any, out: torch.Tensor | None, lse: torch.Tensor | None) -> Call | None:
        """What tells a run from others: the plan's own buffers and options stay, and its number stands for them."""
        metadata = self.metadata
        buffers = (metadata.block_table, metadata.seq_lens, metadata.cu_seqlens_q, self.workspace)
        whole = (*buffers, self.problem, self._named_backend)
        places = [(buffer.data_ptr(), buffer.numel()) for buffer in buffers]
        if places != self._places or any(map(is_not, whole, self._whole)):
            # somebody gave it others, as one workspace for several plans, or other memory to the same ones
            self._number, self._whole, self._places = next(_NUMBERS), whole, places
        q_latent, q_pe = q if type(q) is tuple and len(q) == 2 else (q, None)
        return identify((q_latent, q_pe, kv_cache, out, lse), (self._number, self._even_tokens))

    def _check_run(self, q: Query, kv_cache: torch.Tensor) -> None:
        parts = list(q) if isinstance(q, (tuple, list)) and len(q) == 2 else [q]
        if not all(isinstance(part, torch.Tensor) for part in [*parts, kv_cache]):
            raise InvalidArgument(
                "type",
                "q and kv_cache",
                "tensors",
                ", ".join(type(part).__name__ for part in [*parts, kv_cache]),
            )
        for name, tensor in [("q", part) for part in parts] + [("kv_cache", kv_cache)]:
            if tensor.dim() != 3:
                raise InvalidArgument("rank", name, "3 dimensions", str(list(tensor.shape)))
            if tensor.device != self.device:
                raise PlanMismatch(
                    "device", name, f"a tensor on {self.device}, as the plan", f"one on {tensor.device}"
                )
        problem = self.problem
        for argument, name, planned, given in (
            ("q", "num_heads", problem.num_heads, parts[0].shape[1]),
            ("q", "head_dim_qk", problem.head_dim_qk, sum(part.shape[2] for part in parts)),
            ("q", "dtype", problem.q_dtype, parts[0].dtype),
            ("kv_cache", "layout", problem.kv_layout, layout_of_dtype(kv_cache.dtype).name),
            ("kv_cache", "page_size", problem.page_size, kv_cache.shape[1]),
        ):
            if planned != given:
                raise PlanMismatch(name, argument, f"{name} {planned}, as planned", str(given))
        num_tokens, capacity = parts[0].shape[0], self.bounds.num_tokens(problem)
        if num_tokens > capacity:
            raise PlanMismatch("max_num_tokens", "q", f"at most {capacity} query tokens", str(num_tokens))
        if num_tokens < self._even_tokens:
            wanted = f"at least the {self._even_tokens} query tokens of the last update (max_q_len {problem.max_q_len} each)"
            raise PlanMismatch("num_tokens", "q", wanted, str(num_tokens))
