"""FlashInfer's wrapper over ours: the oracle's values and our own decode's bits, in either base of lse."""

from __future__ import annotations

import math

import pytest
import torch
from batches import arguments, check, expect, same_bits
from compat.flashinfer_calls import LOG2_E, NATURAL, attend, call_of, inputs, ours, planned
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches, page_sizes
from torch import Tensor

HEADS, PAGES, Q_LENS = (1, 16, 20, 64, 128), (1, 16, 64), (1, 2, 3)
DIMS = (512, 64)


def seq_lens(page_size: int) -> list[int]:
    """Lengths with holes, one token, primes and the edges of a page."""
    return [0, 1, 127, 131, page_size, page_size + 1, 2 * page_size - 1]


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_bits(num_heads: int, q_len: int, causal: bool) -> None:
    page_size = PAGES[(HEADS.index(num_heads) + q_len + causal) % 3]
    lens = seq_lens(page_size)
    options = {"num_heads": num_heads, "dims": DIMS, "causal": causal, "seed": q_len}
    call = call_of(lens, [q_len] * len(lens), page_size, **options)
    found = attend(call)
    check(found, call)
    assert same_bits(found, ours(call))


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64, 480])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ragged_queries_of_any_page_size_and_dtype(page_size: int, dtype: torch.dtype) -> None:
    call = call_of(seq_lens(page_size), [1, 0, 3, 2, 1, 4, 2], page_size, q_dtype=dtype)
    found = attend(call, over=2)
    check(found, call)
    assert same_bits(found, ours(call))


@given(st.data())
def test_any_batch_in_one_cache_or_two(data: st.DataObject) -> None:
    page_size = data.draw(page_sizes)
    options = {"causal": data.draw(st.booleans()), "dims": data.draw(st.sampled_from([(32, 8), (16, 0)]))}
    batch = data.draw(batches(page_size, max_q_len=data.draw(st.sampled_from(Q_LENS)), **options))
    call = arguments(batch, page_size)
    wrapper = planned(call, over=data.draw(st.integers(0, 2)))
    for apart in (False, True):
        check(wrapper.run(**inputs(call, apart), **NATURAL), call)


def test_lse_is_base_two_unless_asked() -> None:
    call = call_of([127, 0, 16], [2, 1, 2], q_dtype=torch.float32)
    out, natural = attend(call)
    wrapper = planned(call)
    same_out, base_two = wrapper.run(**inputs(call), return_lse=True)
    assert same_bits((out, natural * LOG2_E), (same_out, base_two))
    wanted = expect(call).lse / math.log(2)
    torch.testing.assert_close(base_two.double(), wanted, rtol=1e-5, atol=1.5e-5)
    alone = wrapper.run(**inputs(call))
    assert isinstance(alone, Tensor)
    assert same_bits((alone,), (out,))


@pytest.mark.parametrize("on_e", [True, False])
def test_rows_without_keys(on_e: bool) -> None:
    call = call_of([0, 2, 40, 0], [2, 3, 1, 1])
    out, lse = attend(call, return_lse_base_on_e=on_e)
    empty = torch.tensor([True, True, True, False, False, False, True])
    assert bool((lse[empty] == -math.inf).all())
    assert bool(lse[~empty].isfinite().all())
    assert bool((out[empty] == 0).all())


@pytest.mark.parametrize("on_e", [True, False])
@pytest.mark.parametrize("return_lse", [True, False])
def test_outputs_of_the_caller_are_written_in_place(on_e: bool, return_lse: bool) -> None:
    call = call_of([40, 0, 17], [2, 1, 2])
    expected = attend(call, return_lse_base_on_e=on_e)
    bands = torch.full((5, 4, 48), 7.0, dtype=torch.bfloat16), torch.full((4, 9), 7.0)
    out, lse = bands[0][:, :, 8:40], bands[1].T[2:7]
    found = planned(call).run(
        **inputs(call), out=out, lse=lse, return_lse=return_lse, return_lse_base_on_e=on_e
    )
    returned = found if return_lse else (found,)
    assert all(one is other for one, other in zip(returned, (out, lse), strict=False))
    assert len(returned) == 1 + return_lse
    assert same_bits((out, lse), expected)
    bands[0][:, :, 8:40], bands[1][:, 2:7] = 7.0, 7.0
    assert all(bool((band == 7.0).all()) for band in bands)


@pytest.mark.parametrize("lens", [[], [0], [0, 0]])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("q_len", [0, 1])
def test_batches_of_nothing(lens: list[int], apart: bool, q_len: int) -> None:
    one = call_of([1], [1])
    tokens = len(lens) * q_len
    call = one | {
        "q": one["q"][:1].expand(tokens, -1, -1),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "cu_seqlens_q": torch.arange(len(lens) + 1, dtype=torch.int32) * q_len,
        "block_table": one["block_table"][:1].expand(len(lens), -1),
    }
    out, lse = planned(call).run(**inputs(call, apart), return_lse=True)
    assert out.shape == (tokens, 4, 32)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())
