"""Block table to CSR on the device: live cells only, garbage lengths bounded, any number of sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.kernels.triton import csr
from pagedmla.kernels.triton.csr import block_table_to_csr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNTOUCHED = -77


def run(
    table: Tensor, lengths: list[int], page_size: int, num_seqs: int
) -> tuple[list[int], list[int], list[int]]:
    """The three buffers, which started as UNTOUCHED and stand between guards."""
    max_num_seqs, width = table.shape
    sizes = (max_num_seqs + 1, max_num_seqs * width, max_num_seqs)
    guarded = [torch.full((size + 8,), UNTOUCHED, dtype=torch.int32, device=DEVICE) for size in sizes]
    buffers = [whole[4:-4] for whole in guarded]
    padded = torch.tensor(lengths + [0] * (max_num_seqs - len(lengths)), dtype=torch.int32, device=DEVICE)
    block_table_to_csr(table.to(DEVICE), padded, page_size, num_seqs, *buffers)
    for whole in guarded:
        assert (whole[:4] == UNTOUCHED).all()
        assert (whole[-4:] == UNTOUCHED).all()
    return tuple(buffer.tolist() for buffer in buffers)  # type: ignore[return-value]


def expected(table: Tensor, lengths: list[int], page_size: int) -> tuple[list[int], list[int], list[int]]:
    """Page by page, in plain integers."""
    max_num_seqs, width = table.shape
    rows, indptr, indices = table.tolist(), [0], []
    for row, length in enumerate(lengths + [0] * (max_num_seqs - len(lengths))):
        indices += rows[row][: -(-min(max(length, 0), width * page_size) // page_size)]
        indptr.append(len(indices))
    last = [(length - 1) % page_size + 1 for length in lengths] + [page_size] * (max_num_seqs - len(lengths))
    return indptr, indices + [UNTOUCHED] * (max_num_seqs * width - len(indices)), last


@given(
    st.sampled_from([1, 2, 3, 16, 64, 480]),
    st.lists(
        st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 131, -5, 2**31 - 1, -(2**31) + 1]), max_size=6
    ),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_live_cells_are_copied_and_nothing_else(
    page_size: int, lengths: list[int], width: int, spare: int
) -> None:
    """A length that the table cannot hold counts as its width, a negative one as none; unused cells stay as they were."""
    table = torch.randperm(1000, generator=torch.Generator().manual_seed(width), dtype=torch.int32)
    table = table[: (len(lengths) + spare + 1) * width].view(-1, width)
    assert run(table, lengths, page_size, len(lengths)) == expected(table, lengths, page_size)


def test_blocks_of_sequences_and_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than a block, more columns than all of a sequence's programs take in one go."""
    monkeypatch.setattr(csr, "_BLOCK_SEQUENCES", 4)
    monkeypatch.setattr(csr, "_BLOCK_CELLS", 16)
    monkeypatch.setattr(csr, "_MAX_BLOCKS", 3)
    lengths = [0, 131, 1, 127, 16, 15, 17, 131 * 2, 48, 49, 0]
    table = torch.randperm(11 * 131, generator=torch.Generator().manual_seed(0), dtype=torch.int32).view(
        11, 131
    )
    assert run(table, lengths, 1, 11) == expected(table, lengths, 1)
    assert run(table, lengths, 2, 11) == expected(table, lengths, 2)


def test_the_blocks_as_they_are() -> None:
    lengths = [3, 0, 2500] + [1] * 1040
    table = torch.arange(1043 * 2500, dtype=torch.int32).view(1043, 2500)
    assert table.shape[1] > 2 * csr._BLOCK_CELLS
    assert len(lengths) > csr._BLOCK_SEQUENCES
    # the programs of sequences past the third are a thousand alike: under the interpreter each takes a millisecond
    indptr, indices, last = run(table[:, :2500], lengths, 1, 3)
    assert indptr == [0, 3, 3, 2503, *range(2504, 3544)]
    assert indices[:2503] == [0, 1, 2, *range(5000, 7500)]
    assert set(indices[2503:]) == {UNTOUCHED}
    assert set(last) == {1}


def test_a_table_with_a_row_stride_and_no_last_page_buffer() -> None:
    whole = torch.full((3, 10), 10**9, dtype=torch.int32)
    table = whole[:, 2:5]
    table.copy_(torch.arange(9).view(3, 3))
    indptr = torch.empty(4, dtype=torch.int32, device=DEVICE)
    indices = torch.full((9,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([17, 0, 48], dtype=torch.int32, device=DEVICE)
    block_table_to_csr(whole.to(DEVICE)[:, 2:5], lengths, 16, 3, indptr, indices, None)
    assert indptr.tolist() == [0, 2, 2, 5]
    assert indices.tolist() == [0, 1, 6, 7, 8] + [UNTOUCHED] * 4
