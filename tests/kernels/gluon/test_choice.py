"""Which kernel decodes a call, with how many programs, and how much memory they need between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gluon_backend import RANK, args_of, arguments, make_batch, problem_of

from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.dispatch import backend_for
from pagedmla.kernels import gluon
from pagedmla.kernels.gluon import choice
from pagedmla.kernels.gluon.choice import Choice, choose, few_heads, lanes_for, many_heads, possible_choices
from pagedmla.kernels.gluon.workspace import PartialsLayout
from pagedmla.kernels.policy import GLUON_FEW_HEADS_CONFIG, GLUON_MANY_HEADS_CONFIG

H200 = KNOWN_TARGETS["sm_90"]


def make_call(q_lens: list[int] | None, num_heads: int) -> dict[str, Any]:
    """Three sequences; None: one query token each, and no query starts."""
    call = arguments(
        make_batch([70, 0, 130], q_lens, num_heads=num_heads, q_dtype=torch.float16), device="cpu"
    )
    return call if q_lens is not None else call | {"cu_seqlens_q": None}


@pytest.mark.parametrize(
    ("num_heads", "q_lens", "options", "kernel", "lanes"),
    [
        (16, None, {}, "few_heads", 1),
        (16, None, {"schedule": "persistent"}, "few_heads", 1),
        (1, None, {}, "few_heads", 1),
        (8, [2, 2, 2], {}, "few_heads", 1),
        (5, [3, 3, 3], {}, "few_heads", 1),
        (16, [1, 0, 1], {}, "few_heads", 1),
        (16, [1, 1, 1], {"max_q_len": 1}, "few_heads", 1),
        # the average says few, the promise says many; and the other way round
        (8, [2, 1, 0], {"max_q_len": 5}, "many_heads", 1),
        (8, [3, 3, 3], {"max_q_len": 2}, "few_heads", 1),
        (17, None, {}, "many_heads", 1),
        (16, [2, 2, 2], {}, "many_heads", 1),
        (64, None, {}, "many_heads", 1),
        (65, None, {}, "many_heads", 2),
        (128, None, {}, "many_heads", 2),
        (128, [2, 0, 1], {}, "many_heads", 2),
        (128, [2, 0, 2], {}, "many_heads", 4),
        (96, [2, 2, 2], {"max_q_len": 2}, "many_heads", 3),
    ],
    ids=str,
)  # fmt: skip
def test_which_kernel_decodes_a_call(
    num_heads: int, q_lens: list[int] | None, options: dict[str, Any], kernel: str, lanes: int
) -> None:
    found = choose(args_of(make_call(q_lens, num_heads), **options), 132)
    assert (found.kernel, found.lanes, found.programs) == (kernel, lanes, 132)
    assert found in possible_choices(args_of(make_call(q_lens, num_heads)).problem(), 132)


@pytest.mark.parametrize(
    ("row_tiles", "lanes"),
    # as many as leave no row tile empty, and of these the most: five and seven have no such number but 1
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 3), (7, 1), (8, 4), (9, 3), (10, 2), (12, 4), (16, 4)],
)
def test_lanes_leave_no_row_tile_empty(row_tiles: int, lanes: int) -> None:
    for rows in (64 * row_tiles - 63, 64 * row_tiles):
        assert lanes_for(rows) == lanes
    assert row_tiles % lanes == 0


def test_no_rows_have_a_choice_too() -> None:
    assert lanes_for(0) == 1


@pytest.mark.parametrize(
    ("compute_units", "lanes", "programs"),
    [
        (132, 1, 132),
        (132, 3, 132),
        (114, 4, 112),
        (132, 4, 132),
        (300, 1, 256),
        (300, 3, 255),
        (3, 4, 3),
        (1, 2, 1),
    ],
)
def test_programs_are_resident_and_alike_in_each_lane(compute_units: int, lanes: int, programs: int) -> None:
    """One for each compute unit, none for which a lane has no neighbour, and no more than there are flags for."""
    found = many_heads(lanes, compute_units)
    assert found.programs == programs <= compute_units
    assert found.programs % found.lanes == 0
    assert found.lanes == min(lanes, compute_units)
    assert found.group_rows == 64 * found.lanes
    assert few_heads(compute_units).programs == min(compute_units, 256)


@pytest.mark.parametrize(
    ("found", "teams", "programs", "rows", "columns"),
    [(few_heads(3), 1, 3, 16, 512), (many_heads(1, 3), 2, 3, 64, 256), (many_heads(3, 132), 6, 44, 64, 256)],
    ids=str,
)  # fmt: skip
def test_each_team_has_two_slots_and_flags_for_each_of_its_programs(
    found: Choice, teams: int, programs: int, rows: int, columns: int
) -> None:
    layout = found.layout
    assert layout == PartialsLayout(teams, programs, rows, columns)
    slots = 2 * teams * programs
    assert layout.num_bytes == slots * (programs * 8 + rows * 4 + rows * columns * 4) + 16
    parts = layout.carve(None, torch.device("cpu"))
    assert (parts.flags.dtype, parts.flags.numel()) == (torch.int64, slots * programs)
    assert (parts.partial_lse.dtype, parts.partial_lse.numel()) == (torch.float32, slots * rows)
    assert (parts.partial_out.dtype, parts.partial_out.numel()) == (torch.float32, slots * rows * columns)
    # one part after the other, and none over another
    places = [(part.data_ptr(), part.numel() * part.element_size()) for part, _ in parts.views]
    assert [begin + size for begin, size in places[:-1]] == [begin for begin, _ in places[1:]]
    assert places[-1][0] + places[-1][1] <= parts.memory.data_ptr() + layout.num_bytes


def test_a_workspace_that_is_too_small_or_cannot_hold_flags_is_refused() -> None:
    layout = few_heads(3).layout
    size = layout.num_bytes
    layout.carve(torch.zeros(size, dtype=torch.uint8), torch.device("cpu"))
    with pytest.raises(InvalidArgument, match=f"at least {size} bytes"):
        layout.carve(torch.zeros(size - 1, dtype=torch.uint8), torch.device("cpu"))
    odd = torch.frombuffer(bytearray(size + 64), dtype=torch.uint8)
    odd = torch.frombuffer(bytearray(size + 64), dtype=torch.uint8, offset=-odd.data_ptr() % 8 + 4)
    assert odd.untyped_storage().data_ptr() % 8 == 4
    with pytest.raises(InvalidArgument, match="multiple of 8 bytes"):
        layout.carve(odd, torch.device("cpu"))


def wide(call: dict[str, Any], columns: int) -> dict[str, Any]:
    """The call with a table of so many columns, all of them the same memory."""
    return call | {"block_table": call["block_table"][:, :1].expand(-1, columns)}


@pytest.mark.parametrize("num_heads", [16, 20, 130])
def test_tables_that_name_more_tiles_than_a_kernel_counts_go_to_triton_or_are_refused(
    num_heads: int,
) -> None:
    call = make_call(None, num_heads)
    problem = args_of(call).problem()
    # of this machine, which the tensors are on
    found = choose(args_of(call), torch.get_num_threads())
    # a group of row tiles more for each program of a lane, and each counts some tiles more than it has
    groups = 3 * -(-num_heads // found.group_rows) + found.team_programs
    fits = -(-(2**22 * found.team_programs) // groups) - 1 - choice._EXTRA_TILES
    assert backend_for(args_of(wide(call, fits)), problem, H200, None) == "gluon"
    large = args_of(wide(call, fits + 1))
    assert backend_for(large, problem, H200, None) == "triton"
    with pytest.raises(Unsupported) as caught:
        backend_for(large, problem, H200, "gluon")
    (refusal,) = caught.value.refusals
    assert (refusal.backend, refusal.code, refusal.argument) == ("gluon", "num_tiles", "block_table")
    assert str([3, fits + 1]) in refusal.got


@pytest.mark.parametrize("num_heads", [8, 24])
def test_a_workspace_is_large_enough_for_either_kernel_and_any_number_of_lanes(num_heads: int) -> None:
    call = make_call([1, 2, 1], num_heads)
    problem, bounds = problem_of(call, 2)
    size = gluon.workspace_size(problem, bounds, H200)
    choices = possible_choices(problem, 132)
    assert {found.lanes for found in choices if found.config is GLUON_MANY_HEADS_CONFIG} == {1, 2, 3, 4}
    assert (few_heads(132) in choices) == (num_heads <= GLUON_FEW_HEADS_CONFIG.block_rows)
    for found in choices:
        assert size >= found.layout.num_bytes + call["q"].numel() * 2
    # two slots for each program, of 64 rows
    assert size >= 2 * 132 * 64 * RANK * 4
