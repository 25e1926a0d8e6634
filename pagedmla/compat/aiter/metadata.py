"""``get_mla_metadata_info_v1`` and ``get_mla_metadata_v1``: AITER's six buffers of the persistent mode.

Our own kernels plan for themselves and read none of them.  They are filled with a right schedule all the same, for whoever runs
other kernels by it; what stands in them is said in ``schedule``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagedmla.compat.aiter.checks import flag, matrix, tensor, vector, whole
from pagedmla.compat.aiter.schedule import ScheduleSizes, make_schedule, query_tile
from pagedmla.contract.errors import InvalidArgument, PlanMismatch, Unsupported
from pagedmla.contract.target import Target

MLA_V32 = 0
"""AITER's number for the one cache row of latent and rotated key; 1 is its V4 layout."""

SizedBuffer = tuple[int | tuple[int, ...], torch.dtype]


def get_mla_metadata_info_v1(
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    is_sparse: bool,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
    max_split_per_batch: int = -1,
    *,
    device: torch.device | str | None = None,
) -> tuple[SizedBuffer, SizedBuffer, SizedBuffer, SizedBuffer, SizedBuffer, SizedBuffer]:
    """Shape and dtype of the six buffers that ``get_mla_metadata_v1`` fills, for batches up to ``batch_size``.

    The order is AITER's: work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map.
    (``get_mla_metadata_v1`` takes work_info_set before work_indptr.)  A vector's shape is a number, as in AITER.

    Args:
        batch_size: requests of the largest batch.
        max_seqlen_qo: most query tokens of a request.
        num_head_qo: query heads, any number >= 1.
        q_dtype, kv_dtype, fast_mode, num_kv_splits, intra_batch_mode, max_split_per_batch: choose among AITER's planners and
            tiles.  There is one planner here, and its sizes depend on none of them.
        is_sparse: must be False.
        device: whose compute units are the workers; left out: the current CUDA device, or the CPU where there is none.

    Raises:
        InvalidArgument: a number below 1.
        Unsupported: ``is_sparse``.
    """
    if flag("is_sparse", is_sparse):
        raise _no_sparse("is_sparse", "True")
    batch_size = whole("batch_size", batch_size, 0)
    tiles = _tiles_per_request(whole("num_head_qo", num_head_qo, 1), whole("max_seqlen_qo", max_seqlen_qo, 1))
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    num_workers = Target.detect(device).compute_units
    sizes = ScheduleSizes.of(batch_size, tiles, num_workers)
    return (
        (2, torch.uint64),
        (num_workers + 1, torch.int32),
        ((sizes.works, 8), torch.int32),
        (sizes.tiles + 1, torch.int32),
        ((sizes.tiles, 2), torch.int32),
        (sizes.partials, torch.int32),
    )


def get_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    is_cp_round_robin: bool = False,
    mla_version: int = MLA_V32,
    dtype_q_nope: torch.dtype | None = None,
    dtype_q_rope: torch.dtype | None = None,
    dtype_kv_nope: torch.dtype | None = None,
    dtype_kv_rope: torch.dtype | None = None,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
) -> None:
    """Fills the six buffers with a schedule for these lengths, whole buffers, in stream order, without reading the device.

    Args:
        seqlens_qo_indptr: i32 [num_requests + 1], query tokens.
        seqlens_kv_indptr: i32 [num_requests + 1], PAGES.
        kv_last_page_lens: i32 [num_requests], TOKENS in the last page; bounded to 1..page_size on the device.
        num_heads_per_head_k: query heads, any number >= 1.
        num_heads_k: must be 1.
        is_causal: a tile of query tokens leaves out the pages that none of its tokens sees.
        work_metadata_ptrs: u64 [2], written: the addresses of work_indptr and work_info_set.
        work_info_set: i32 [works, 8], written, contiguous.
        work_indptr: i32 [num_workers + 1], written, contiguous; its length says how many workers share the work.
        reduce_indptr, reduce_final_map, reduce_partial_map: i32 [tiles + 1], [tiles, 2] and [partials], written.
        page_size: tokens in a page, any number >= 1.
        kv_granularity: PAGES; a request is cut at multiples of it.
        max_seqlen_qo: most query tokens of a request; a request's tokens past it are in no work.  -1: not known; then a request
            is one tile, however many it has.
        uni_seqlen_qo: the same, where all requests have as many; used where max_seqlen_qo is -1.
        max_split_per_batch: as in AITER no cap on a request but a budget for the batch: this times the requests is how many
            workers get work at most.  -1: all of them.
        fast_mode, intra_batch_mode, dtype_*: choose among AITER's planners and tiles; here nothing depends on them.
        topk, is_cp_round_robin, mla_version: must be -1, False and 0.

    Raises:
        InvalidArgument: a number out of range, or a tensor of a wrong rank, dtype or device, or too small for the batch.
        Unsupported: several key heads, sparse attention, context parallelism, the V4 layout.
    """
    _refuse(num_heads_k, topk, is_cp_round_robin, mla_version)
    for name, value in (("fast_mode", fast_mode), ("intra_batch_mode", intra_batch_mode)):
        flag(name, value)
    num_heads = whole("num_heads_per_head_k", num_heads_per_head_k, 1)
    num_requests, device = _check_lengths(seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens)
    most_query_tokens = _known(max_seqlen_qo, "max_seqlen_qo") or _known(uni_seqlen_qo, "uni_seqlen_qo")
    tiles = 1 if most_query_tokens is None else _tiles_per_request(num_heads, most_query_tokens)
    buffers = {
        "work_metadata_ptrs": work_metadata_ptrs,
        "work_indptr": work_indptr,
        "work_info_set": work_info_set,
        "reduce_indptr": reduce_indptr,
        "reduce_final_map": reduce_final_map,
        "reduce_partial_map": reduce_partial_map,
    }
    _check_buffers(buffers, num_requests, tiles, device)
    for name in ("work_indptr", "work_info_set"):
        if not buffers[name].is_contiguous():
            got = f"strides {tuple(buffers[name].stride())}"
            raise InvalidArgument("stride", name, "a contiguous tensor: its address is handed out", got)
    page_size, kv_granularity = whole("page_size", page_size, 1), whole("kv_granularity", kv_granularity, 1)
    causal = flag("is_causal", is_causal)
    budget = _known(max_split_per_batch, "max_split_per_batch")

    addresses = work_metadata_ptrs.view(torch.int64)
    # a number that a kernel is launched with; a copy from the host would not be captured in a graph
    addresses[0].fill_(work_indptr.data_ptr())
    addresses[1].fill_(work_info_set.data_ptr())
    if num_requests == 0:
        for buffer in (work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map):
            buffer.zero_()
        return
    schedule = make_schedule(
        seqlens_qo_indptr,
        seqlens_kv_indptr[: num_requests + 1],
        kv_last_page_lens[:num_requests],
        page_size=page_size,
        causal=causal,
        tile_tokens=None if most_query_tokens is None else query_tile(num_heads),
        tiles_per_request=tiles,
        kv_granularity=kv_granularity,
        num_workers=work_indptr.shape[0] - 1,
        most_workers=None if budget is None else budget * num_requests,
    )
    work_indptr.copy_(schedule.work_indptr)
    _write(work_info_set, schedule.work_info, 0)
    _write(reduce_indptr, schedule.reduce_indptr, schedule.reduce_indptr[-1])
    _write(reduce_final_map, schedule.reduce_final_map, 0)
    _write(reduce_partial_map, schedule.reduce_partial_map, -1)


