"""The wrapper: what ``plan`` keeps of a batch, and ``run`` over ``pagedmla.decode``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch

from pagedmla.compat.flashinfer.caches import as_one, one_scale, pack, packing
from pagedmla.compat.flashinfer.csr import CSR, block_table, csr, read
from pagedmla.contract.errors import InvalidArgument, PlanMismatch, Unsupported, check_type
from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.support import BACKENDS
from pagedmla.decode import decode, workspace_size

_LOG2_E = math.log2(math.e)
_BACKENDS = {"auto": None, "fa2": None, "fa3": None, **{name: name for name in BACKENDS}}
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# fields of DecodeProblem that are arguments of plan by another name
_THEIR_WORDS = {
    "softmax_scale": "sm_scale",
    "kv_lora_rank": "head_dim_ckv",
    "qk_rope_head_dim": "head_dim_kpe",
    "q_dtype": "q_data_type",
    "kv_layout": "kv_data_type",
}
# 64 MiB: up to this, one sequence of a graph may have all of the reserved page indices
_ROOMY_TABLE_CELLS = 2**24


@dataclass(frozen=True)
class _Plan:
    """What ``plan`` fixed.

    Attributes:
        problem: the static half of the call.
        least_tokens, most_tokens: query rows that ``run`` may be given.
        num_pages: pages that the lengths need, in all.
        block_table, seq_lens: i32 [batch_size, width] and i32 [batch_size], tokens.
        cu_seqlens_q: i32 [batch_size + 1]; None where every sequence has the same number, which kernels then know.
        workspace: uint8.
    """

    problem: DecodeProblem
    least_tokens: int
    most_tokens: int
    num_pages: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    workspace: torch.Tensor

    @cached_property
    def packing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which pages ``run`` packs and how it finds them, worked out once for all layers; see ``caches.packing``."""
        return packing(self.block_table, self.seq_lens, self.problem.page_size, self.num_pages)


