"""The two caches of FlashInfer's wrapper: columns of one in place, tensors that lie apart by page, and fp8's scale."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from batches import KV_SCALE, check, expect, same_bits
from compat.flashinfer_calls import NATURAL, attend, call_of, inputs, ours, planned, record_decodes
from torch import Tensor

from pagedmla.compat.flashinfer.caches import packing
from pagedmla.contract.errors import InvalidArgument, Unsupported


def sliced_columns(cache: Tensor) -> Tensor:
    wide = torch.full((*cache.shape[:2], cache.shape[2] + 24), math.nan, dtype=cache.dtype)
    wide[..., 8 : 8 + cache.shape[2]] = cache
    return wide[..., 8 : 8 + cache.shape[2]]


def every_other_page(cache: Tensor) -> Tensor:
    wide = torch.full((cache.shape[0], 2, *cache.shape[1:]), math.nan, dtype=cache.dtype)
    wide[:, 1] = cache
    return wide[:, 1]


def tokens_before_pages(cache: Tensor) -> Tensor:
    return cache.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lay", [Tensor.clone, sliced_columns, every_other_page, tokens_before_pages])
def test_two_views_of_one_cache_are_read_in_place(
    page_size: int, lay: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    decodes = record_decodes(monkeypatch)
    call = call_of([40, 0, 17], [2, 1, 2], page_size)
    call["kv_cache"] = lay(call["kv_cache"])
    found = attend(call)
    (tensors, _) = decodes[0]
    assert tensors[1].data_ptr() == call["kv_cache"].data_ptr()
    assert tensors[1].shape == call["kv_cache"].shape
    check(found, call)
    assert same_bits(found, ours(call))


def scattered(values: Tensor, page_step: int, token_step: int, start: int, memory: Tensor) -> Tensor:
    """``values`` as a view of flat ``memory`` with these strides."""
    view = memory.as_strided(values.shape, (page_step, token_step, 1), start)
    return view.copy_(values)


def near_misses(cache: Tensor, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of (latent, rope) that say what ``cache`` says and are not [latent | rope] in place, however close.

    With pages of one token also a pair that is: its strides differ where they address nothing.
    """
    latent, rope = cache[..., :rank], cache[..., rank:]
    num_pages, page_size, width = cache.shape
    swapped = torch.cat((rope, latent), dim=2)
    gap = torch.cat((latent, torch.full_like(rope, math.nan), rope), dim=2)
    # pages of one storage, the rope of page p beside the latent of page p + 1
    shifted = torch.full((num_pages + 1, page_size, width), math.nan, dtype=cache.dtype)
    shifted[1:, :, :rank], shifted[:-1, :, rank:] = latent, rope
    # columns of two caches: the same strides, and the offset that is right within one
    one, other = torch.full_like(cache, math.nan), torch.full_like(cache, math.nan)
    one[..., :rank], other[..., rank:] = latent, rope
    pools = torch.cat((latent.flatten(), rope.flatten()))
    # rows of two pitches, from neighbouring columns on
    memory = torch.full((4 * cache.numel(),), math.nan, dtype=cache.dtype)
    row = 2 * width
    found = {
        "two tensors": (latent.clone(), rope.clone()),
        "two caches": (one[..., :rank], other[..., rank:]),
        "rope first": (swapped[..., rope.shape[2] :], swapped[..., : rope.shape[2]]),
        "a gap between": (gap[..., :rank], gap[..., rank + rope.shape[2] :]),
        "a page apart": (shifted[1:, :, :rank], shifted[:-1, :, rank:]),
        "pools in one storage": (
            pools[: latent.numel()].view(latent.shape),
            pools[latent.numel() :].view(rope.shape),
        ),
        "two pitches": (
            scattered(latent, page_size * row, row, 0, memory),
            scattered(rope, 2 * page_size * row, 2 * row, rank, memory),
        ),
    }
    if page_size == 1:
        memory = torch.full((cache.numel(),), math.nan, dtype=cache.dtype)
        beside = scattered(latent, width, 1, 0, memory), scattered(rope, width, 7, rank, memory)
        found["in place after all"] = beside
    return found


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_that_lie_apart_are_packed_by_page(
    page_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only pages that lengths need: garbage ids past them lead nowhere, and the pool is much larger."""
    decodes = record_decodes(monkeypatch)
    lens = [33, 0, 17, 1]
    call = call_of(lens, [2, 1, 3, 1], page_size, q_dtype=dtype, layout={"spare_pages": 200})
    needed = sum(-(-length // page_size) for length in lens)
    for name, (ckv, kpe) in near_misses(call["kv_cache"], 32).items():
        decodes.clear()
        found = attend(call, over=2, ckv_cache=ckv, kpe_cache=kpe)
        read = decodes[0][0][1]
        if name == "in place after all":
            assert read.data_ptr() == ckv.data_ptr(), name
        else:
            assert read.shape == (needed, page_size, 40), name
        check(found, call)


def test_packing_follows_the_cache_between_runs_and_shares_pages() -> None:
    """A plan serves all layers: each brings its own caches.  Two sequences may have a prefix in common."""
    call = call_of([48, 0, 20], [1, 1, 2], 16)
    call["block_table"][2, 0] = call["block_table"][0, 0]
    wrapper = planned(call)
    for layer in range(3):
        generator = torch.Generator().manual_seed(layer)
        live = torch.randn(call["kv_cache"].shape, generator=generator).to(torch.bfloat16)
        call["kv_cache"] = torch.where(call["kv_cache"].isnan(), call["kv_cache"], live)
        call["kv_cache"][int(call["block_table"][2, 1]), :4] = live[0, :4]
        check(wrapper.run(**inputs(call, apart=True), **NATURAL), call)


def test_what_is_packed_is_worked_out_without_a_look_at_the_device() -> None:
    """Tensors of the meta device have no numbers: whoever wants one on the host fails."""
    table, lens = (torch.empty(*sizes, dtype=torch.int32, device="meta") for sizes in ((3, 5), (3,)))
    pages, packed_table = packing(table, lens, page_size=16, num_pages=7)
    assert pages.shape == (7,)
    assert packed_table.shape == (3, 5)


@pytest.mark.parametrize("bad", [-1, 10**6, 2**31 - 1])
def test_live_page_ids_outside_the_pool_lead_to_no_read_outside(bad: int) -> None:
    """Their own sequence's rows are unspecified, the others' are as they were; with views and with tensors apart."""
    call = call_of([40, 33, 17], [1, 1, 1])
    good = expect(call)
    call["block_table"][1, 1] = bad
    for apart in (False, True):
        out, lse = planned(call).run(**inputs(call, apart), **NATURAL)
        for row in (0, 2):
            bound = good.bound[row]
            assert bool(((out[row].double() - good.out[row]).abs() <= bound).all())
            torch.testing.assert_close(lse[row].double(), good.lse[row], rtol=1e-5, atol=1e-5)


def test_pages_promised_from_an_empty_pool() -> None:
    call = call_of([20], [1])
    empty = {"ckv_cache": torch.empty(0, 16, 32), "kpe_cache": torch.empty(0, 16, 8)}
    out, lse = attend(call, **{name: part.bfloat16() for name, part in empty.items()})
    assert out.shape == (1, 4, 32)
    assert lse.shape == (1, 4)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("apart", [False, True])
def test_fp8_caches_have_one_scale(dtype: torch.dtype, apart: bool) -> None:
    call = call_of([40, 0, 17], [2, 1, 2], kv_dtype=dtype)
    parts = inputs(call, apart)
    wrapper = planned(call)
    scales = {"ckv_scale": KV_SCALE, "kpe_scale": KV_SCALE}
    check(wrapper.run(**parts, **scales, **NATURAL), call)
    for changed, kind, argument in (
        ({"ckv_scale": None}, InvalidArgument, "ckv_scale"),
        ({"kpe_scale": None}, InvalidArgument, "kpe_scale"),
        ({"kpe_scale": 2 * KV_SCALE}, Unsupported, "kpe_scale"),
        ({"ckv_scale": -1.0, "kpe_scale": -1.0}, InvalidArgument, "ckv_scale"),
        ({"ckv_scale": math.nan, "kpe_scale": math.nan}, InvalidArgument, "ckv_scale"),
        ({"ckv_scale": torch.ones(1)}, InvalidArgument, "ckv_scale"),
        ({"kpe_scale": torch.ones(1)}, InvalidArgument, "kpe_scale"),
        ({"ckv_scale_arr": torch.ones(4, 16, 1)}, Unsupported, "ckv_scale_arr"),
    ):
        with pytest.raises(kind) as raised:
            wrapper.run(**parts, **scales | changed)
        assert raised.value.argument == argument
