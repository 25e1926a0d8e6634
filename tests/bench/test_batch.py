"""A batch's pages, its float64 answers, and the check that stands before every number."""

from __future__ import annotations

import math

import pytest
import torch

import pagedmla
from pagedmla.bench.batch import SOFTMAX_SCALE, build_batch, expected_sequences, problem_of
from pagedmla.bench.shapes import DecodeShape
from pagedmla.bench.verify import allowed_error, check_result

from .conftest import small_batch


def test_pages_are_permuted_and_each_is_used_once() -> None:
    batch = small_batch(131, 16, 17, 1)
    assert batch.num_pages_of == (9, 1, 2, 1)
    pages = batch.live_pages().tolist()
    assert sorted(pages) == list(range(13)) == list(range(batch.kv_cache.shape[0]))
    assert pages != sorted(pages)
    assert batch.seq_lens.tolist() == [131, 16, 17, 1]
    assert batch.starts(batch.num_pages_of).tolist() == [0, 9, 10, 12, 13]
    assert bool(torch.isfinite(batch.kv_cache).all())


def test_the_page_reader_reads_a_batchs_bytes_whatever_its_pages_are() -> None:
    same = small_batch(131, 16, page_size=64)
    pool, pages = same.read_pages()
    assert pool is same.kv_cache
    assert pages.tolist() == same.live_pages().tolist()
    for page_size in (1, 16, 128):
        batch = small_batch(643, 16, page_size=page_size)
        pool, pages = batch.read_pages()
        tokens = batch.kv_cache.shape[0] * page_size
        assert tuple(pool.shape) == (tokens // 64, 64, 576)
        assert pool.data_ptr() == batch.kv_cache.data_ptr()
        assert pages.dtype == torch.int32
        assert sorted(pages.tolist()) == list(range(tokens // 64)) != pages.tolist()
    _, none = small_batch(9, page_size=1).read_pages()
    assert none.numel() == 0


def test_a_shape_that_names_its_pages_has_them() -> None:
    shape = DecodeShape("x", (5, 3), 2, page_size=1)
    batch = build_batch(shape, 16, torch.float32, torch.device("cpu"))
    assert tuple(batch.kv_cache.shape) == (8, 1, 576)
    assert batch.page_size == batch.problem().page_size == 1
    assert batch.num_pages_of == (5, 3)
    assert problem_of(DecodeShape("y", (5,), 2), 16, torch.float32).page_size == 16


@pytest.mark.parametrize(("seq_lens", "q_len"), [((131, 1, 16, 17), 1), ((127, 3, 4), 3), ((2,), 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_answers_are_the_references(seq_lens: tuple[int, ...], q_len: int, dtype: torch.dtype) -> None:
    batch = small_batch(*seq_lens, q_len=q_len, dtype=dtype)
    out, lse = pagedmla.reference.decode(
        batch.q, batch.kv_cache, batch.block_table, batch.seq_lens, softmax_scale=SOFTMAX_SCALE
    )
    answers = expected_sequences(batch)
    lengths = list(seq_lens)
    named = {0, len(lengths) - 1, lengths.index(min(lengths)), lengths.index(max(lengths))}
    assert {answer.sequence for answer in answers} == named
    for answer in answers:
        rows = slice(answer.sequence * q_len, (answer.sequence + 1) * q_len)
        torch.testing.assert_close(answer.out, out[rows].double(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(answer.lse, lse[rows].double(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_check_passes_the_rounded_answer_and_nothing_that_is_off(dtype: torch.dtype) -> None:
    batch = small_batch(131, 17, dtype=dtype)
    expected = expected_sequences(batch)
    out = torch.stack([answer.out[0] for answer in expected]).to(dtype)
    lse = torch.stack([answer.lse[0] for answer in expected]).float()
    good = check_result(batch, expected, out, lse)
    assert good.detail == ""
    assert good.out_error < allowed_error(dtype)
    assert good.lse_error is not None
    assert good.lse_error < 1e-5
    assert check_result(batch, expected, out, None).lse_error is None

    scaled = out.double()
    scaled[1] *= 1 + 2 * allowed_error(dtype)
    assert check_result(batch, expected, scaled, lse).detail.startswith("out of sequence 1 is off by")
    base_2 = lse * math.log2(math.e)
    assert "lse of sequence 0 is off by" in check_result(batch, expected, out, base_2).detail
    shifted = lse.clone()
    shifted[1, 2] += 2e-4
    assert check_result(batch, expected, out, shifted).detail.startswith("lse of sequence 1")
    assert "shape" in check_result(batch, expected, out[:1], lse).detail


def test_what_is_allowed_is_three_roundings() -> None:
    # unit roundoffs 2^-8, 2^-11 and 2^-24, times sqrt(3), plus 1e-5
    assert allowed_error(torch.bfloat16) == pytest.approx(6.776e-3, rel=1e-3)
    assert allowed_error(torch.float16) == pytest.approx(8.557e-4, rel=1e-3)
    assert allowed_error(torch.float32) == pytest.approx(1.010e-5, rel=1e-3)


def test_a_nan_anywhere_fails_in_sequences_without_an_answer_too() -> None:
    batch = small_batch(131, 40, 40, 17, heads=1)
    expected = expected_sequences(batch)
    assert 2 not in {answer.sequence for answer in expected}
    out, lse = pagedmla.decode(
        batch.q, batch.kv_cache, batch.block_table, batch.seq_lens, softmax_scale=SOFTMAX_SCALE
    )
    assert check_result(batch, expected, out, lse).detail == ""
    for broken, kept in ((out, lse), (lse, out)):
        was = broken[2].clone()
        broken[2] = math.nan
        assert "not finite" in check_result(batch, expected, out, lse).detail
        broken[2] = was
        assert bool(torch.isfinite(kept).all())
    out[2] = math.inf
    assert "not finite" in check_result(batch, expected, out, None).detail
