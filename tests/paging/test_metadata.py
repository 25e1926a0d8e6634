"""A step's metadata: the founding fault by name, every page size, fixed addresses, filled tails, no allocation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedmla.contract.errors import InvalidArgument, PlanMismatch
from pagedmla.contract.problem import BatchBounds
from pagedmla.paging.csr import (
    block_table_to_csr,
    csr_to_block_table,
    expand_block_table,
    last_page_len,
)
from pagedmla.paging.metadata import DecodeMetadata

PAGE_SIZES = (1, 2, 3, 16, 32, 64, 128, 256, 480)


def i32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages_of(length: int, page_size: int) -> int:
    return -(-length // page_size)


def table_for(lengths: list[int], page_size: int, width: int, seed: int = 0) -> torch.Tensor:
    """A permuted block table whose unused cells hold page ids that must not be looked at."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(len(lengths) * width, generator=generator, dtype=torch.int32).view(
        len(lengths), width
    )
    for row, length in enumerate(lengths):
        table[row, pages_of(length, page_size) :] = 10**9
    return table


class CountNewStorages(TorchDispatchMode):
    """Counts operations that return memory which none of their inputs has."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given_memory = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given_memory:
                self.new.append(str(func))
        return result


@contextmanager
def count_allocations() -> Iterator[list[str]]:
    with CountNewStorages() as counter:
        yield counter.new


@pytest.mark.parametrize("length", [127, 131])
def test_one_token_pages_have_one_token_in_their_last_page(length: int) -> None:
    """The founding fault: a sequence of 127 tokens on one-token pages was said to have 127 tokens in its last page."""
    metadata = DecodeMetadata(BatchBounds(max_num_seqs=4, max_pages_per_seq=256), page_size=1)
    metadata.update(table_for([length], 1, 256), i32([length]))
    assert metadata.kv_last_page_len.tolist() == [1, 1, 1, 1]
    assert metadata.kv_indptr.tolist() == [0, length, length, length, length]
    assert last_page_len(i32([length]), 1).tolist() == [1]
    assert block_table_to_csr(table_for([length], 1, 256), i32([length]), 1).kv_last_page_len.tolist() == [1]


def test_the_buffer_of_ones_is_filled_once_and_never_written_again() -> None:
    metadata = DecodeMetadata(BatchBounds(max_num_seqs=8, max_pages_per_seq=64), page_size=1)
    version = metadata.kv_last_page_len._version
    for step in range(5):
        lengths = [step + 1, 64 - step, 0]
        metadata.update(table_for(lengths, 1, 64), i32(lengths))
    assert metadata.kv_last_page_len._version == version
    assert metadata.kv_last_page_len.tolist() == [1] * 8


@pytest.mark.parametrize("kernel_page_size", [1, 16, 64])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_no_step_allocates(kernel_page_size: int, ragged: bool, kind: str) -> None:
    metadata = (DeviceMetadata if kind == "device" else DecodeMetadata)(
        BatchBounds(max_num_seqs=8, max_pages_per_seq=6), page_size=64, kernel_page_size=kernel_page_size
    )
    table, lengths = table_for([127, 0, 131], 64, 6), i32([127, 0, 131])
    starts = i32([0, 2, 2, 5]) if ragged else None
    metadata.update(table, lengths, starts)
    with count_allocations() as new:
        for _ in range(3):
            metadata.update(table, lengths, starts)
    assert new == []


def test_the_allocation_counter_sees_an_allocation() -> None:
    with count_allocations() as new:
        torch.ones(3).add(1)
    assert len(new) == 2


def test_buffers_keep_their_addresses() -> None:
    metadata = DecodeMetadata(
        BatchBounds(max_num_seqs=4, max_pages_per_seq=5), page_size=32, kernel_page_size=16
    )
    names = ("block_table", "seq_lens", "cu_seqlens_q", "kv_indptr", "kv_indices", "kv_last_page_len")
    before = [getattr(metadata, name).data_ptr() for name in names]
    for lengths in ([1, 160, 33], [0], [160, 160, 160, 160], []):
        metadata.update(
            table_for(lengths, 32, 5) if lengths else torch.empty(0, 5, dtype=torch.int32), i32(lengths)
        )
    assert [getattr(metadata, name).data_ptr() for name in names] == before


def expected_csr(
    table: torch.Tensor, lengths: list[int], page_size: int, kernel_page_size: int, capacity: int
) -> tuple[list[int], list[int], list[int]]:
    """Token by token, in plain integers."""
    indptr, indices, last = [0], [], []
    ratio = page_size // kernel_page_size
    for row, length in enumerate(lengths):
        for token in range(0, length, kernel_page_size):
            page = int(table[row, token // page_size])
            indices.append(page * ratio + (token % page_size) // kernel_page_size)
        indptr.append(len(indices))
        last.append(length - (pages_of(length, kernel_page_size) - 1) * kernel_page_size)
    for _ in range(capacity - len(lengths)):
        indptr.append(len(indices))
        last.append(kernel_page_size)
    return indptr, indices, last


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, list[int], int]:
    page_size = draw(st.sampled_from(PAGE_SIZES))
    divisors = [size for size in range(1, page_size + 1) if page_size % size == 0]
    kernel_page_size = draw(st.sampled_from(divisors))
    edges = [0, 1, 127, 131, page_size - 1, page_size, page_size + 1, 2 * page_size, 3 * page_size + 1]
    lengths = draw(st.lists(st.sampled_from(edges), max_size=5))
    return page_size, kernel_page_size, lengths, draw(st.integers(0, 2))


@given(steps(), st.booleans())
def test_csr_agrees_with_counting_tokens(step: tuple[int, int, list[int], int], device_path: bool) -> None:
    page_size, kernel_page_size, lengths, spare = step
    width = max([pages_of(length, page_size) for length in lengths], default=0) + spare
    bounds = BatchBounds(max_num_seqs=len(lengths) + 2, max_pages_per_seq=width + 1)
    kind = DeviceMetadata if device_path else DecodeMetadata
    metadata = kind(bounds, page_size, kernel_page_size=kernel_page_size)
    table = table_for(lengths, page_size, width)
    # what an earlier, larger step left behind must not show
    full = bounds.max_num_seqs
    earlier = [(width + 1) * page_size] * full
    metadata.update(table_for(earlier, page_size, width + 1), i32(earlier))
    metadata.update(table, i32(lengths))
    indptr, indices, last = expected_csr(table, lengths, page_size, kernel_page_size, full)
    assert metadata.kv_indptr.tolist() == indptr
    assert metadata.kv_indices[: indptr[-1]].tolist() == indices
    live = [row for row, length in enumerate(lengths) if length]
    assert [metadata.kv_last_page_len[row].item() for row in live] == [last[row] for row in live]
    assert all(1 <= value <= kernel_page_size for value in metadata.kv_last_page_len.tolist())
    assert metadata.seq_lens.tolist() == lengths + [0] * (full - len(lengths))
    assert metadata.cu_seqlens_q.tolist() == [min(row, len(lengths)) for row in range(full + 1)]


class DeviceMetadata(DecodeMetadata):
    """Runs what a GPU runs, on CPU tensors: nothing is read on the host."""

    _lengths_on_host = False


@given(steps())
def test_block_table_and_csr_are_each_other_s_inverse(step: tuple[int, int, list[int], int]) -> None:
    page_size, _, lengths, spare = step
    width = max([pages_of(length, page_size) for length in lengths], default=0) + spare
    table = table_for(lengths, page_size, width)
    csr = block_table_to_csr(table, i32(lengths), page_size)
    again, seq_lens = csr_to_block_table(*csr, page_size, max_pages=width)
    assert seq_lens.tolist() == lengths
    for row, length in enumerate(lengths):
        used = pages_of(length, page_size)
        assert again[row, :used].tolist() == table[row, :used].tolist()
        assert (again[row, used:] == -1).all()


def test_expanding_a_table_keeps_what_is_no_page_out_of_the_pool() -> None:
    assert expand_block_table(i32([[3, -1]]), 64, 16).tolist() == [[12, 13, 14, 15, -4, -3, -2, -1]]
    assert expand_block_table(i32([[3, -1]]), 64, 64).tolist() == [[3, -1]]
    assert expand_block_table(torch.empty(2, 0, dtype=torch.int32), 64, 16).shape == (2, 0)


def test_lengths_that_the_table_cannot_hold_stay_within_the_buffers() -> None:
    """Device values are bounded, not trusted: the engine's faulty lengths must not make the CSR form point outside."""
    for make in (DecodeMetadata, DeviceMetadata):
        metadata = make(BatchBounds(max_num_seqs=3, max_pages_per_seq=4), 16)
        metadata.update(table_for([64, 64, 64], 16, 4), i32([2**31 - 1, -5, 17]))
        assert metadata.kv_indptr[-1] <= metadata.kv_indices.shape[0]
        assert (metadata.kv_indptr[1:] >= metadata.kv_indptr[:-1]).all()


