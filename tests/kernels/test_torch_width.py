"""WIDTH: offsets past 2^31 and 2^32.  The pools are address space: only the pages in use are ever touched.

Where a wrapped offset would land inside the pool, a decoy page of other finite data lies there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import KV_SCALE, Batch, arguments, check, make_batch, run, same_bits
from torch import Tensor

from pagedmla.conformance.inputs import store

pytestmark = pytest.mark.large

POOL_BYTES = 4_500_000_000
HEAD_DIM, PAGE = 576, 480
PAGE_NUMBERS = PAGE * HEAD_DIM
LENGTHS = (3, PAGE + 1, 0, 127)


@pytest.fixture(scope="module")
def reserved() -> Tensor:
    """4.5 GB of address space as bytes; memory is committed only where it is written."""
    return torch.empty(POOL_BYTES, dtype=torch.uint8)


def _batch(kv_dtype: torch.dtype) -> Batch:
    return make_batch(LENGTHS, num_heads=4, dims=(512, 64), q_dtype=torch.bfloat16, kv_dtype=kv_dtype)


def _decoys(pool: Tensor, pages: list[int]) -> None:
    """Ordinary data where 32-bit arithmetic on elements or bytes, signed or not, would look for ``pages``."""
    generator = torch.Generator().manual_seed(3)
    flat = pool.view(-1) if pool.is_contiguous() else None
    for page in pages:
        for width in (1, pool.dtype.itemsize):
            offset = page * pool.stride(0) * width
            for wrapped in (offset % 2**32, offset % 2**31):
                start = wrapped // width
                if (
                    flat is not None
                    and start != page * pool.stride(0)
                    and start + PAGE_NUMBERS <= flat.numel()
                ):
                    values = torch.randn(PAGE_NUMBERS, generator=generator)
                    flat[start : start + PAGE_NUMBERS] = store(values, pool.dtype, KV_SCALE)


def _move(call: dict[str, Any], pool: Tensor, pages: list[int]) -> dict[str, Any]:
    """The same batch with its pages at ``pages`` of ``pool``."""
    _decoys(pool, pages)
    lens, table = call["seq_lens"].tolist(), torch.full_like(call["block_table"], -1)
    places = iter(pages)
    for sequence, length in enumerate(lens):
        for column in range(-(-length // PAGE)):
            page = next(places)
            pool[page] = call["kv_cache"][call["block_table"][sequence, column]]
            table[sequence, column] = page
    return call | {"kv_cache": pool, "block_table": table}


@pytest.mark.parametrize(
    ("dtype", "first"),
    [
        # just below, across and above 2^31 elements; bfloat16 passes 2^32 bytes at the same page
        (torch.bfloat16, 7764),
        (torch.bfloat16, 7767),
        (torch.bfloat16, 7768),
        (torch.bfloat16, POOL_BYTES // 2 // PAGE_NUMBERS - 4),
        # 2^31 bytes and elements, then 2^32
        (torch.float8_e4m3fn, 7766),
        (torch.float8_e4m3fn, 7768),
        (torch.float8_e4m3fn, 15533),
        (torch.float8_e4m3fn, 15535),
        (torch.float8_e4m3fnuz, POOL_BYTES // PAGE_NUMBERS - 4),
    ],
)
def test_high_pages_give_the_bits_of_low_pages(reserved: Tensor, dtype: torch.dtype, first: int) -> None:
    call = arguments(_batch(dtype), PAGE)
    pages = POOL_BYTES // dtype.itemsize // PAGE_NUMBERS
    pool = reserved.view(dtype)[: pages * PAGE_NUMBERS].view(pages, PAGE, HEAD_DIM)
    high = _move(call, pool, [first, first + 3, first + 1, first + 2])
    low = run(call)
    check(low, call)
    assert same_bits(low, run(high))


def test_one_token_pages_far_out(reserved: Tensor) -> None:
    """Page ids themselves in the millions: 3.9 M pages of one token."""
    batch = make_batch([5, 1], num_heads=4, dims=(512, 64))
    call = arguments(batch, 1)
    pages = POOL_BYTES // 2 // HEAD_DIM
    pool = reserved.view(torch.bfloat16)[: pages * HEAD_DIM].view(pages, 1, HEAD_DIM)
    table = torch.full_like(call["block_table"], -1)
    ids = iter([3_728_269, pages - 1, 3_728_270, 3_728_271, 7, 3_900_000])
    for sequence, length in enumerate((5, 1)):
        for column in range(length):
            page = next(ids)
            pool[page] = call["kv_cache"][call["block_table"][sequence, column]]
            table[sequence, column] = page
    assert same_bits(run(call), run(call | {"kv_cache": pool, "block_table": table}))


def test_a_page_stride_past_two_to_the_thirtyone(reserved: Tensor) -> None:
    """Three pages, each 2^30 elements from the next: a layer's slice of a pool shared by many layers."""
    batch = make_batch([40, 20], num_heads=4, dims=(512, 64))
    call = arguments(batch, 32, spare_pages=0)
    stride = 2**30 + 8
    pool = reserved.view(torch.bfloat16).as_strided((3, 32, HEAD_DIM), (stride, HEAD_DIM, 1))
    pool.copy_(call["kv_cache"])
    assert 2 * stride > 2**31
    assert same_bits(run(call), run(call | {"kv_cache": pool}))


def test_a_query_stride_past_two_to_the_thirtyone(reserved: Tensor) -> None:
    batch = make_batch([40, 20, 3], num_heads=4, dims=(512, 64))
    call = arguments(batch, 32)
    q = reserved.view(torch.bfloat16).as_strided((3, 4, HEAD_DIM), (2**30 + 16, HEAD_DIM, 1))
    q.copy_(call["q"])
    assert same_bits(run(call), run(call | {"q": q}))
