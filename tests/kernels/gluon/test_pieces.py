"""Row tiles that several programs share: whatever the workspace holds, and whatever it served for before."""

from __future__ import annotations

import pytest
import torch
from batches import same_bits
from gluon_backend import (
    DEVICE,
    EVEN,
    args_of,
    arguments,
    checked,
    make_batch,
    needs_hopper,
    run,
    workspace_of,
)
from torch import Tensor

from pagedmla.contract.target import Target
from pagedmla.kernels.gluon.choice import Choice, choose
from pagedmla.kernels.gluon.pieces import PUBLISHED

# the oracle's matrices are large here
pytestmark = [needs_hopper, pytest.mark.all_threads]

# few rows; many in one lane to four
HEADS = (16, 20, 128, 192, 256)
FILLS = {
    "ones": lambda workspace: workspace.fill_(0xFF),
    "zeros": lambda workspace: workspace.zero_(),
    "nan": lambda workspace: workspace.fill_(0x7F),
    "noise": lambda workspace: workspace.random_(0, 256),
}


def _flags(call: dict, workspace: Tensor) -> Tensor:
    choice = choose(args_of(call), Target.detect(DEVICE).compute_units)
    return choice.layout.carve(workspace, DEVICE).flags


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("num_heads", HEADS)
def test_a_workspace_may_hold_anything_and_its_flags_are_left_as_they_were_or_0(
    num_heads: int, fill: str
) -> None:
    """Cut into many pieces, into few and into none.  The second launch finds what the first one left."""
    call = arguments(make_batch([20000, 0, 131, 3000, 1], num_heads=num_heads, spread=0.7)) | EVEN
    plain = checked(call)
    workspace = FILLS[fill](workspace_of(call))
    flags = _flags(call, workspace)
    before = flags.clone()
    assert not bool((before == PUBLISHED.value).any())
    for _ in range(3):
        assert same_bits(plain, run(call, workspace=workspace))
        assert bool(((flags == 0) | (flags == before)).all())
    # somebody waited for somebody
    assert bool((flags == 0).any())


@pytest.mark.parametrize("num_heads", HEADS)
def test_zeros_stay_zeros(num_heads: int) -> None:
    """Ragged queries, and row tiles in more pieces than a sequence has programs elsewhere."""
    q_lens = [1, 0, 2, 1]
    call = arguments(make_batch([30000, 40, 700, 0], q_lens, num_heads=num_heads, spread=0.7))
    workspace = workspace_of(call, 0)
    flags = _flags(call, workspace)
    checked(call, workspace=workspace)
    assert not bool(flags.any())


def test_a_workspace_is_never_cleared_and_may_have_served_any_other_shape(launched: list[Choice]) -> None:
    """Flags stand where a kernel and its lanes want them; what one launch leaves must not look published to another."""
    calls = [
        arguments(make_batch(lens, q_lens, num_heads=num_heads, spread=0.7))
        for lens, q_lens, num_heads in (
            ([9000, 40], None, 16),
            ([300] * 40, None, 8),
            ([20000], [3], 5),
            ([5, 0, 7000], [0, 2, 1], 4),
            ([130] * 300, None, 1),
            ([3000, 3000], [1, 1], 128),
            ([9000, 0, 77], [1, 3, 2], 20),
            ([20000], None, 192),
            ([640] * 140, None, 64),
            ([5000, 3], [2, 2], 128),
        )
    ]
    workspace = max((workspace_of(call) for call in calls), key=len)
    expected = [checked(call) for call in calls]
    assert {choice.kernel for choice in launched} == {"few_heads", "many_heads"}
    assert {choice.lanes for choice in launched} == {1, 2, 3, 4}
    count = len(calls)
    orders = (
        range(count),
        range(count - 1, -1, -1),
        [index * 3 % count for index in range(count)],
        [0, 0, 7, 7, 0, 5, 0, 6, 0, 9],
    )
    for order in orders:
        for index in order:
            assert same_bits(expected[index], run(calls[index], workspace=workspace)), index
            assert not bool((_flags(calls[index], workspace) == PUBLISHED.value).any()), index
    # another backend's numbers in between
    for index in (0, 5):
        run(calls[index], workspace=workspace, backend="triton")
        assert same_bits(expected[index], run(calls[index], workspace=workspace))


@pytest.mark.parametrize("start", [0, 1, 8, 15])
@pytest.mark.parametrize("num_heads", [16, 20, 192])
def test_nothing_around_a_workspace_is_written(num_heads: int, start: int) -> None:
    call = arguments(make_batch([9000, 0, 131], num_heads=num_heads, spread=0.7)) | EVEN
    size = len(workspace_of(call))
    storage = torch.full((size + 64,), 0xA5, dtype=torch.uint8, device=DEVICE)
    workspace = storage[start : start + size].fill_(0xFF)
    assert same_bits(checked(call, workspace=workspace), run(call))
    assert bool((storage[:start] == 0xA5).all() & (storage[start + size :] == 0xA5).all())


@pytest.mark.parametrize(
    "lens",
    [
        [4097, 0, 9001, 131, 6144, 1, 2048],
        [641, 45118, 1730, 1696],
        [65536],
        # as many for each program, and shares that are cut alike
        [1024] * 132,
        [1024] * 64,
        [4096] * 16,
        # whole row tiles, and some programs left over
        [1024] * 131,
        # a border that moves to an end that is near
        [64 * 33] * 40 + [64 * 34] * 40,
    ],
    ids=lambda lens: f"{len(lens)}x{max(lens)}",
)  # fmt: skip
@pytest.mark.parametrize("num_heads", [16, 20])
def test_few_pieces_and_many(num_heads: int, lens: list[int]) -> None:
    checked(arguments(make_batch(lens, num_heads=num_heads, spread=0.7)) | EVEN)
