# mypy: allow-untyped-defs, allow-incomplete-defs
# (a kernel's arguments have no Python type)
"""The memory limit of a paged batch: its pages brought to shared memory by Hopper's copy engine, and nothing else.

A decode reads the same pages in the same order, so no kernel that reads each page once can be faster where memory binds.
Reading through registers is no limit: on one H200 ``torch.sum`` reaches 4.3 TB/s and this 4.6.

Gluon (Triton 3.6), sm_90, pages of 64 tokens of 512 + 64 numbers of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagedmla.bench.shapes import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM

PAGE_SIZE = 64
"""Tokens; a page is one tile."""
STAGES = 3
"""Tiles in flight: 3 x 72 KiB of the 227 KiB of an SM.  Two already read at the full rate."""

PAGE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _request(
    latent, rope, table, tile, end, num_tiles, latent_ring, rope_ring, full, slot, TOKENS: gl.constexpr
):
    """Starts the copy of page ``table[tile]`` into ring slot ``slot``; nothing when ``tile`` is not before ``end``."""
    inside = tile < end
    # a coordinate in tokens: 32 bits reach 2 ** 31 tokens, 2.4 TB
    first_token = gl.load(table + gl.minimum(tile, num_tiles - 1)) * TOKENS
    num_bytes: gl.constexpr = latent.block_type.nbytes + rope.block_type.nbytes
    mbarrier.expect(full.index(slot), num_bytes, pred=inside)
    tma.async_copy_global_to_shared(
        latent, [first_token, 0], full.index(slot), latent_ring.index(slot), pred=inside
    )
    tma.async_copy_global_to_shared(
        rope, [first_token, latent.block_shape[1]], full.index(slot), rope_ring.index(slot), pred=inside
    )


@gluon.jit
def read_pages_kernel(latent, rope, table, tiles_read, num_tiles, STAGES: gl.constexpr):
    """Each program reads an equal run of the table's pages through a ring of STAGES slots.

    latent, rope: descriptors of the flat cache [tokens, 576] with blocks [64, 512] and [64, 64].
    table: i32 [num_tiles], physical pages, each inside the cache.
    tiles_read: i32 [programs], written, so that the reading can be counted.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    begin = (program * num_tiles) // programs
    end = ((program + 1) * num_tiles) // programs
    TOKENS: gl.constexpr = latent.block_shape[0]
    latent_ring = gl.allocate_shared_memory(
        latent.dtype, [STAGES, TOKENS, latent.block_shape[1]], latent.layout
    )
    rope_ring = gl.allocate_shared_memory(rope.dtype, [STAGES, TOKENS, rope.block_shape[1]], rope.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for first in gl.static_range(STAGES):
        mbarrier.init(full.index(first), count=1)
    for first in gl.static_range(STAGES):
        _request(
            latent, rope, table, begin + first, end, num_tiles, latent_ring, rope_ring, full, first, TOKENS
        )
    for tile in range(begin, end):
        turn = tile - begin
        slot = turn % STAGES
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        # every warp must have seen this phase end before the next one begins
        gl.thread_barrier()
        _request(
            latent, rope, table, tile + STAGES, end, num_tiles, latent_ring, rope_ring, full, slot, TOKENS
        )
    gl.store(tiles_read + program, end - begin)


def page_reader(kv_cache: Tensor, pages: Tensor) -> Callable[[], Tensor]:
    """A step that reads ``pages`` once.

    Args:
        kv_cache: [num_pages, 64, 576], 16-bit, contiguous, on an sm_90 device.
        pages: i32 [n], physical pages in reading order.

    Returns:
        A callable that returns i32 [programs], the pages that each program read.
    """
    # the copy engine moves bits: fp16 is read as bf16
    flat = kv_cache.view(torch.bfloat16).view(-1, HEAD_DIM_QK)
    latent, rope = (
        TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [PAGE_SIZE, width], PAGE_LAYOUT)
        for width in (KV_LORA_RANK, QK_ROPE_HEAD_DIM)
    )
    num_tiles = pages.numel()
    compute_units = torch.cuda.get_device_properties(kv_cache.device).multi_processor_count
    programs = min(compute_units, num_tiles)
    tiles_read = torch.zeros(programs, dtype=torch.int32, device=kv_cache.device)

    def read() -> Tensor:
        read_pages_kernel[(programs,)](latent, rope, pages, tiles_read, num_tiles, STAGES=STAGES, num_warps=4)
        return tiles_read

    return read
