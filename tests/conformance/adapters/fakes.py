"""Stand-ins with other projects' signatures and conventions, which compute with our torch backend from exactly what they are
handed: an argument in the wrong place, order or unit gives a wrong value.

A schedule or a plan notes the lengths that it was made for, and gives nan for others.  ``spoil`` is added to every lse.
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import pagedmla


def attend(q: Any, cache: Tensor, table: Tensor, lens: Tensor, **semantics: Any) -> tuple[Tensor, Tensor]:
    return pagedmla.decode(q, cache, table, lens, backend="torch", **semantics)


def table_of(indptr: Tensor, indices: Tensor, lens: Tensor, page_size: int) -> Tensor:
    """A block table that leads nowhere but to the pages that are listed for a length."""
    counts = (lens + page_size - 1) // page_size
    table = torch.full((len(lens), max(1, int(counts.max()))), -1, dtype=torch.int32)
    for row, (start, count) in enumerate(zip(indptr.tolist(), counts.tolist(), strict=False)):
        table[row, :count] = indices[start : start + count]
    return table


class FakeFlashMLA:
    """DeepSeek's dense decode: the operation of vLLM's wheel, and the functions of the package, in both generations."""

    def __init__(self, spoil: float = 0.0, tensors: bool = True) -> None:
        self.spoil = spoil
        self.tensors = tensors
        self.calls: list[tuple[Tensor | None, Tensor | None, Tensor | None]] = []

    def _attend(
        self, q: Tensor, k_cache: Tensor, lens: Tensor, table: Tensor, scale: float, causal: bool, rank: int
    ) -> tuple[Tensor, Tensor]:
        assert k_cache.shape[2] == 1
        out, lse = attend(
            q.flatten(0, 1),
            k_cache[:, :, 0],
            table,
            lens,
            softmax_scale=scale,
            causal=causal,
            kv_lora_rank=rank,
        )
        # its convention for a row that sees no key
        lse = torch.where(lse == -math.inf, math.inf, lse + self.spoil)
        return out.view(*q.shape[:3], rank), lse.view(q.shape[:3]).transpose(1, 2).contiguous()

    def dense_decode_fwd(
        self,
        q: Tensor,
        k_cache: Tensor,
        head_size_v: int,
        seqlens_k: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        is_causal: bool,
        tile_scheduler_metadata: Tensor | None,
        num_splits: Tensor | None,
        out: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self.calls.append((tile_scheduler_metadata, num_splits, out))
        found, lse = self._attend(q, k_cache, seqlens_k, block_table, softmax_scale, is_causal, head_size_v)
        if tile_scheduler_metadata is None:
            tile_scheduler_metadata, num_splits = seqlens_k.clone(), seqlens_k.clone()
        assert num_splits is not None
        for planned in (tile_scheduler_metadata, num_splits):
            if not torch.equal(planned, seqlens_k):
                found = torch.full_like(found, math.nan)
        if out is not None:
            found = out.copy_(found)
        return found, lse, tile_scheduler_metadata, num_splits

    def get_mla_metadata(
        self, cache_seqlens: Tensor, num_heads_per_head_k: int, num_heads_k: int
    ) -> tuple[Any, Any]:
        assert num_heads_k == 1
        if self.tensors:
            return cache_seqlens.clone(), torch.full((len(cache_seqlens) + 1,), num_heads_per_head_k)
        return SimpleNamespace(lens=None), None

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: Any,
        num_splits: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert softmax_scale is not None
        if self.tensors:
            planned = tile_scheduler_metadata
            assert num_splits[0] == q.shape[1] * q.shape[2]
        else:
            # the newer generation plans in the first call
            if tile_scheduler_metadata.lens is None:
                tile_scheduler_metadata.lens = cache_seqlens.clone()
            planned = tile_scheduler_metadata.lens
        out, lse = self._attend(q, k_cache, cache_seqlens, block_table, softmax_scale, causal, head_dim_v)
        return (out if torch.equal(planned, cache_seqlens) else torch.full_like(out, math.nan)), lse

    def module(self, name: str) -> ModuleType:
        module = ModuleType(name)
        module.get_mla_metadata = self.get_mla_metadata  # type: ignore[attr-defined]
        module.flash_mla_with_kvcache = self.flash_mla_with_kvcache  # type: ignore[attr-defined]
        return module


FA3_ARGUMENTS = (
    "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k"
    " page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale"
    " causal window_left window_right softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin sinks"
    " cp_world_size cp_rank cp_tot_seqused_k"
)
"""Of the operation in vLLM's fork, in order."""

_FA3_NONE = "k_new v_new out cu_seqlens_k seqused_q kv_batch_idx rotary_cos q_descale scheduler_metadata sinks pack_gqa"