def check_metadata(
    buffers: Mapping[str, object], num_requests: int, num_heads: int, max_seqlen_q: int, device: torch.device
) -> None:
    """Checks that ``buffers`` could hold the metadata of a call; what stands in them is not looked at.

    Args:
        buffers: the six by the caller's names for them, in the order of ``get_mla_metadata_info_v1``.

    Raises:
        InvalidArgument: one is missing, or has a wrong rank, dtype or device.
        PlanMismatch: one is too small for so many requests, heads and query tokens.
    """
    try:
        _check_buffers(buffers, num_requests, _tiles_per_request(num_heads, max_seqlen_q), device)
    except InvalidArgument as error:
        if error.code != "shape":
            raise
        wanted = (
            f"{error.wanted}, for {num_requests} requests, {num_heads} heads, max_seqlen_q {max_seqlen_q}"
        )
        raise PlanMismatch("metadata", error.argument, wanted, error.got) from None


def _tiles_per_request(num_heads: int, most_query_tokens: int) -> int:
    return -(-most_query_tokens // query_tile(num_heads))


def _known(value: object, name: str) -> int | None:
    """A number >= 1; None for what AITER's callers give where they know none: anything below 1."""
    number = whole(name, value, -(2**31))
    return number if number >= 1 else None


def _check_lengths(
    seqlens_qo_indptr: object, seqlens_kv_indptr: object, kv_last_page_lens: object
) -> tuple[int, torch.device]:
    starts = vector("seqlens_qo_indptr", seqlens_qo_indptr, 1, None)
    num_requests = starts.shape[0] - 1
    vector("seqlens_kv_indptr", seqlens_kv_indptr, num_requests + 1, starts.device)
    vector("kv_last_page_lens", kv_last_page_lens, num_requests, starts.device)
    return num_requests, starts.device


def _check_buffers(
    buffers: Mapping[str, object], num_requests: int, tiles_per_request: int, device: torch.device
) -> None:
    pointers, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map = (
        buffers.items()
    )
    addresses = tensor(*pointers, 1, (torch.uint64,), device)
    if addresses.shape[0] != 2:
        raise InvalidArgument("shape", pointers[0], "[2]", str(list(addresses.shape)))
    num_workers = vector(*work_indptr, 2, device).shape[0] - 1
    sizes = ScheduleSizes.of(num_requests, tiles_per_request, num_workers)
    matrix(*work_info_set, sizes.works, 8, device)
    vector(*reduce_indptr, sizes.tiles + 1, device)
    matrix(*reduce_final_map, sizes.tiles, 2, device)
    vector(*reduce_partial_map, sizes.partials, device)


def _refuse(num_heads_k: object, topk: object, is_cp_round_robin: object, mla_version: object) -> None:
    if whole("num_heads_k", num_heads_k, 1) != 1:
        raise Unsupported(
            "num_heads_k", "num_heads_k", "1: all query heads share one latent", str(num_heads_k)
        )
    if whole("topk", topk, -(2**31)) >= 0:
        raise _no_sparse("topk", str(topk))
    if flag("is_cp_round_robin", is_cp_round_robin):
        wanted = "False: no kernel here masks by the position in a sequence that other devices share"
        raise Unsupported("context_parallel", "is_cp_round_robin", wanted, "True")
    if whole("mla_version", mla_version, 0) != MLA_V32:
        wanted = f"{MLA_V32} (V32): a cached token is one row of latent and rotated key"
        raise Unsupported("mla_version", "mla_version", wanted, str(mla_version))


def _no_sparse(name: str, got: str) -> Unsupported:
    return Unsupported("sparse", name, "dense attention: no choice of keys is built", got)


def _write(buffer: torch.Tensor, values: torch.Tensor, rest: int | torch.Tensor) -> None:
    """Copies ``values`` into the front of ``buffer``, and ``rest`` behind them: nothing stale is left."""
    buffer[: values.shape[0]].copy_(values)
    buffer[values.shape[0] :].fill_(rest)
