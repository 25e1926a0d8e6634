"""The oracle's two derivations, written apart, agree: the formulas are right, or wrong twice in the same way."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from batches import arguments, make_batch
from torch import Tensor

from pagedmla import reference


def _absorbed_and_not(
    seq_lens: list[int],
    q_lens: list[int],
    softmax_scale: float,
    causal: bool,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    heads, nope, rank, rope, v_head_dim = 3, 12, 32, 8, 10
    batch = make_batch(seq_lens, [0] * len(seq_lens), dims=(rank, rope), kv_dtype=kv_dtype)
    call = arguments(batch, page_size=16)
    generator = torch.Generator().manual_seed(11)
    rows = sum(q_lens)
    q_nope = torch.randn(rows, heads, nope, generator=generator, dtype=torch.float64)
    q_pe = torch.randn(rows, heads, rope, generator=generator, dtype=torch.float64)
    w_uk = torch.randn(heads, nope, rank, generator=generator, dtype=torch.float64)
    w_uv = torch.randn(heads, v_head_dim, rank, generator=generator, dtype=torch.float64)
    starts = torch.tensor(list(accumulate(q_lens, initial=0)), dtype=torch.int32)
    where = (call["kv_cache"], call["block_table"], call["seq_lens"])
    how = {
        "softmax_scale": softmax_scale,
        "cu_seqlens_q": starts,
        "causal": causal,
        "kv_scale": call["kv_scale"],
    }
    out, _ = reference.decode((reference.absorb_query(q_nope, w_uk), q_pe), *where, kv_lora_rank=rank, **how)
    return reference.up_project(out, w_uv), reference.multi_head(q_nope, q_pe, *where, w_uk, w_uv, **how)


@pytest.mark.parametrize("softmax_scale", [0.01, 0.0721687836487032, 0.4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("seq_lens", "q_lens"),
    [
        ([1, 2, 3], [1, 1, 1]),
        ([127, 0, 131, 15, 16, 17], [1, 1, 1, 1, 1, 1]),
        ([5, 33, 0, 2], [3, 2, 1, 4]),
        ([48, 1, 16], [0, 7, 1]),
    ],
)
def test_absorbed_equals_multi_head(
    seq_lens: list[int], q_lens: list[int], softmax_scale: float, causal: bool
) -> None:
    absorbed, ordinary = _absorbed_and_not(seq_lens, q_lens, softmax_scale, causal)
    assert ordinary.abs().max() > 0.1
    assert (absorbed - ordinary).abs().max() <= 1e-12 * ordinary.abs().max()


def test_absorbed_equals_multi_head_over_an_fp8_cache() -> None:
    absorbed, ordinary = _absorbed_and_not([21, 1, 0, 64], [1, 2, 1, 3], 0.05, True, torch.float8_e4m3fn)
    assert (absorbed - ordinary).abs().max() <= 1e-12 * ordinary.abs().max()


def test_lse_is_the_natural_log_of_the_sum_of_exponentials() -> None:
    batch = make_batch([40, 1], [2, 1], num_heads=3, q_dtype=torch.float32)
    call = arguments(batch)
    _, lse = reference.decode(**call)
    for row, sequence, seen in ((0, 0, 39), (1, 0, 40), (2, 1, 1)):
        query, keys = call["q"][row].double(), batch.tokens[sequence][:seen].double()
        scores = batch.softmax_scale * torch.einsum("hd,nd->hn", query, keys)
        torch.testing.assert_close(lse[row], torch.log(torch.exp(scores).sum(1)), rtol=1e-13, atol=1e-13)


def test_two_equal_keys_weigh_log_two() -> None:
    q = torch.zeros(1, 1, 4)
    cache = torch.tensor([[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]])
    table, lens = torch.tensor([[0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    out, lse = reference.decode(q, cache, table, lens, softmax_scale=0.5, kv_lora_rank=3)
    assert out.tolist() == [[[3.0, 4.0, 5.0]]]
    assert lse.item() == pytest.approx(0.6931471805599453, abs=1e-15)
