"""PAGE: pages are a relabelling.  What a row gets depends on its tokens, never on where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches, seeds
from triton_backend import (
    DTYPES,
    INVARIANT,
    ON_CARD,
    PERSISTENT,
    SPLITS,
    arguments,
    checked,
    few,
    make_batch,
    run,
)

pytestmark = pytest.mark.usefixtures("short_cuts")

PAGE_SIZES = (1, 2, 3, 16, 32, 64, 480)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_relabelling(page_size: int, dtype: torch.dtype) -> None:
    """Other physical pages, another pool, another width, another poison: the same bits."""
    batch = make_batch([page_size + 1, 0, min(page_size, 131)], [1, 1, 2], q_dtype=dtype)
    for mode in (PERSISTENT, SPLITS) if page_size in (3, 64) else (PERSISTENT,):
        call = arguments(batch, page_size, poison="nan", spare_columns=0)
        other = arguments(batch, page_size, layout_seed=5, poison="finite", spare_pages=9, spare_columns=7)
        assert same_bits(checked(call, **mode), run(other, **mode))


@pytest.mark.parametrize("length", [127, 131])
def test_founding_fault_one_token_pages(length: int) -> None:
    """With one token in a page the last page holds 1 token, not the sequence's whole length."""
    checked(arguments(make_batch([length], num_heads=16, dims=(512, 64)), page_size=1))


@few(3)
@given(st.data())
@pytest.mark.parametrize("page_size", [3, 16, 64])
def test_any_batch(page_size: int, data: st.DataObject) -> None:
    batch = data.draw(batches(page_size, max_q_len=3, max_seqs=3, most=90, q_dtype=torch.float16))
    call = arguments(
        batch,
        page_size,
        layout_seed=data.draw(seeds),
        poison=data.draw(st.sampled_from(("nan", "inf", "finite"))),
        spare_columns=data.draw(st.integers(0, 5)),
    )
    mode: dict[str, Any] = data.draw(st.sampled_from((PERSISTENT, SPLITS, INVARIANT)))
    checked(call, **mode)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_dense_lengths(page_size: int) -> None:
    checked(arguments(make_batch(range(2 * page_size + 3), num_heads=2), page_size))


def test_page_sizes_agree_bit_by_bit() -> None:
    """The same KV tiles, however they are cut into pages."""
    batch = make_batch([131, 33, 1], num_heads=4)
    # a card has other tiles where a page does not hold whole ones
    for page_sizes in ((1, 16, 480), (64, 128)) if ON_CARD else ((1, 16, 64, 480),):
        results = [run(arguments(batch, page_size)) for page_size in page_sizes]
        assert all(same_bits(results[0], result) for result in results[1:])


def test_sequences_may_share_pages() -> None:
    batch = make_batch([32, 45], num_heads=2)
    batch.tokens[1][:32] = batch.tokens[0]
    call = arguments(batch, 16)
    shared = call["block_table"].clone()
    shared[0, :2] = shared[1, :2]
    assert same_bits(run(call), run(call | {"block_table": shared}))
