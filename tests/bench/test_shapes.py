"""The named shapes, and the work that is counted for them."""

from __future__ import annotations

import pytest

from pagedmla.bench.shapes import (
    HEAD_COUNTS,
    SHAPE_SETS,
    DecodeShape,
    exponential_lengths,
    find_shapes,
    named_shapes,
)
from pagedmla.contract.errors import InvalidArgument


def test_std_is_the_table_that_figures_are_kept_for() -> None:
    shapes = named_shapes(["std"])
    names = [shape.name for shape in shapes]
    assert len(names) == len(set(names)) == 20
    for name in (
        "B1 S4096 H16",
        "B1 S131072 H128",
        "B64 S4096 H16",
        "B256 S1024 H128",
        "B64 S~exp4096 H128",
        "B4 S641,45118,1730,1696 H16",
        "B128 S4096 H64 q2",
    ):
        assert name in names
    parts = named_shapes(["even", "ragged", "mtp"])
    assert sorted(names) == sorted(shape.name for shape in parts)


@pytest.mark.parametrize("name", SHAPE_SETS)
def test_every_query_of_every_shape_sees_a_key(name: str) -> None:
    shapes = named_shapes([name])
    assert shapes
    assert all(min(shape.seq_lens) >= shape.q_len >= 1 for shape in shapes)


def test_the_ragged_batch_is_the_same_on_every_day() -> None:
    lengths = exponential_lengths(64, 4096, seed=1)
    assert sum(lengths) // 64 == 4118  # the batch that published figures of this project are of
    assert min(lengths) >= 16
    assert max(lengths) <= 4 * 4096
    assert lengths == exponential_lengths(64, 4096, seed=1) != exponential_lengths(64, 4096, seed=2)


def test_heads_replace_each_batchs_own_and_a_filter_narrows() -> None:
    shapes = named_shapes(["even"], heads=[5], parts=["S4096"])
    assert [shape.name for shape in shapes] == [f"B{b} S4096 H5" for b in (1, 16, 64, 128)]
    assert all(shape.num_heads == 5 for shape in shapes)
    # the batch of four lengths has H16 alone unless asked
    four = [shape.num_heads for shape in named_shapes(["ragged"]) if shape.num_seqs == 4]
    assert four == [16]
    assert len(named_shapes(["ragged"], heads=[8, 128])) == 4


def test_a_whole_name_is_that_shape_alone_and_a_part_is_all_that_contain_it() -> None:
    def names(*parts: str) -> list[str]:
        return [shape.name for shape in named_shapes(["pages"], parts=parts)]

    assert names("B64 S4096 H16") == ["B64 S4096 H16"]
    assert names("B64 S4096 H1") == [
        "B64 S4096 H16",
        "B64 S4096 H16 p1",
        "B64 S4096 H128",
        "B64 S4096 H128 p1",
    ]
    assert names("B64 S4096 H16", "B128") == ["B64 S4096 H16", "B128 S4096 H16", "B128 S4096 H16 p1"]
    assert names("nothing") == []


def test_what_std_has_not_is_looked_for_in_extra() -> None:
    def names(*parts: str) -> list[str]:
        return [shape.name for shape in find_shapes("std", parts=parts)]

    assert names() == [shape.name for shape in named_shapes(["std"])]
    assert names("B64 S4096") == ["B64 S4096 H16", "B64 S4096 H128"]
    assert names("S16384") == ["B128 S16384 H128"]
    assert names("q3", "B64 S4096 H17") == ["B128 S4096 H16 q3", "B64 S4096 H17"]
    assert names("heads") == [f"B64 S4096 H{count}" for count in HEAD_COUNTS]
    assert names("queries") == ["B128 S4096 H16", *(f"B128 S4096 H16 q{n}" for n in (2, 3, 4))]
    assert names("nothing") == []


def test_the_extra_rows_are_of_what_they_are_called() -> None:
    extra = {shape.name: shape for shape in named_shapes(["extra"])}
    assert (extra["B64 S4096 H16 p1"].page_size, extra["B64 S4096 H16"].page_size) == (1, None)
    assert extra["B128 S4096 H16 q4"].q_len == 4
    parts = named_shapes(["long", "pages", "queries", "heads"])
    assert sorted(extra) == sorted(shape.name for shape in parts)
    # behind each full tile of 16 rows there is a row more, and the ends are there
    assert {1, 16, 17, 32, 33, 48, 49, 64, 65, 128} <= set(HEAD_COUNTS)
    assert sorted(HEAD_COUNTS) == list(HEAD_COUNTS)


def test_work_is_counted_as_a_hand_does_it() -> None:
    shape = DecodeShape("x", (3, 5), num_heads=2, q_len=2)
    # query 0 of a length n sees n - 1 keys, query 1 sees n
    assert shape.flops() == 2 * 2 * (2 + 3 + 4 + 5) * (576 + 512)
    assert shape.bytes_moved(itemsize=2) == 2 * (8 * 576 + 4 * 2 * (576 + 512))
    assert (shape.num_seqs, shape.num_tokens) == (2, 4)


@pytest.mark.parametrize(("sets", "heads"), [(["huge"], None), (["tiny"], [0])])
def test_unknown_sets_and_heads_are_refused(sets: list[str], heads: list[int] | None) -> None:
    with pytest.raises(InvalidArgument) as caught:
        named_shapes(sets, heads)
    assert caught.value.argument in ("shapes", "heads")
