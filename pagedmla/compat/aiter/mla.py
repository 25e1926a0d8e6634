"""``mla_decode_fwd`` with AITER's arguments, over ``pagedmla.decode``."""

from __future__ import annotations

import torch

from pagedmla.compat.aiter.checks import aiter_names, flag, vector, whole
from pagedmla.compat.aiter.metadata import check_metadata
from pagedmla.compat.aiter.paged_kv import block_table_of, check_pages
from pagedmla.contract.arguments import Scale
from pagedmla.contract.errors import InvalidArgument, Unsupported, check_type
from pagedmla.decode import decode


def mla_decode_fwd(
    q: torch.Tensor,
    kv_buffer: torch.Tensor,
    o: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: torch.Tensor | None = None,
    work_meta_data: torch.Tensor | None = None,
    work_indptr: torch.Tensor | None = None,
    work_info_set: torch.Tensor | None = None,
    reduce_indptr: torch.Tensor | None = None,
    reduce_final_map: torch.Tensor | None = None,
    reduce_partial_map: torch.Tensor | None = None,
    q_scale: Scale = None,
    kv_scale: Scale = None,
    intra_batch_mode: bool = False,
    return_logits: bool = False,
    return_lse: bool = False,
    g_kv_indptr: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    causal: bool = True,
    *,
    max_pages: int | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Paged MLA decode attention; ``o`` is written in place.  Below the star are extensions that AITER does not have.

    Non-persistent without ``work_meta_data``, persistent with it; both give the bits of ``pagedmla.decode`` for the same batch.
    Nothing waits for the device.  Per call a block table is allocated, see ``max_pages``, and ``lse`` where it is not given.

    Args:
        q: [total_q, nhead, head_dim_qk] bf16, fp16, fp32 or fp8, absorbed, latent first; any strides with inner stride 1.
        kv_buffer: [num_page, page_size, 1, head_dim_qk], a token is its latent, then its rotated key.  AITER's gfx1250 keeps
            all latents of a page before all rotated keys in a tensor of this very shape: that gives wrong numbers here.
        o: [total_q, nhead, kv_lora_rank] of q's dtype, bf16 for fp8 q; may be strided.  Its last size says how much of a token
            is latent.  A row that sees no key, or is in no request, becomes 0.
        qo_indptr: i32 [num_requests + 1], query tokens; its length says how many requests there are.
        kv_indptr: i32 [at least num_requests + 1], PAGES (which are tokens where page_size is 1).
        kv_indices: i32 [at least kv_indptr[-1]], page ids; what stands in no request's range is never followed.
        kv_last_page_lens: i32 [at least num_requests], TOKENS in each request's last page, 1..page_size, for every page size:
            with pages of one token it is 1 whatever the request's length is.  Read on the device and bounded to 1..page_size,
            so that a wrong one (a whole sequence's length, say) leads nowhere; ``validate`` reports it.
        max_seqlen_q: most query tokens of a request.  A request that has more gets unspecified rows.
        page_size: tokens in a page, any number >= 1; must be kv_buffer's.
        nhead_kv: must be 1.
        sm_scale: None is 1 / sqrt(head_dim_qk), 1 / sqrt(576), as in AITER.  THAT IS NO MODEL'S SCALE: a model's comes from the
            head size before absorption, with YaRN's factor, for DeepSeek-V3 from 192.  Give the model's.
        logit_cap: must not be above 0.
        num_kv_splits: parts that each request's keys are cut into, non-persistent; None: the backend's choice.  In the
            persistent mode it bounds a scratch memory of AITER's reducer, and nothing here.
        num_kv_splits_indptr: i32 [at least num_requests + 1], parts of each request.  Where keys are cut changes the rounding
            and nothing else, so these values are not looked at: every request gets ``num_kv_splits``.
        work_meta_data, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map: the six buffers of
            ``get_mla_metadata_v1``, all or none.  They must be large enough for this batch.  What stands in them is not read:
            the kernels plan from this call's lengths, so a schedule that has gone stale does no harm.
        q_scale, kv_scale: f32 of one element, or a number, multiplied on read; required for an fp8 q and an fp8 kv_buffer
            (AITER follows a null pointer where kv_scale is missing under a bf16 q), not looked at for the other dtypes.
        intra_batch_mode: not looked at, as in AITER.
        return_logits: must be False: partial results are the backend's own, in number and place.
        return_lse: whether the second result is lse or None.  lse is computed in every mode; asking changes no bit of ``o``.
        g_kv_indptr, cp_world_size, cp_rank: must be None, 1 and 0: no mask by global positions.
        causal: query j of n sees the first length - n + j + 1 keys; otherwise every query sees every key.
        max_pages: most pages of one request, which sizes the block table [num_requests, max_pages].  Left out, on a GPU it is
            len(kv_indices): right, at 8 * num_requests * len(kv_indices) bytes a call, and automatic split counts are chosen
            for lengths that large; a CPU looks.  A request that has more pages is attended to as if it ended there.
        lse: f32 [total_q, nhead] to write into.
        workspace: uint8, memory for intermediates, as for ``pagedmla.decode``.
        backend: None lets the support table choose.
        validate: read the device's values and report the first one out of range; for debugging, it waits for the device.

    Returns:
        (o, lse): ``o`` itself; lse f32 [total_q, nhead], natural logarithm, -inf for a row that sees no key, or None without
        ``return_lse``.

    Raises:
        InvalidArgument: the caller's mistake; names the argument, what was wanted and what came.
        Unsupported: valid, but not built; says what is.
        PlanMismatch: persistent, and the buffers were made for a smaller batch.
    """
    _refuse_features(nhead_kv, logit_cap, return_logits, g_kv_indptr, cp_world_size, cp_rank)
    flag("return_lse", return_lse)
    cache, num_requests = _check_tensors(q, kv_buffer, o, qo_indptr, page_size)
    device = q.device
    kv_indptr = vector("kv_indptr", kv_indptr, num_requests + 1, device)[: num_requests + 1]
    kv_last_page_lens = vector("kv_last_page_lens", kv_last_page_lens, num_requests, device)[:num_requests]
    kv_indices = vector("kv_indices", kv_indices, 0, device)
    max_seqlen_q = whole("max_seqlen_q", max_seqlen_q, 1)
    max_pages = None if max_pages is None else whole("max_pages", max_pages, 1)
    num_kv_splits = _splits(num_kv_splits, num_kv_splits_indptr, work_meta_data, num_requests, device)
    metadata = {
        "work_meta_data": work_meta_data,
        "work_indptr": work_indptr,
        "work_info_set": work_info_set,
        "reduce_indptr": reduce_indptr,
        "reduce_final_map": reduce_final_map,
        "reduce_partial_map": reduce_partial_map,
    }
    if work_meta_data is not None:
        check_metadata(metadata, num_requests, q.shape[1], max_seqlen_q, device)
    elif given := [name for name, buffer in metadata.items() if buffer is not None]:
        # half of a schedule is a slip: AITER would quietly leave the persistent mode
        raise InvalidArgument("metadata", "work_meta_data", f"given together with {', '.join(given)}", "None")
    if flag("validate", validate):
        check_pages(kv_indptr, kv_indices, kv_last_page_lens, page_size, max_pages)
    table = block_table_of(kv_indptr, kv_indices, kv_last_page_lens, page_size, max_pages)
    with aiter_names():
        _, lse = decode(
            q,
            cache,
            table.block_table,
            table.seq_lens,
            softmax_scale=q.shape[2] ** -0.5 if sm_scale is None else sm_scale,
            cu_seqlens_q=qo_indptr,
            causal=causal,
            kv_lora_rank=o.shape[2],
            q_scale=_scale("q_scale", q_scale, "q", q.dtype),
            kv_scale=_scale("kv_scale", kv_scale, "kv_buffer", kv_buffer.dtype),
            out=o,
            lse=lse,
            backend=backend,
            num_kv_splits=num_kv_splits,
            workspace=workspace,
            max_q_len=max_seqlen_q,
            validate=validate,
        )
    return o, lse if return_lse else None


def _refuse_features(
    nhead_kv: object,
    logit_cap: object,
    return_logits: object,
    g_kv_indptr: object,
    cp_world_size: object,
    cp_rank: object,
) -> None:
    if whole("nhead_kv", nhead_kv, 1) != 1:
        raise Unsupported("nhead_kv", "nhead_kv", "1: all query heads share one latent", str(nhead_kv))
    if isinstance(logit_cap, bool) or not isinstance(logit_cap, (int, float)):
        raise InvalidArgument("logit_cap", "logit_cap", "a number", repr(logit_cap))
    if not logit_cap <= 0:
        raise Unsupported("logit_cap", "logit_cap", "0: scores are not capped", str(logit_cap))
    if flag("return_logits", return_logits):
        wanted = "False: how many partial results there are, and of which keys, is the backend's own affair"
        raise Unsupported("return_logits", "return_logits", wanted, "True")
    world = whole("cp_world_size", cp_world_size, 1)
    instead = "attend to this device's keys with causal=False where a query has one token, and merge_states"
    if world != 1:
        raise Unsupported("context_parallel", "cp_world_size", f"1; instead, {instead}", str(world))
    if g_kv_indptr is not None:
        raise Unsupported("context_parallel", "g_kv_indptr", f"None; instead, {instead}", "global lengths")
    if whole("cp_rank", cp_rank, 0) != 0:
        raise InvalidArgument("cp_rank", "cp_rank", "0, the only rank of cp_world_size 1", str(cp_rank))


def _check_tensors(
    q: torch.Tensor, kv_buffer: torch.Tensor, o: torch.Tensor, qo_indptr: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, int]:
    """The cache [num_page, page_size, head_dim_qk] and the number of requests; the rest of the checks is the decode's."""
    for name, value in (("q", q), ("kv_buffer", kv_buffer), ("o", o)):
        check_type(name, value, torch.Tensor)
    if q.dim() != 3 or o.dim() != 3:
        name, got = ("q", q) if q.dim() != 3 else ("o", o)
        raise InvalidArgument("rank", name, "[total_q, nhead, head_dim]", str(list(got.shape)))
    if o.shape[2] < 1 or o.shape[2] > q.shape[2]:
        wanted = f"[total_q, nhead, kv_lora_rank], of q's {q.shape[2]} numbers a row at most"
        raise InvalidArgument("shape", "o", wanted, str(list(o.shape)))
    if kv_buffer.dtype == torch.uint8:
        wanted = (
            "one row of latent and rotated key a token; the 3-buffer pages of 656 bytes a token are not read"
        )
        raise Unsupported("kv_layout", "kv_buffer", wanted, f"uint8 {list(kv_buffer.shape)}")
    if kv_buffer.dim() != 4:
        wanted = "[num_page, page_size, 1, head_dim_qk]"
        raise InvalidArgument("rank", "kv_buffer", wanted, str(list(kv_buffer.shape)))
    if kv_buffer.shape[2] != 1:
        wanted = "[num_page, page_size, 1, head_dim_qk]: all query heads share one latent"
        raise Unsupported("nhead_kv", "kv_buffer", wanted, str(list(kv_buffer.shape)))
    if whole("page_size", page_size, 1) != kv_buffer.shape[1]:
        wanted = f"{kv_buffer.shape[1]}, the tokens in a page of kv_buffer {list(kv_buffer.shape)}"
        raise InvalidArgument("page_size", "page_size", wanted, str(page_size))
    num_requests = vector("qo_indptr", qo_indptr, 1, q.device).shape[0] - 1
    return kv_buffer.squeeze(2), num_requests


def _splits(
    num_kv_splits: int | None,
    num_kv_splits_indptr: torch.Tensor | None,
    work_meta_data: torch.Tensor | None,
    num_requests: int,
    device: torch.device,
) -> int | None:
    if num_kv_splits_indptr is not None:
        vector("num_kv_splits_indptr", num_kv_splits_indptr, num_requests + 1, device)
    if num_kv_splits is None:
        return None
    if work_meta_data is not None:
        whole("num_kv_splits", num_kv_splits, 0)
        return None
    return whole("num_kv_splits", num_kv_splits, 1)


def _scale(name: str, scale: Scale, holder: str, dtype: torch.dtype) -> Scale:
    if dtype.itemsize > 1:
        return None
    if scale is None:
        wanted = f"a scale for {holder} of {dtype}: a float32 tensor of one element, or a number"
        raise InvalidArgument("scale", name, wanted, "None")
    return scale