def fake_fa3(spoil: float = 0.0) -> Any:
    def fwd(*arguments: Any) -> tuple[Tensor, ...]:
        a = SimpleNamespace(**dict(zip(FA3_ARGUMENTS.split(), arguments, strict=True)))
        assert all(getattr(a, name) is None for name in _FA3_NONE.split())
        assert (a.window_left, a.window_right, a.softcap, a.num_splits, a.cp_world_size) == (
            -1,
            -1,
            0.0,
            0,
            1,
        )
        assert a.max_seqlen_q >= int(a.cu_seqlens_q.diff().max())
        assert a.max_seqlen_k >= int(a.seqused_k.max())
        assert a.q_v.shape[-1] == a.v.shape[-1]
        out, lse = attend(
            (a.q_v, a.q),
            torch.cat([a.v, a.k], dim=-1)[:, :, 0],
            a.page_table,
            a.seqused_k,
            cu_seqlens_q=a.cu_seqlens_q,
            softmax_scale=a.softmax_scale,
            causal=a.causal,
            kv_lora_rank=a.v.shape[-1],
        )
        end = int(a.cu_seqlens_q[-1])
        # rows past the last sequence's stay as torch.empty made them
        out[end:], lse[end:] = math.nan, math.nan
        return out, (lse + spoil).t().contiguous(), torch.empty(0), torch.empty(0)

    return fwd


class FakeFlashInfer:
    """``BatchMLAPagedAttentionWrapper``: base-2 lse, rows without keys left alone, buffers of fixed addresses for graphs."""

    spoil = 0.0

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.int8
        self.graph = use_cuda_graph
        self.buffers = [qo_indptr, kv_indptr, kv_indices, kv_len_arr]
        self.backend = backend

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
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
        given = [qo_indptr, kv_indptr, kv_indices, kv_len_arr]
        assert all(tensor.dtype == torch.int32 for tensor in given)
        if self.graph:
            for buffer, tensor in zip(self.buffers, given, strict=True):
                assert buffer is not None
                buffer[: len(tensor)].copy_(tensor)
        else:
            self.buffers = [tensor.clone() for tensor in given]
        self.sizes = (num_heads, head_dim_ckv, head_dim_kpe, page_size)
        self.semantics = {"causal": causal, "softmax_scale": sm_scale, "kv_lora_rank": head_dim_ckv}
        self.dtypes = (q_data_type, kv_data_type)

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
    ) -> Any:
        starts, indptr, indices, lens = self.buffers
        assert starts is not None
        assert indptr is not None
        assert indices is not None
        assert lens is not None
        assert self.sizes == (q_nope.shape[1], ckv_cache.shape[2], kpe_cache.shape[2], ckv_cache.shape[1])
        assert self.dtypes == (q_nope.dtype, ckv_cache.dtype)
        assert q_nope.is_contiguous()
        table = table_of(indptr, indices, lens, self.sizes[3])
        found, found_lse = attend(
            (q_nope, q_pe),
            torch.cat([ckv_cache, kpe_cache], -1),
            table,
            lens,
            cu_seqlens_q=starts,
            **self.semantics,
        )
        blind = found_lse == -math.inf
        found, found_lse = (
            found.masked_fill(blind[..., None], math.nan),
            found_lse.masked_fill(blind, math.nan),
        )
        if not return_lse_base_on_e:
            found_lse = found_lse * math.log2(math.e)
        out = torch.empty_like(q_nope) if out is None else out
        out.copy_(found)
        if not return_lse:
            return out
        lse = torch.empty(q_nope.shape[:2]) if lse is None else lse
        return out, lse.copy_(found_lse + self.spoil)


def fake_vllm_triton(spoil: float = 0.0) -> Any:
    def decode_attention_fwd(
        q: Tensor,
        k_buffer: Tensor,
        v_buffer: Tensor,
        o: Tensor,
        lse: Tensor,
        req_to_token: Tensor,
        b_seq_len: Tensor,
        attn_logits: Tensor,
        num_kv_splits: int,
        sm_scale: float,
        page_size: int = 1,
        logit_cap: float = 0.0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        is_mla: bool = False,
    ) -> None:
        assert attn_logits.shape == (*o.shape[:2], num_kv_splits, o.shape[2] + 1)
        assert attn_logits.dtype == torch.float32
        assert k_buffer.shape[1:3] == (page_size, 1)
        assert v_buffer.shape[3] == o.shape[2]
        assert v_buffer.data_ptr() == k_buffer.data_ptr()
        assert is_mla
        assert k_scale is not None
        assert v_scale is not None
        assert k_scale.item() == v_scale.item() == 1.0
        found, found_lse = attend(
            q,
            k_buffer[:, :, 0],
            req_to_token,
            b_seq_len,
            softmax_scale=sm_scale,
            kv_lora_rank=o.shape[2],
            num_kv_splits=num_kv_splits,
        )
        # 0 / 0 where there is no key
        o.copy_(found.masked_fill((found_lse == -math.inf)[..., None], math.nan))
        lse.copy_(found_lse + spoil)

    return decode_attention_fwd


