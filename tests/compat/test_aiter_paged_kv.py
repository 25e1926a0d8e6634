"""AITER's page lists as a block table: the live cells, the lengths, and nothing read on the host."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.compat.aiter import paged_kv
from pagedmla.compat.aiter.paged_kv import block_table_of, check_pages
from pagedmla.contract.errors import InvalidArgument, Unsupported


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def live(table: Tensor, seq_lens: Tensor, page_size: int) -> list[list[int]]:
    """Each request's pages, from the table."""
    return [row[: -(-n // page_size)] for row, n in zip(table.tolist(), seq_lens.tolist(), strict=True)]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 64)), min_size=1, max_size=6),
    st.sampled_from([1, 3, 16, 64]),
    st.integers(0, 3),
    st.sampled_from([None, 5, 50]),
    st.booleans(),
)
def test_against_slices(
    requests: list[tuple[int, int]], page_size: int, first: int, max_pages: int | None, wide: bool
) -> None:
    """Lists that begin anywhere and go on behind the last request; any width."""
    counts = [pages for pages, _ in requests]
    last = [min(tokens, page_size) for _, tokens in requests]
    indptr = [first + sum(counts[:n]) for n in range(len(counts) + 1)]
    indices = torch.randperm(indptr[-1] + 3, generator=torch.Generator().manual_seed(1)).tolist()
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            # what a device takes where it is told nothing
            patch.setattr(paged_kv, "_width", lambda num_pages, num_indices, max_pages: num_indices)
        table, seq_lens = block_table_of(_int32(indptr), _int32(indices), _int32(last), page_size, max_pages)
    wanted = [
        (pages - 1) * page_size + tokens if pages else 0 for pages, tokens in zip(counts, last, strict=True)
    ]
    assert seq_lens.tolist() == wanted
    assert table.dtype == seq_lens.dtype == torch.int32
    assert live(table, seq_lens, page_size) == [indices[a:b] for a, b in pairwise(indptr)]


def test_last_page_lengths_are_bounded() -> None:
    """The founding fault, for pages of one token: 127 and 131 tokens in the last page."""
    indptr, indices = _int32([0, 127, 258, 258]), _int32(list(range(258)))
    for last in ([127, 131, 0], [1, 1, 1], [-5, 2**31 - 1, 9]):
        assert block_table_of(indptr, indices, _int32(last), 1).seq_lens.tolist() == [127, 131, 0]
    for last, wanted in (([17, 0, 3], [2032, 2081, 0]), ([2**31 - 1, -1, 16], [2032, 2081, 0])):
        assert block_table_of(indptr, indices, _int32(last), 16).seq_lens.tolist() == wanted


@pytest.mark.parametrize(
    "indptr", [[0, 9, 2], [-7, 2, 4], [0, 2, 10**9], [5, 5, 0], [2**31 - 1, -(2**31), 3]]
)
def test_starts_out_of_range_lead_nowhere(indptr: list[int]) -> None:
    table, seq_lens = block_table_of(_int32(indptr), _int32([1, 2, 3, 4]), _int32([1, 1]), 16)
    assert bool((seq_lens >= 0).all() & (seq_lens <= table.shape[1] * 16).all())
    assert set(table.flatten().tolist()) <= {1, 2, 3, 4}
    with pytest.raises(InvalidArgument) as error:
        check_pages(_int32(indptr), _int32([1, 2, 3, 4]), _int32([1, 1]), 16, None)
    assert error.value.argument == "kv_indptr"


def test_no_more_than_the_width() -> None:
    """A request with more pages than were promised ends where the table does."""
    table, seq_lens = block_table_of(_int32([0, 3, 4]), _int32([7, 5, 6, 8]), _int32([4, 4]), 16, 2)
    assert seq_lens.tolist() == [20, 4]
    assert table.tolist()[0] == [7, 5]


def test_lengths_stay_in_32_bits() -> None:
    seq_lens = paged_kv.token_counts(_int32([2**31 - 1, 0]), _int32([2**31 - 1, 5]), 2**20)
    assert seq_lens.tolist() == [2**31 - 1, 0]


def test_no_value_is_read_on_a_device() -> None:
    """A meta tensor has no values: whatever waits for one raises."""
    lists = [torch.zeros(size, dtype=torch.int32, device="meta") for size in (4, 1000, 3)]
    assert block_table_of(*lists, page_size=16).block_table.shape == (3, 1000)
    assert block_table_of(*lists, page_size=16, max_pages=70).block_table.shape == (3, 70)


def test_a_table_past_all_reason_is_refused() -> None:
    """Engines hand over a list as large as the pool; without a width every request would get as many cells."""
    lists = [torch.zeros(size, dtype=torch.int32, device="meta") for size in (513, 2**23, 512)]
    with pytest.raises(Unsupported) as error:
        block_table_of(*lists, page_size=1)
    assert error.value.argument == "max_pages"
    assert block_table_of(*lists, page_size=1, max_pages=2**17).block_table.shape == (512, 2**17)
