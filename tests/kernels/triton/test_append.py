"""append on the device: every number to torch's bits, in its slot, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.kernels.triton.append import append

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def expected_cache(cache: Tensor, latent: Tensor, k_pe: Tensor | None, slots: list[int]) -> Tensor:
    """Row by row, on the CPU."""
    wanted, parts = cache.cpu().clone(), [latent] if k_pe is None else [latent, k_pe]
    page_size = cache.shape[1]
    for token, slot in enumerate(slots):
        if 0 <= slot < cache.shape[0] * page_size:
            row = torch.cat([part[token].cpu().to(cache.dtype) for part in parts])
            wanted[slot // page_size, slot % page_size] = row
    return wanted


def every_number(dtype: torch.dtype) -> Tensor:
    """Each bit pattern of a 16-bit type; of float32 each upper half beside lower halves at and around a tie."""
    upper = torch.arange(65536, dtype=torch.int32)
    if dtype != torch.float32:
        return upper.to(torch.int16).view(dtype)
    lower = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    return torch.cat([(upper << 16) | low for low in lower]).view(torch.float32)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_rounding_is_torch_s_for_every_number(source: torch.dtype, target: torch.dtype) -> None:
    numbers = every_number(source).view(-1, 16384)
    cache = torch.zeros(numbers.shape[0], 1, 16384, dtype=target, device=DEVICE)
    append(cache, numbers.to(DEVICE), None, torch.arange(numbers.shape[0], device=DEVICE))
    found, wanted = cache[:, 0].cpu(), numbers.to(target)
    nan = numbers.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(bits(found)[~nan], bits(wanted)[~nan])


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int, int, list[int]]:
    """(num_pages, page_size, kv_lora_rank, qk_rope_head_dim, slots): distinct slots of the pool among many outside."""
    num_pages, page_size = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 3, 16, 64]))
    num_slots = num_pages * page_size
    owned = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=6))
    outside = draw(
        st.lists(st.sampled_from([-1, -num_slots, num_slots, num_slots + 1, 2**31 - 1]), max_size=4)
    )
    slots = draw(st.permutations(owned + outside))
    rank, rope = draw(st.sampled_from([(1, 0), (7, 2), (32, 8), (512, 64), (513, 30), (100, 0)]))
    return num_pages, page_size, rank, rope, slots


@given(steps(), *[st.sampled_from(DTYPES)] * 3, st.sampled_from([torch.int64, torch.int32]), st.booleans())
def test_tokens_stand_in_their_slots_and_the_rest_is_untouched(
    step: tuple[int, int, int, int, list[int]],
    latent_dtype: torch.dtype,
    k_pe_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    slot_dtype: torch.dtype,
    strided: bool,
) -> None:
    num_pages, page_size, rank, rope, slots = step
    generator = torch.Generator().manual_seed(len(slots))
    # a pool interleaved across layers, rows with a gap, and NaN wherever nobody writes
    pool = torch.full((num_pages, 2, page_size, rank + rope + 3), torch.nan, dtype=cache_dtype, device=DEVICE)
    cache = pool[:, 1, :, : rank + rope]
    latent = torch.randn(len(slots), rank, generator=generator).to(latent_dtype).to(DEVICE)
    k_pe = torch.randn(len(slots), rope, generator=generator).to(k_pe_dtype).to(DEVICE)
    mapping = torch.tensor(slots, dtype=slot_dtype, device=DEVICE)
    given_latent, given_k_pe = latent, k_pe
    if strided:
        given_latent = torch.full((len(slots), 2 * rank + 5), torch.nan, device=DEVICE).to(latent_dtype)[
            :, 3 : 3 + rank
        ]
        given_latent.copy_(latent)
        given_k_pe = k_pe.t().contiguous().t()
        mapping = mapping.repeat_interleave(2)[::2]
    wanted = expected_cache(cache, latent, k_pe, slots)
    append(cache, given_latent, given_k_pe if rope else None, mapping)
    assert torch.equal(bits(cache.cpu()), bits(wanted))
    assert bool(pool[:, 0].isnan().all() & pool[..., rank + rope :].isnan().all())


@pytest.mark.large
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
def test_offsets_past_two_to_the_31_are_reached(slot_dtype: torch.dtype) -> None:
    """Pages lie so far apart that page 2 starts past 2^31 numbers; a 32-bit product would wrap below the cache's start."""
    stride = 2**30 + 64
    lowest = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=DEVICE)
    cache = lowest.as_strided((3, 4, 16), (stride, 16, 1))
    cache.fill_(torch.nan)
    latent = torch.arange(3 * 16, dtype=torch.float32, device=DEVICE).view(3, 16)
    append(cache, latent, None, torch.tensor([11, 4, -1], dtype=slot_dtype, device=DEVICE))
    assert torch.equal(cache[2, 3].float(), latent[0])
    assert torch.equal(cache[1, 0].float(), latent[1])
    assert int(cache.isfinite().all(-1).sum()) == 2
