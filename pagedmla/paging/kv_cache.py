"""The paged latent cache: make one, append tokens by slot, gather them back.

A slot is a token's place in the pool: ``page * page_size + offset``.
"""

from __future__ import annotations

import torch

from pagedmla.contract.arguments import check_scale, expect
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.kv_layout import KV_LAYOUTS, KVLayout, layout_of_dtype
from pagedmla.paging import device_kernels
from pagedmla.paging.quantization import quantize


def allocate(
    num_pages: int,
    page_size: int,
    *,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    layout: str = "bf16",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Makes an empty latent cache.

    Args:
        num_pages: pages of the pool; 0 is legal.
        page_size: tokens in a page.
        kv_lora_rank: latent numbers of a token.
        qk_rope_head_dim: rotated key numbers of a token.
        layout: name of an unpacked layout of ``KV_LAYOUTS``.
        device: where it lives.

    Returns:
        [num_pages, page_size, kv_lora_rank + qk_rope_head_dim] of the layout's dtype, zeroed: memory that nobody wrote
        never matters to a decode, but zeros keep it readable in a debugger.

    Raises:
        InvalidArgument: a size that is not a whole number in range, or an unknown layout.
        Unsupported: a packed layout.
    """
    _check_sizes(
        {"num_pages": (num_pages, 0), "page_size": (page_size, 1), "kv_lora_rank": (kv_lora_rank, 1)}
    )
    _check_sizes({"qk_rope_head_dim": (qk_rope_head_dim, 0)})
    if not isinstance(layout, str) or layout not in KV_LAYOUTS:
        raise InvalidArgument("kv_layout", "layout", "one of " + ", ".join(KV_LAYOUTS), repr(layout))
    found = KV_LAYOUTS[layout]
    _refuse_packed(found)
    shape = (num_pages, page_size, kv_lora_rank + qk_rope_head_dim)
    # zeros() knows no fp8 on some devices: the bytes are zeroed instead
    zeros = torch.zeros(shape, dtype=torch.uint8 if found.scaled else found.dtype, device=device)
    return zeros.view(found.dtype)


def append(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    k_pe: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    kv_scale: float | torch.Tensor | None = None,
) -> None:
    """Writes new tokens into their slots, in place.

    Nothing is read from the device on a GPU, where one kernel does it all without a temporary (bf16, fp16 and fp32; other
    dtypes, and devices without a kernel, go through torch operations, to the same bits).  A negative slot is skipped
    (padding), and so is one past the pool, which could only be written out of bounds.  Two tokens for one slot: either may
    win, number by number.

    Args:
        kv_cache: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]; any strides with inner stride 1.
        latent: [num_tokens, kv_lora_rank], floating point; rounded to the cache's dtype.  It shares no memory with kv_cache.
        k_pe: [num_tokens, qk_rope_head_dim], or None where the model has no rotated part.
        slot_mapping: i64 (or i32) [num_tokens], slots in tokens.
        kv_scale: fp8 caches only: the stored number is value / kv_scale (1 when left out); clamped, never NaN by overflow.

    Raises:
        InvalidArgument: a wrong rank, width, length, dtype or device, or a scale for a cache that has none.
        Unsupported: a packed layout.
    """
    layout = check_cache(kv_cache)
    for name, tensor in (("kv_cache", kv_cache), ("latent", latent), ("k_pe", k_pe)):
        if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise Unsupported("training", name, "inference: use torch.no_grad()", "requires_grad=True")
    parts = [("latent", latent)] + ([("k_pe", k_pe)] if k_pe is not None else [])
    num_tokens = _check_new_tokens(kv_cache, parts, slot_mapping)
    scale = _scale_of(layout, kv_scale, kv_cache.device)
    if num_tokens == 0 or kv_cache.numel() == 0:
        return
    kernels = _kernels_for(kv_cache, parts)
    if kernels is not None:
        kernels.append(kv_cache, latent, k_pe, slot_mapping)
        return
    rows = torch.cat([part for _, part in parts], dim=-1) if len(parts) > 1 else latent
    rows = quantize(rows, layout, scale) if layout.scaled else rows.to(layout.dtype)
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    slots = slot_mapping.to(torch.int64)
    owned = (slots >= 0) & (slots < num_slots)
    if _slots_on_host(kv_cache):
        _put(kv_cache, slots[owned], rows[owned])
    else:
        _put(kv_cache, *_redirect_skipped(kv_cache, slots, rows, owned))


def gather(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_scale: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Copies the tokens of all sequences out of their pages, one after another.

    For prefill and for debugging: it reads the lengths on the host, so it does not belong inside a captured graph.

    Args:
        kv_cache: [num_pages, page_size, head_dim_qk].
        block_table: i32 [num_seqs, max_pages]; cells past a sequence's end may hold anything.
        seq_lens: i32 [num_seqs], tokens.
        kv_scale: fp8 caches only, multiplied on read.

    Returns:
        [sum(seq_lens), head_dim_qk], the cache's dtype; float32 for fp8 caches.

    Raises:
        InvalidArgument: wrong ranks, a length past the table's width or below zero, a live page id outside the pool.
        Unsupported: a packed layout.
    """
    layout = check_cache(kv_cache)
    for name, tensor, rank in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32:
            got = str(tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InvalidArgument("dtype", name, "an int32 tensor", got)
        expect(tensor, name, (None,) * rank, (torch.int32,), kv_cache.device)
    if block_table.shape[0] != seq_lens.shape[0]:
        raise InvalidArgument(
            "num_seqs", "seq_lens", f"[{block_table.shape[0]}], as block_table", str(tuple(seq_lens.shape))
        )
    scale = _scale_of(layout, kv_scale, kv_cache.device)
    page_size, capacity = kv_cache.shape[1], block_table.shape[1] * kv_cache.shape[1]
    lengths = seq_lens.tolist()
    for sequence, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise InvalidArgument(
                "seq_len", "seq_lens", f"0..{capacity} tokens", f"{length} for sequence {sequence}"
            )
    # every token's (sequence, position), then its page and offset
    repeats = seq_lens.to(torch.int64)
    total = sum(lengths)
    sequence_of = torch.repeat_interleave(
        torch.arange(len(lengths), device=seq_lens.device), repeats, output_size=total
    )
    first = torch.cumsum(repeats, 0) - repeats
    position = torch.arange(total, device=seq_lens.device) - first[sequence_of]
    pages = block_table.to(torch.int64)[sequence_of, position // page_size]
    if total and not bool(((pages >= 0) & (pages < kv_cache.shape[0])).all()):
        raise InvalidArgument(
            "page", "block_table", f"live page ids in 0..{kv_cache.shape[0] - 1}", "another one"
        )
    rows = _as_storable(kv_cache)[pages, position % page_size].view(kv_cache.dtype)
    return rows.to(torch.float32) * scale if layout.scaled else rows


def check_cache(kv_cache: object) -> KVLayout:
    """The layout of an unpacked cache tensor.

    Raises:
        InvalidArgument: not [num_pages, page_size, head_dim_qk] with inner stride 1 and page_size >= 1.
        Unsupported: a packed layout.
    """
    if not isinstance(kv_cache, torch.Tensor):
        raise InvalidArgument("type", "kv_cache", "a tensor", type(kv_cache).__name__)
    layout = layout_of_dtype(kv_cache.dtype)
    _refuse_packed(layout)
    if kv_cache.dim() != 3:
        raise InvalidArgument(
            "rank", "kv_cache", "[num_pages, page_size, head_dim_qk]", str(tuple(kv_cache.shape))
        )
    if kv_cache.shape[1] < 1 or (kv_cache.numel() and kv_cache.stride(2) != 1):
        got = f"shape {tuple(kv_cache.shape)}, strides {kv_cache.stride()}"
        raise InvalidArgument("stride", "kv_cache", "page_size >= 1 and inner stride 1", got)
    return layout


def _check_sizes(sizes: dict[str, tuple[int, int]]) -> None:
    for name, (value, minimum) in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InvalidArgument(name, name, f"a whole number >= {minimum}", repr(value))


def _refuse_packed(layout: KVLayout) -> None:
    if layout.packed_bytes_per_token is not None:
        unpacked = ", ".join(
            name for name, other in KV_LAYOUTS.items() if other.packed_bytes_per_token is None
        )
        raise Unsupported("kv_layout", "kv_cache", f"an unpacked layout ({unpacked})", layout.name)


def _check_new_tokens(
    kv_cache: torch.Tensor, parts: list[tuple[str, torch.Tensor]], slot_mapping: torch.Tensor
) -> int:
    for name, tensor in [*parts, ("slot_mapping", slot_mapping)]:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument("type", name, "a tensor", type(tensor).__name__)
    num_tokens = slot_mapping.shape[0] if slot_mapping.dim() == 1 else -1
    if num_tokens < 0 or slot_mapping.dtype not in (torch.int64, torch.int32):
        got = f"{slot_mapping.dtype} {tuple(slot_mapping.shape)}"
        raise InvalidArgument("slot_mapping", "slot_mapping", "an int64 [num_tokens] tensor", got)
    for name, part in parts:
        if part.dim() != 2 or part.shape[0] != num_tokens or not part.is_floating_point():
            got = f"{part.dtype} {tuple(part.shape)}"
            raise InvalidArgument("new_tokens", name, f"a floating-point [{num_tokens}, width] tensor", got)
    for name, tensor in [*parts, ("slot_mapping", slot_mapping)]:
        if tensor.device != kv_cache.device:
            raise InvalidArgument(
                "device", name, f"a tensor on {kv_cache.device}, as kv_cache", str(tensor.device)
            )
    width = sum(part.shape[1] for _, part in parts)
    if width != kv_cache.shape[2]:
        wanted = f"widths that sum to head_dim_qk = {kv_cache.shape[2]}"
        raise InvalidArgument("head_dim", " and ".join(name for name, _ in parts), wanted, str(width))
    return num_tokens


def _scale_of(
    layout: KVLayout, kv_scale: float | torch.Tensor | None, device: torch.device
) -> torch.Tensor | float:
    if kv_scale is None:
        return 1.0
    if not layout.scaled:
        raise InvalidArgument("scale", "kv_scale", f"None for a {layout.name} cache", "a scale")
    check_scale("kv_scale", kv_scale, device)
    return kv_scale.reshape(()) if isinstance(kv_scale, torch.Tensor) else float(kv_scale)


def _kernels_for(
    kv_cache: torch.Tensor, parts: list[tuple[str, torch.Tensor]]
) -> device_kernels.PagingKernels | None:
    if any(tensor.dtype not in device_kernels.APPEND_DTYPES for tensor in (kv_cache, *(p for _, p in parts))):
        return None
    return device_kernels.kernels_for(kv_cache.device)


def _slots_on_host(kv_cache: torch.Tensor) -> bool:
    # choosing rows by a mask asks how many there are, which waits for any other device
    return kv_cache.device.type == "cpu"


def _as_storable(tensor: torch.Tensor) -> torch.Tensor:
    # indexing knows no fp8 on most devices; bytes are moved instead
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _put(kv_cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    page_size = kv_cache.shape[1]
    _as_storable(kv_cache).index_put_((slots // page_size, slots % page_size), _as_storable(rows))


def _redirect_skipped(
    kv_cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, owned: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and rows without skipped tokens, made without asking the device how many there are.

    A skipped token becomes a second copy of the first owned one (the same value to the same slot), or, when none is owned,
    rewrites slot 0 with what it holds.
    """
    first = owned.to(torch.int8).argmax().reshape(1)
    some = owned.any()
    storable = _as_storable(rows)
    present = _as_storable(kv_cache)[0, 0]
    fill_row = torch.where(some, storable[first][0], present)
    fill_slot = torch.where(some, slots[first], torch.zeros_like(first))
    redirected = torch.where(owned[:, None], storable, fill_row)
    return torch.where(owned, slots, fill_slot), redirected.view(rows.dtype)
