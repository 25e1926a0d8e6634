"""PAGE: pages are a relabelling.  What a row gets depends on its tokens, never on where they lie."""

from __future__ import annotations

import pytest
import torch
from batches import arguments, check, decode, make_batch, run, same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import PAGE_SIZES, batches, seeds


@pytest.mark.parametrize("length", [127, 131])
def test_founding_fault_one_token_pages(length: int) -> None:
    """With one token in a page the last page holds 1 token, not the sequence's whole length."""
    call = arguments(make_batch([length], num_heads=16, dims=(512, 64)), page_size=1)
    check(run(call), call)


@given(st.data())
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_relabelling(page_size: int, data: st.DataObject) -> None:
    batch = data.draw(batches(page_size, max_q_len=3, max_seqs=3, most=150))
    call = arguments(
        batch,
        page_size,
        layout_seed=data.draw(seeds),
        poison=data.draw(st.sampled_from(("nan", "inf", "finite"))),
        spare_columns=data.draw(st.integers(0, 5)),
        spare_pages=data.draw(st.integers(1, 40)),
    )
    result = run(call)
    check(result, call)
    # the same page size with other physical pages, another pool and another width: the same bits
    other = arguments(
        batch, page_size, layout_seed=data.draw(seeds), poison="finite", spare_pages=9, spare_columns=7
    )
    assert same_bits(result, run(other))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_dense_lengths(page_size: int) -> None:
    call = arguments(make_batch(range(3 * page_size + 3), num_heads=2, q_dtype=torch.float32), page_size)
    check(run(call), call)


@pytest.mark.parametrize("page_size", [256, 480])
def test_long_sequences_in_large_pages(page_size: int) -> None:
    """Neither the first 4096 tokens only nor the last page only."""
    call = arguments(make_batch([6144, 4097, 5], num_heads=2, q_dtype=torch.float32, spread=0.5), page_size)
    check(run(call), call)


def test_pool_width_and_page_count_are_three_numbers() -> None:
    batch = make_batch([61, 17], num_heads=2)
    call = arguments(batch, 16, spare_pages=58, spare_columns=0)
    assert call["kv_cache"].shape[0] == 64
    assert call["block_table"].shape == (2, 4)
    assert int(call["block_table"][0].max()) > 4
    check(run(call), call)


def test_native_width_is_taken() -> None:
    call = arguments(make_batch([1025, 1], num_heads=2), 32, spare_columns=0)
    assert call["block_table"].shape[1] == 33
    check(run(call), call)


def test_sequences_may_share_pages() -> None:
    """A common prefix is stored once: two rows of the table name the same pages."""
    batch = make_batch([32, 45], num_heads=2)
    batch.tokens[1][:32] = batch.tokens[0]
    call = arguments(batch, 16)
    shared = call["block_table"].clone()
    shared[0, :2] = shared[1, :2]
    assert same_bits(run(call), run(call | {"block_table": shared}))


def test_seq_len_counts_the_current_token() -> None:
    """Six tokens of prompt and one of this step are seven keys; the eighth slot is not read."""
    batch = make_batch([7], num_heads=2, q_dtype=torch.float32)
    call = arguments(batch, 16, poison="finite")
    check(run(call), call)
    newest = batch.tokens[0][-1:].clone()
    batch.tokens[0][-1:] = -newest
    assert not same_bits(run(call), decode(batch, 16, layout={"poison": "finite"}))
