"""New tokens into their slots: one launch that reads latent and k_pe where they are, rounds, and writes both into the cache.

One program a token.  A row of 512 + 64 numbers is about 1 KB, so a program is small and there are many of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# numbers of a row that a program handles at a time: the whole latent of the common models
_MAX_BLOCK = 512


@triton.jit
def to_dtype(value, dtype: tl.constexpr):
    """``value`` (bf16, fp16 or f32) in ``dtype`` (one of the same), to the nearest, ties to even; a NaN stays one.

    bf16 goes by its bits: the upper half of an f32.  That is what the hardware's conversion gives, subnormals included, and
    Triton's interpreter, where these kernels are tested on machines without a GPU, truncates instead.
    """
    if value.dtype == dtype:
        return value
    if value.dtype == tl.bfloat16:
        upper = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return to_dtype(upper.to(tl.float32, bitcast=True), dtype)
    if dtype == tl.bfloat16:
        wide = value.to(tl.float32)
        bits = wide.to(tl.int32, bitcast=True)
        # half a step less one, and one more where the last kept bit is set
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # rounding could carry a NaN with a short payload into infinity: its quiet bit is set instead
        rounded = tl.where(wide != wide, (bits >> 16) | 0x40, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def _copy_numbers(source, source_stride, target, count, BLOCK: tl.constexpr):
    # while, here and in the other kernels: Triton's interpreter cannot take a range's bounds from arguments under numpy 2.4
    first = 0
    while first < count:
        column = first + tl.arange(0, BLOCK)
        inside = column < count
        value = tl.load(source + column.to(tl.int64) * source_stride, mask=inside, other=0.0)
        tl.store(target + column, to_dtype(value, target.dtype.element_ty), mask=inside)
        first += BLOCK


@triton.jit(do_not_specialize=("num_slots", "page_size", "slot_stride"))
def append_kernel(
    kv_cache,
    latent,
    k_pe,
    slot_mapping,
    num_slots: tl.int64,
    page_size,
    kv_page_stride: tl.int64,
    kv_token_stride: tl.int64,
    latent_token_stride: tl.int64,
    latent_stride: tl.int64,
    k_pe_token_stride: tl.int64,
    k_pe_stride: tl.int64,
    slot_stride: tl.int64,
    kv_lora_rank,
    qk_rope_head_dim,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """Grid (num_tokens,).  A slot outside 0 .. num_slots - 1 is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_stride).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        row = kv_cache + (slot // page_size) * kv_page_stride + (slot % page_size) * kv_token_stride
        _copy_numbers(latent + token * latent_token_stride, latent_stride, row, kv_lora_rank, BLOCK_LATENT)
        _copy_numbers(
            k_pe + token * k_pe_token_stride, k_pe_stride, row + kv_lora_rank, qk_rope_head_dim, BLOCK_ROPE
        )


def append(
    kv_cache: torch.Tensor, latent: torch.Tensor, k_pe: torch.Tensor | None, slot_mapping: torch.Tensor
) -> None:
    """Writes new tokens into their slots.  No allocation, no sync; the arguments are taken as checked.

    Args:
        kv_cache: bf16, fp16 or f32 [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]; any strides with inner stride 1.
        latent: bf16, fp16 or f32 [num_tokens, kv_lora_rank], any strides; no memory shared with ``kv_cache``.
        k_pe: the same [num_tokens, qk_rope_head_dim], of a dtype of its own, or None.
        slot_mapping: i64 or i32 [num_tokens], slots in tokens; one outside the pool is skipped.
    """
    num_tokens, kv_lora_rank = latent.shape
    num_pages, page_size, _ = kv_cache.shape
    if num_tokens == 0 or kv_cache.numel() == 0:
        return
    rope = latent[:, :0] if k_pe is None else k_pe
    with torch.cuda.device_of(kv_cache):
        append_kernel[(num_tokens,)](
            kv_cache,
            latent,
            rope,
            slot_mapping,
            num_pages * page_size,
            page_size,
            kv_cache.stride(0),
            kv_cache.stride(1),
            latent.stride(0),
            latent.stride(1),
            rope.stride(0),
            rope.stride(1),
            slot_mapping.stride(0),
            kv_lora_rank,
            rope.shape[1],
            BLOCK_LATENT=_block(kv_lora_rank),
            BLOCK_ROPE=_block(rope.shape[1]),
            # half a wave's worth of loads for every lane of a 512-number row
            num_warps=2,
        )


def _block(count: int) -> int:
    return min(_MAX_BLOCK, max(16, triton.next_power_of_2(count)))
