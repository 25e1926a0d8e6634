"""The host table against a plain model of it: rows as lists of tokens, a pool as a dictionary of slots."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedmla.contract.errors import InvalidArgument
from pagedmla.integrations.transformers.sequence_table import SequenceTable


class Replay:
    """A table, a pool that holds one number a slot, and what each row should hold."""

    def __init__(self, page_size: int) -> None:
        self.table, self.page_size = SequenceTable(page_size), page_size
        self.pool: dict[int, int] = {}
        self.rows: list[list[int]] = []
        self.shown: list[list[bool]] = []
        self.next = 0

    def append(self, real: torch.Tensor, say_none: bool) -> None:
        num_rows, num_new = real.shape
        if not self.rows:
            self.rows, self.shown = [[] for _ in range(num_rows)], [[] for _ in range(num_rows)]
        before = [len(row) for row in self.rows]
        appended = self.table.append(num_rows, num_new, None if say_none and bool(real.all()) else real)
        for source, target in appended.page_copies:
            for offset in range(self.page_size):
                self.pool[target * self.page_size + offset] = self.pool.get(
                    source * self.page_size + offset, -1
                )
        slots = appended.slot_mapping.view(num_rows, num_new).tolist()
        written = []
        for row in range(num_rows):
            for token in range(num_new):
                self.shown[row].append(bool(real[row, token]))
                if real[row, token]:
                    assert slots[row][token] >= 0
                    written.append(slots[row][token])
                    self.pool[slots[row][token]] = self.next
                    self.rows[row].append(self.next)
                    self.next += 1
                else:
                    assert slots[row][token] == -1
                assert appended.visible[row, token] == before[row] + int(real[row, : token + 1].sum())
        assert len(set(written)) == len(written)

    def check(self) -> None:
        table, size = self.table, self.page_size
        block_table = table.block_table()
        assert block_table.dtype == torch.int32
        occupied: set[int] = set()
        for row, tokens in enumerate(self.rows):
            assert table.lengths[row] == len(tokens)
            assert len(table.pages[row]) == -(-len(tokens) // size)
            places = [int(block_table[row, i // size]) * size + i % size for i in range(len(tokens))]
            assert [self.pool[place] for place in places] == tokens
            occupied.update(places)
            assert (block_table[row, len(table.pages[row]) :] == -1).all()
        held = [page for pages in table.pages for page in pages]
        for page in range(table.allocator.num_pages):
            assert table.allocator.reference_count(page) == held.count(page)
        assert table.num_stored_tokens == len(occupied)
        assert table.shown_length == len(self.shown[0])
        recorded = (
            torch.ones(len(self.rows), table.shown_length, dtype=torch.bool)
            if table.real is None
            else table.real
        )
        assert recorded.tolist() == self.shown

    def crop(self, count: int) -> None:
        self.table.crop(count)
        for row, shown in enumerate(self.shown):
            keep = max(len(shown) - count, 0)
            self.rows[row] = self.rows[row][: sum(shown[:keep])]
            self.shown[row] = shown[:keep]

    def select(self, rows: list[int]) -> None:
        self.table.select(rows)
        self.rows = [list(self.rows[row]) for row in rows]
        self.shown = [list(self.shown[row]) for row in rows]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([1, 2, 3, 5, 16]))
def test_any_walk_keeps_every_row_its_own_tokens(data: st.DataObject, page_size: int) -> None:
    """Appends (with and without padding), crops, and selections that repeat, drop and reorder rows."""
    replay = Replay(page_size)
    num_rows = data.draw(st.integers(1, 4))
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["append", "append", "crop", "select"])) if replay.rows else "append"
        if step == "append":
            num_new = data.draw(st.integers(1, 7))
            bits = data.draw(
                st.lists(st.booleans(), min_size=num_rows * num_new, max_size=num_rows * num_new)
            )
            pads = data.draw(st.booleans())
            real = (
                torch.tensor(bits).view(num_rows, num_new)
                if pads
                else torch.ones(num_rows, num_new, dtype=torch.bool)
            )
            replay.append(real, say_none=data.draw(st.booleans()))
        elif step == "crop":
            replay.crop(data.draw(st.integers(0, 9)))
        else:
            chosen = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=5))
            replay.select(chosen)
            num_rows = len(chosen)
        replay.check()
    replay.table.reset()
    assert replay.table.allocator.num_free == replay.table.allocator.num_pages
    assert (replay.table.num_rows, replay.table.shown_length, replay.table.num_stored_tokens) == (0, 0, 0)


def test_repeated_rows_share_every_page_until_they_write() -> None:
    table = SequenceTable(page_size=4)
    table.append(1, 10, None)
    table.select([0, 0, 0])
    assert table.allocator.num_pages - table.allocator.num_free == 3
    assert [table.allocator.reference_count(page) for page in table.pages[0]] == [3, 3, 3]
    appended = table.append(3, 1, None)
    # two full pages stay shared; two of the three rows take a copy of the partly filled one, the third keeps it
    assert len(appended.page_copies) == 2
    assert [table.allocator.reference_count(page) for page in table.pages[0]] == [3, 3, 1]
    assert len({pages[-1] for pages in table.pages}) == 3
    assert {source for source, _ in appended.page_copies} == {table.pages[2][-1]}


def test_a_full_last_page_is_never_copied() -> None:
    table = SequenceTable(page_size=4)
    table.append(1, 8, None)
    table.select([0, 0])
    assert table.append(2, 1, None).page_copies == []
    assert table.pages[0][:2] == table.pages[1][:2]
    assert table.pages[0][2] != table.pages[1][2]


def test_the_block_table_is_rebuilt_only_when_pages_change() -> None:
    table = SequenceTable(page_size=4)
    table.append(2, 5, None)
    first = table.block_table()
    table.append(2, 1, None)
    assert table.block_table() is first
    table.append(2, 3, None)
    assert table.block_table() is not first
    assert table.block_table().shape == (2, 3)


def test_the_pool_grows_by_half_at_least() -> None:
    """So that a long text copies its pool a bounded number of times."""
    table = SequenceTable(page_size=1)
    sizes = []
    for _ in range(400):
        table.append(1, 1, None)
        sizes.append(table.allocator.num_pages)
    growths = sum(later > earlier for earlier, later in itertools.pairwise(sizes))
    assert growths < 20
    assert sizes[-1] <= 1.5 * 400 + 1


def test_another_batch_size_and_rows_that_are_not_there() -> None:
    table = SequenceTable(page_size=4)
    table.append(2, 1, None)
    with pytest.raises(InvalidArgument) as batch:
        table.append(3, 1, None)
    with pytest.raises(InvalidArgument) as rows:
        table.select([0, 2])
    assert (batch.value.code, rows.value.code) == ("batch_size", "rows")
    assert table.lengths == [1, 1]