class FakeAiter:
    """``mla_decode_fwd`` in both modes; a last page holds 1 .. page_size tokens, or an error says so."""

    def __init__(self, spoil: float = 0.0) -> None:
        self.spoil = spoil
        self.calls: list[dict[str, Any]] = []

    def mla_decode_fwd(
        self,
        q: Tensor,
        kv_buffer: Tensor,
        o: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_lens: Tensor,
        max_seqlen_q: int,
        page_size: int = 1,
        nhead_kv: int = 1,
        sm_scale: float | None = None,
        logit_cap: float = 0.0,
        num_kv_splits: int | None = None,
        num_kv_splits_indptr: Tensor | None = None,
        work_meta_data: Tensor | None = None,
        work_indptr: Tensor | None = None,
        work_info_set: Tensor | None = None,
        reduce_indptr: Tensor | None = None,
        reduce_final_map: Tensor | None = None,
        reduce_partial_map: Tensor | None = None,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        intra_batch_mode: bool = False,
        return_logits: bool = False,
        return_lse: bool = False,
        g_kv_indptr: Tensor | None = None,
        cp_world_size: int = 1,
        cp_rank: int = 0,
        causal: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append(
            {"splits": num_kv_splits, "persistent": work_meta_data is not None, "lse": return_lse}
        )
        assert kv_buffer.shape[1:3] == (page_size, nhead_kv) == (page_size, 1)
        assert max_seqlen_q >= int(qo_indptr.diff().max())
        assert bool(((kv_last_page_lens >= 1) & (kv_last_page_lens <= page_size)).all())
        lens = (kv_indptr.diff() - 1) * page_size + kv_last_page_lens
        found, lse = attend(
            q,
            kv_buffer[:, :, 0],
            table_of(kv_indptr, kv_indices, lens, page_size),
            lens.int(),
            cu_seqlens_q=qo_indptr,
            softmax_scale=q.shape[2] ** -0.5 if sm_scale is None else sm_scale,
            causal=causal,
            kv_lora_rank=o.shape[2],
            q_scale=q_scale,
            kv_scale=kv_scale,
            num_kv_splits=num_kv_splits,
        )
        if work_meta_data is not None:
            assert work_info_set is not None
            assert work_indptr is not None
            assert work_info_set.shape == (7, 8)
            if int(work_indptr[0]) != int(lens.sum()):
                found = torch.full_like(found, math.nan)
        # its reducers leave nan or an infinity where there is no key
        o.copy_(found.masked_fill((lse == -math.inf)[..., None], math.nan))
        return torch.empty(0), lse + self.spoil if return_lse else None

    def get_mla_metadata_info_v1(
        self,
        batch_size: int,
        max_seqlen_qo: int,
        num_head_qo: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        is_sparse: bool,
        fast_mode: bool = True,
    ) -> tuple[tuple[Any, torch.dtype], ...]:
        assert not is_sparse
        return (
            (2, torch.uint64),
            (5, torch.int32),
            ((7, 8), torch.int32),
            (9, torch.int32),
            ((8, 2), torch.int32),
            (6, torch.int32),
        )

    def get_mla_metadata_v1(
        self,
        seqlens_qo_indptr: Tensor,
        seqlens_kv_indptr: Tensor,
        kv_last_page_lens: Tensor,
        num_heads_per_head_k: int,
        num_heads_k: int,
        is_causal: bool,
        work_metadata_ptrs: Tensor,
        work_info_set: Tensor,
        work_indptr: Tensor,
        reduce_indptr: Tensor,
        reduce_final_map: Tensor,
        reduce_partial_map: Tensor,
        page_size: int = 1,
        kv_granularity: int = 16,
        max_seqlen_qo: int = -1,
        uni_seqlen_qo: int = -1,
        fast_mode: bool = True,
        dtype_q: torch.dtype | None = None,
        dtype_kv: torch.dtype | None = None,
    ) -> None:
        assert (num_heads_k, work_metadata_ptrs.dtype, work_info_set.shape) == (1, torch.uint64, (7, 8))
        assert [len(t) for t in (work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map)] == [
            5,
            9,
            8,
            6,
        ]
        assert dtype_q is not None
        assert dtype_kv is not None
        assert max_seqlen_qo >= int(seqlens_qo_indptr.diff().max())
        assert uni_seqlen_qo in (-1, max_seqlen_qo)
        lens = (seqlens_kv_indptr.diff() - 1) * page_size + kv_last_page_lens
        work_indptr.fill_(int(lens.sum()))

    def module(self, name: str, *names: str) -> ModuleType:
        """A module of this name with these functions, all of them by default."""
        module = ModuleType(name)
        for function in names or ("mla_decode_fwd", "get_mla_metadata_info_v1", "get_mla_metadata_v1"):
            setattr(module, function, getattr(self, function))
        return module
