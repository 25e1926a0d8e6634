"""WIDTH: offsets past 2^31 and 2^32 on a card.  The pool is full of finite numbers, so that a wrapped address reads decoys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batches import same_bits
from torch import Tensor
from triton_backend import MODES, ON_CARD, PERSISTENT, SPLITS, arguments, checked, make_batch, run

from pagedmla.paging.kv_cache import append

pytestmark = pytest.mark.skipif(not ON_CARD, reason="needs a CUDA device")

POOL_BYTES = 6_600_000_000
HEAD_DIM, PAGE = 576, 64
PAGE_NUMBERS = PAGE * HEAD_DIM
REAL = {"dims": (512, 64), "q_dtype": torch.bfloat16, "num_heads": 16}
PAGES = POOL_BYTES // 2 // PAGE_NUMBERS


@pytest.fixture(scope="module")
def pool() -> Iterator[Tensor]:
    """bf16, 6.6 GB of finite decoys."""
    numbers = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    for part in numbers.split(2**29):
        part.normal_()
    yield numbers
    del numbers
    torch.cuda.empty_cache()


def _move(call: dict[str, Any], pool: Tensor, pages: list[int]) -> dict[str, Any]:
    """The same batch with its pages at ``pages`` of ``pool``."""
    size = call["kv_cache"].shape[1]
    lens, table = call["seq_lens"].tolist(), torch.full_like(call["block_table"], -1)
    places = iter(pages)
    for sequence, length in enumerate(lens):
        for column in range(-(-length // size)):
            page = next(places)
            pool[page] = call["kv_cache"][call["block_table"][sequence, column]]
            table[sequence, column] = page
    return call | {"kv_cache": pool, "block_table": table}


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(
    "first",
    [
        2**31 // 2 // PAGE_NUMBERS - 1,  # across 2^31 bytes
        2**31 // PAGE_NUMBERS - 1,  # across 2^31 elements, which are 2^32 bytes
        2**31 // PAGE_NUMBERS + 1,
        PAGES - 4,
    ],
)
def test_high_pages_give_the_bits_of_low_pages(pool: Tensor, first: int, mode: dict[str, Any]) -> None:
    call = arguments(make_batch([3, PAGE + 1, 0, 40], [1, 2, 1, 1], **REAL), PAGE)
    pages = pool[: PAGES * PAGE_NUMBERS].view(PAGES, PAGE, HEAD_DIM)
    high = _move(call, pages, [first, first + 3, first + 1, first + 2])
    assert same_bits(checked(call, **mode), run(high, **mode))


@pytest.mark.parametrize("mode", [PERSISTENT, SPLITS], ids=str)
def test_one_token_pages_far_out(pool: Tensor, mode: dict[str, Any]) -> None:
    call = arguments(make_batch([5, 1], **REAL), 1)
    count = POOL_BYTES // 2 // HEAD_DIM
    pages = pool[: count * HEAD_DIM].view(count, 1, HEAD_DIM)
    across = 2**31 // HEAD_DIM
    high = _move(call, pages, [across, count - 1, across + 1, across - 1, 7, count - 2])
    assert same_bits(checked(call, **mode), run(high, **mode))


def test_a_page_stride_past_two_to_the_thirtieth(pool: Tensor) -> None:
    """A layer's slice of a pool that many layers share: the third page begins past 2^31 elements."""
    call = arguments(make_batch([40, 20], **REAL), 32, spare_pages=0)
    strided = pool.as_strided((3, 32, HEAD_DIM), (2**30 + 8, HEAD_DIM, 1))
    strided.copy_(call["kv_cache"])
    assert same_bits(checked(call), run(call | {"kv_cache": strided}))


def test_a_token_stride_past_two_to_the_thirtieth(pool: Tensor) -> None:
    """Three tokens in a page, far apart."""
    call = arguments(make_batch([3], **REAL), 3, spare_pages=0)
    strided = pool.as_strided((1, 3, HEAD_DIM), (8, 2**30 + 8, 1))
    strided.copy_(call["kv_cache"])
    assert same_bits(checked(call), run(call | {"kv_cache": strided}))


@pytest.mark.parametrize("mode", [PERSISTENT, SPLITS], ids=str)
def test_query_and_output_strides_past_two_to_the_thirtieth(pool: Tensor, mode: dict[str, Any]) -> None:
    call = arguments(make_batch([40, 20, 3], **REAL), 32)
    plain = checked(call, **mode)
    q = pool.as_strided((3, 16, HEAD_DIM), (2**30 + 16, HEAD_DIM, 1))
    q.copy_(call["q"])
    assert same_bits(plain, run(call | {"q": q}, **mode))
    out = pool.as_strided((3, 16, 512), (2**30 + 24, 512, 1))
    before = pool[: 2**20].clone()
    run(call, out=out, **mode)
    assert same_bits((plain[0],), (out,))
    assert same_bits((before[16 * 512 :],), (pool[16 * 512 : 2**20],)), "a wrapped address was written"
    # f32: the third row begins at 2^30 elements, 2^32 bytes
    lse = pool.view(torch.float32).as_strided((3, 16), (2**29 + 16, 1))
    run(call, lse=lse, **mode)
    assert same_bits((plain[1],), (lse,))


def test_a_head_stride_past_two_to_the_thirtieth(pool: Tensor) -> None:
    call = arguments(make_batch([40, 20], **REAL | {"num_heads": 3}), 32)
    q = pool.as_strided((2, 3, HEAD_DIM), (HEAD_DIM, 2**30 + 16, 1))
    q.copy_(call["q"])
    assert same_bits(checked(call), run(call | {"q": q}))


def test_appending_far_out(pool: Tensor) -> None:
    pages = pool[: PAGES * PAGE_NUMBERS].view(PAGES, PAGE, HEAD_DIM)
    slots = [2**31 // HEAD_DIM - 1, 2**31 // HEAD_DIM, 2**31 // HEAD_DIM + 1, PAGES * PAGE - 1]
    latent = torch.randn(4, 512, device="cuda").bfloat16()
    k_pe = torch.randn(4, 64, device="cuda").bfloat16()
    low = pages[:64].clone()
    append(pages, latent, k_pe, torch.tensor(slots, device="cuda"))
    written = torch.stack([pages[slot // PAGE, slot % PAGE] for slot in slots])
    assert torch.equal(written, torch.cat([latent, k_pe], 1))
    assert torch.equal(low, pages[:64])