class BatchMLAPagedAttentionWrapper:
    """Paged MLA attention, planned on the host once a step and run in every layer.

    Attributes:
        device: where the workspace lies, and with it all that ``run`` is given.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        """Keeps the buffers; with ``use_cuda_graph`` makes the block table that graphs will read.

        Args:
            float_workspace_buffer: contiguous memory for intermediates, any dtype.  Where it is smaller than
                ``pagedmla.workspace_size`` says, ``plan`` allocates instead: at 512 + 64 the torch backend wants more than the
                usual 128 MiB.  What it holds does not matter; wrappers that never run at the same time may share it.
            use_cuda_graph: ``run`` may be captured, and replayed after every later ``plan``.
            qo_indptr, kv_indptr, kv_len_arr: with it, buffers that ``plan`` writes, i32 [batch_size + 1] and i32 [batch_size].
            kv_indices: with it, i32 [most pages of a batch].  One sequence may have all of them, or, where a table for that
                would pass 64 MiB, at least len(kv_indices) / batch_size.
            backend: "auto", "fa2", "fa3": our choice; or the name of a backend of ours.

        Raises:
            InvalidArgument: a buffer that is missing or of a wrong kind.
            Unsupported: another backend of FlashInfer's.
        """
        check_type("float_workspace_buffer", float_workspace_buffer, torch.Tensor)
        if not float_workspace_buffer.is_contiguous():
            got = f"strides {tuple(float_workspace_buffer.stride())}"
            raise InvalidArgument("stride", "float_workspace_buffer", "contiguous memory", got)
        check_type("use_cuda_graph", use_cuda_graph, bool)
        check_type("backend", backend, str)
        if backend not in _BACKENDS:
            raise Unsupported("backend", "backend", "one of " + ", ".join(_BACKENDS), repr(backend))
        self.device = float_workspace_buffer.device
        self._backend = _BACKENDS[backend]
        self._workspace = float_workspace_buffer.view(-1).view(torch.uint8)
        self._plan: _Plan | None = None
        self._buffers: CSR | None = None
        if use_cuda_graph:
            self._buffers = csr(qo_indptr, kv_indptr, kv_indices, kv_len_arr, device=self.device)
            count, most = self._buffers.kv_len_arr.shape[0], self._buffers.kv_indices.shape[0]
            width = max(-(-most // max(1, count)), min(most, _ROOMY_TABLE_CELLS // max(1, count)))
            self._table = torch.full((count, width), -1, dtype=torch.int32, device=self.device)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Takes a batch: copies it, and reads three small tensors of it on the host, with one wait where all are on the device.

        Args:
            qo_indptr: i32 [batch_size + 1], where each sequence's query tokens start; on the CPU or not, like the next three.
            kv_indptr: i32 [batch_size + 1], where each sequence's pages start in ``kv_indices``.
            kv_indices: i32 [at least kv_indptr[-1]], page ids; those past a sequence's length may be anything.
            kv_len_arr: i32 [batch_size], keys of each sequence in tokens, this step's included; 0 is legal.
            num_heads, head_dim_ckv, head_dim_kpe: sizes.
            page_size: tokens in a page.
            causal: query j of n sees keys 0 .. length - n + j; otherwise every query sees every key.
            sm_scale: from the head size before absorption, with YaRN's factor.
            q_data_type, kv_data_type: of what ``run`` will be given.
            use_profiler: False.

        Raises:
            InvalidArgument: names the argument, what was wanted and what came, with the sequence.
            Unsupported: valid for FlashInfer and not here, or refused by every backend.
            PlanMismatch: with ``use_cuda_graph``, more than the buffers hold, or something else than the first plan fixed.
        """
        _refuse_given(use_profiler=use_profiler or None)
        dims = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        problem = _problem(dims, causal, sm_scale, q_data_type, kv_data_type)
        batch = csr(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        q_lens, num_pages = read(batch, page_size)
        problem = replace(problem, max_q_len=max([1, *q_lens]))
        width, num_tokens = max(num_pages, default=0), sum(q_lens)
        table_width, most_tokens = width, num_tokens
        if self._buffers is not None:
            problem = self._check_graph(self._buffers, problem, batch, width)
            table_width, most_tokens = self._table.shape[1], len(q_lens) * problem.max_q_len
        bounds = BatchBounds(max(1, len(q_lens)), max(1, table_width), max(1, most_tokens))
        # whoever runs it is chosen in run, which sees the tensors: the best backend may not read a cache's strides
        num_bytes = workspace_size(problem, bounds, self.device, self._backend)
        # from here on nothing is refused: a plan that fails leaves the buffers as they were
        if self._workspace.numel() < num_bytes:
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        batch = self._keep(batch)
        table = block_table(batch, width)
        if self._buffers is not None:
            self._table[:, :width].copy_(table)
            table = self._table
        # a graph has the address of the query starts, and later batches may be ragged
        even = self._buffers is None and len(set(q_lens)) == 1
        self._plan = _Plan(
            problem=problem,
            least_tokens=num_tokens,
            most_tokens=most_tokens,
            num_pages=sum(num_pages),
            block_table=table,
            seq_lens=batch.kv_len_arr,
            cu_seqlens_q=None if even else batch.qo_indptr,
            workspace=self._workspace,
        )

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attends for the planned batch; reads nothing on the host.  The bits of ``out`` are those of ``pagedmla.decode``.

        Args:
            q_nope, q_pe: [num_tokens, num_heads, head_dim_ckv] and [num_tokens, num_heads, head_dim_kpe].
            ckv_cache, kpe_cache: [num_pages, page_size, head_dim_ckv] and [num_pages, page_size, head_dim_kpe]; two views of
                one cache are read in place, others are packed: see the module.
            out: [num_tokens, num_heads, head_dim_ckv] of q's dtype to write into.
            lse: f32 [num_tokens, num_heads] to write into, whether it is returned or not.
            return_lse: return (out, lse), not out alone.
            return_lse_base_on_e: natural logarithm.  Otherwise it is multiplied by log2(e) in float32, in place.
            ckv_scale, kpe_scale: for an fp8 cache, the one number that both parts are multiplied by on read.
            the others: refused unless left out.

        Raises:
            PlanMismatch: no plan yet, or what is given is not what was planned.
            InvalidArgument: what ``pagedmla.decode`` would refuse.
            Unsupported: valid for FlashInfer and not here.
        """
        plan = self._plan
        if plan is None:
            raise PlanMismatch("no_plan", "run", "a call of plan() before it", "none")
        _refuse_given(profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table)
        _refuse_given(o_scale=o_scale, ckv_scale_arr=ckv_scale_arr)
        kv_scale = one_scale(plan.problem.layout, ckv_scale, kpe_scale)
        _check_planned(plan, q_nope, q_pe, ckv_cache, kpe_cache)
        kv_cache, table = as_one(ckv_cache, kpe_cache), plan.block_table
        if kv_cache is None and self._buffers is not None:
            wanted = "columns beside ckv_cache's in one cache: a captured graph cannot pack batches to come"
            raise Unsupported("two_caches", "kpe_cache", wanted, "a tensor apart")
        if kv_cache is None:
            pages, table = plan.packing
            kv_cache = pack(pages, ckv_cache, kpe_cache)
        wants_lse = return_lse or lse is not None
        out, lse = decode(
            (q_nope, q_pe),
            kv_cache,
            table,
            plan.seq_lens,
            softmax_scale=plan.problem.softmax_scale,
            cu_seqlens_q=plan.cu_seqlens_q,
            causal=plan.problem.causal,
            kv_lora_rank=plan.problem.kv_lora_rank,
            kv_scale=kv_scale,
            out=out,
            lse=lse,
            backend=self._backend,
            workspace=plan.workspace,
            max_q_len=plan.problem.max_q_len,
        )
        if wants_lse and not return_lse_base_on_e:
            lse.mul_(_LOG2_E)
        return (out, lse) if return_lse else out

    def _check_graph(self, buffers: CSR, problem: DecodeProblem, batch: CSR, width: int) -> DecodeProblem:
        """The problem that graphs are captured for; refuses a batch that they could not be replayed for."""
        for name, buffer, given in zip(CSR._fields, buffers, batch, strict=True):
            most, came = buffer.shape[0], given.shape[0]
            if came > most or (came < most and name != "kv_indices"):
                raise PlanMismatch("capacity", name, f"{most} numbers, as the reserved buffer", str(came))
        if width > self._table.shape[1]:
            wanted = f"at most {self._table.shape[1]} pages a sequence, by the reserved kv_indices"
            raise PlanMismatch("max_pages", "kv_indptr", wanted, str(width))
        first = problem if self._plan is None else self._plan.problem
        if problem.max_q_len > first.max_q_len:
            wanted = f"at most {first.max_q_len} query tokens a sequence, as the first plan"
            raise PlanMismatch("max_q_len", "qo_indptr", wanted, str(problem.max_q_len))
        for name in (field.name for field in fields(first) if field.name != "max_q_len"):
            fixed, came = getattr(first, name), getattr(problem, name)
            if fixed != came:
                word = _THEIR_WORDS.get(name, name)
                raise PlanMismatch(word, word, f"{fixed}, which the first plan fixed for graphs", str(came))
        return first

    def _keep(self, batch: CSR) -> CSR:
        """The batch on the device, in memory that the caller's next step does not change."""
        if self._buffers is None:
            return CSR(*(tensor.to(self.device, copy=True) for tensor in batch))
        for buffer, tensor in zip(self._buffers, batch, strict=True):
            # a pinned tensor would still be read after plan has returned, when it may hold the next step
            buffer[: tensor.shape[0]].copy_(tensor, non_blocking=not tensor.is_pinned())
        return self._buffers


def _problem(
    dims: tuple[int, int, int, int],
    causal: bool,
    sm_scale: float,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> DecodeProblem:
    """The static half of a plan, for one query token; its errors are in the words of ``plan``."""
    for name, dtype, taken in (
        ("q_data_type", q_dtype, _QUERY_DTYPES),
        ("kv_data_type", kv_dtype, (q_dtype, *_FP8)),
    ):
        if dtype not in taken:
            raise Unsupported("dtype", name, " or ".join(map(str, taken)), str(dtype))
    num_heads, head_dim_ckv, head_dim_kpe, page_size = dims
    layout = layout_of_dtype(kv_dtype).name
    try:
        return DecodeProblem(
            num_heads, sm_scale, head_dim_ckv, head_dim_kpe, page_size, q_dtype, layout, causal=causal
        )
    except InvalidArgument as error:
        word = _THEIR_WORDS.get(error.argument, error.argument)
        raise InvalidArgument(error.code, word, error.wanted, error.got) from None


def _check_planned(
    plan: _Plan,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
) -> None:
    check_type("q_nope", q_nope, torch.Tensor)
    check_type("ckv_cache", ckv_cache, torch.Tensor)
    problem, device = plan.problem, plan.block_table.device
    rows = (*q_nope.shape[:1], problem.num_heads)
    pages = (*ckv_cache.shape[:1], problem.page_size)
    latent, rope = problem.kv_lora_rank, problem.qk_rope_head_dim
    for name, tensor, shape, dtype in (
        ("q_nope", q_nope, (*rows, latent), problem.q_dtype),
        ("q_pe", q_pe, (*rows, rope), problem.q_dtype),
        ("ckv_cache", ckv_cache, (*pages, latent), problem.layout.dtype),
        ("kpe_cache", kpe_cache, (*pages, rope), problem.layout.dtype),
    ):
        check_type(name, tensor, torch.Tensor)
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            wanted = f"{dtype} {list(shape)} on {device}, as planned"
            got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise PlanMismatch("planned", name, wanted, got)
    if not plan.least_tokens <= q_nope.shape[0] <= plan.most_tokens:
        wanted = f"{plan.least_tokens}..{plan.most_tokens} query tokens, as planned"
        raise PlanMismatch("num_tokens", "q_nope", wanted, str(q_nope.shape[0]))


def _refuse_given(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise Unsupported(name, name, "that it is left out", type(value).__name__)
