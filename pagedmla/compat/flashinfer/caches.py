"""Two cache tensors as one: in place where they are columns of one cache, else a copy of the batch's pages; and their scale."""

from __future__ import annotations

import torch

from pagedmla.contract.arguments import check_scale_number
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.kv_layout import KVLayout


def as_one(ckv_cache: torch.Tensor, kpe_cache: torch.Tensor) -> torch.Tensor | None:
    """[latent | rope] in place, where both are the columns of the same rows of one storage, side by side; else None.

    Args:
        ckv_cache, kpe_cache: [num_pages, page_size, head_dim_ckv] and [num_pages, page_size, head_dim_kpe] of one dtype.
    """
    *sizes, latent = ckv_cache.shape
    rope = kpe_cache.shape[2]
    if rope == 0:
        return ckv_cache
    steps, kpe_steps = ckv_cache.stride(), kpe_cache.stride()
    # an axis of one element has a stride that addresses nothing
    apart = any(
        size > 1 and step != other for size, step, other in zip(sizes, steps, kpe_steps, strict=False)
    )
    if apart or (latent > 1 and steps[2] != 1) or kpe_steps[2] != 1:
        return None
    if ckv_cache.untyped_storage().data_ptr() != kpe_cache.untyped_storage().data_ptr():
        return None
    if kpe_cache.storage_offset() != ckv_cache.storage_offset() + latent:
        return None
    return ckv_cache.as_strided((*sizes, latent + rope), (*steps[:2], 1), ckv_cache.storage_offset())


def packing(
    block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, num_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the batch's pages, one sequence after another, and the block table once they are packed in that order.

    Args:
        block_table: i32 [batch_size, width], page ids.
        seq_lens: i32 [batch_size], tokens.
        page_size: tokens in a page.
        num_pages: pages that the lengths need, in all; reading it off ``seq_lens`` would wait for the device.

    Returns:
        i32 [num_pages] and i32 [batch_size, width].
    """
    device = block_table.device
    counts = (seq_lens.long() + (page_size - 1)) // page_size
    starts = counts.cumsum(0) - counts
    sequence = torch.arange(len(counts), device=device).repeat_interleave(counts, output_size=num_pages)
    column = torch.arange(num_pages, device=device) - starts[sequence]
    table = starts[:, None] + torch.arange(block_table.shape[1], device=device)
    return block_table[sequence, column], table.to(torch.int32)


def pack(pages: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor) -> torch.Tensor:
    """The pages as a cache of their own, [len(pages), page_size, head_dim_ckv + head_dim_kpe].

    Args:
        pages: i32 [any], page ids; one outside the pool becomes some page inside.
        ckv_cache, kpe_cache: [num_pages, page_size, head_dim_ckv] and [num_pages, page_size, head_dim_kpe] of one dtype;
            with no page at all the result has none either.

    Raises:
        Unsupported: a gradient is wanted of a cache.
    """
    if torch.is_grad_enabled() and (ckv_cache.requires_grad or kpe_cache.requires_grad):
        wanted = "inference: no gradient is defined; use torch.no_grad()"
        raise Unsupported("training", "ckv_cache and kpe_cache", wanted, "requires_grad=True")
    num_pages, page_size, latent = ckv_cache.shape
    if num_pages == 0:
        # as with any pool, ids outside are not followed
        return torch.cat((ckv_cache, kpe_cache), dim=2)
    packed = torch.empty(
        len(pages), page_size, latent + kpe_cache.shape[2], dtype=ckv_cache.dtype, device=pages.device
    )
    # an id outside the pool spoils its own sequence's rows, and leads to no read outside
    pages = pages.clamp(0, num_pages - 1)
    for part, columns in ((ckv_cache, packed[..., :latent]), (kpe_cache, packed[..., latent:])):
        # rows of fp8 numbers cannot be selected on every device, bytes can
        if part.dtype.itemsize == 1:
            part, columns = part.view(torch.uint8), columns.view(torch.uint8)
        torch.index_select(part, 0, pages, out=columns)
    return packed


def one_scale(layout: KVLayout, ckv_scale: float | None, kpe_scale: float | None) -> float | None:
    """What both parts of an fp8 cache are multiplied by on read; None for other caches.

    Raises:
        InvalidArgument: a scale that is missing, no number or out of range; one for a cache without scales.
        Unsupported: two scales.
    """
    for name, scale in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
        # no tensor: comparing it would wait for the device
        if layout.scaled and not isinstance(scale, (int, float)):
            wanted = f"a number for a cache of {layout.dtype}"
            raise InvalidArgument("scale", name, wanted, type(scale).__name__)
        if not layout.scaled and scale is not None:
            raise InvalidArgument("scale", name, f"None for a cache of {layout.dtype}", "a scale")
    if not layout.scaled:
        return None
    one = check_scale_number("ckv_scale", ckv_scale)
    if kpe_scale != ckv_scale:
        wanted = f"ckv_scale's {ckv_scale!r}: one cache has one scale"
        raise Unsupported("scale", "kpe_scale", wanted, repr(kpe_scale))
    return one