@pytest.mark.parametrize(
    ("table", "lengths", "starts", "error", "argument"),
    [
        (torch.zeros(2, 3), i32([1, 1]), None, InvalidArgument, "block_table"),
        (i32([[1], [2]])[0], i32([1, 1]), None, InvalidArgument, "block_table"),
        (i32([[1], [2]]), torch.tensor([1, 1]), None, InvalidArgument, "seq_lens"),
        (i32([[1], [2]]), i32([1]), None, InvalidArgument, "block_table"),
        (i32([[1], [2]]), i32([1, 1]), i32([0, 1]), InvalidArgument, "cu_seqlens_q"),
        (i32([[1], [2]]).to("meta"), i32([1, 1]), None, InvalidArgument, "block_table"),
        (i32([[1]] * 5), i32([1] * 5), None, PlanMismatch, "seq_lens"),
        (i32([[1] * 5]), i32([1]), None, PlanMismatch, "block_table"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_nothing_is_copied(
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor | None,
    error: type[Exception],
    argument: str,
) -> None:
    metadata = DecodeMetadata(BatchBounds(max_num_seqs=4, max_pages_per_seq=4), 16)
    metadata.update(i32([[7, 8]]), i32([20]))
    before = [metadata.block_table.clone(), metadata.seq_lens.clone(), metadata.kv_indptr.clone()]
    with pytest.raises(error) as caught:
        metadata.update(table, lengths, starts)
    assert caught.value.argument == argument  # type: ignore[attr-defined]
    after = [metadata.block_table, metadata.seq_lens, metadata.kv_indptr]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: csr_to_block_table(i32([0, 1]), i32([3]), i32([17]), 16), "kv_last_page_len"),
        (lambda: csr_to_block_table(i32([0, 1]), i32([3]), i32([0]), 16), "kv_last_page_len"),
        (lambda: csr_to_block_table(i32([0, 2, 1]), i32([3, 4]), i32([1, 1]), 16), "kv_indptr"),
        (lambda: csr_to_block_table(i32([0, 3]), i32([3]), i32([1]), 16), "kv_indptr"),
        (lambda: csr_to_block_table(i32([1, 1]), i32([3]), i32([1]), 16), "kv_indptr"),
        (lambda: csr_to_block_table(i32([0, 2]), i32([3, 4]), i32([1]), 16, max_pages=1), "kv_indptr"),
        (lambda: block_table_to_csr(i32([[1]]), i32([17]), 16), "seq_lens"),
        (lambda: block_table_to_csr(i32([[1]]), i32([-1]), 16), "seq_lens"),
        (lambda: block_table_to_csr(i32([[1]]), i32([1, 1]), 16), "block_table"),
        (lambda: last_page_len(i32([1]), 0), "page_size"),
        (lambda: expand_block_table(i32([[1]]), 64, 48), "kernel_page_size"),
        (lambda: DecodeMetadata(BatchBounds(2**20, 2**20), 16, kernel_page_size=1, device="meta"), "bounds"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(call, argument: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert caught.value.argument == argument
