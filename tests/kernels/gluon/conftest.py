"""What the value tests of the Gluon kernels share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from gluon_backend import DEVICE

from pagedmla.contract.target import Target
from pagedmla.kernels.gluon.choice import Choice
from pagedmla.kernels.repeat import MEMO


@pytest.fixture
def set_compute_units(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the number of compute units that a launch sees, and so that of its programs."""
    from pagedmla.kernels.gluon import launch

    detect = Target.detect

    def setter(count: int) -> None:
        # a call that is known is repeated with what was chosen then
        MEMO.clear()
        there = SimpleNamespace(detect=lambda device: replace(detect(device), compute_units=count))
        monkeypatch.setattr(launch, "Target", there)

    return setter


@pytest.fixture
def few_workers(set_compute_units: Callable[[int], None]) -> None:
    """Three programs: each goes through several segments, whole and cut ones."""
    set_compute_units(3)


@pytest.fixture
def one_worker(set_compute_units: Callable[[int], None]) -> None:
    """One program, which has all segments whole."""
    set_compute_units(1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """What was chosen for each launch that was made through Triton: not for those of a call that is known from before."""
    from pagedmla.kernels.gluon import launch

    seen: list[Choice] = []
    right = launch.choose

    def choose(*given: Any) -> Choice:
        seen.append(right(*given))
        return seen[-1]

    monkeypatch.setattr(launch, "choose", choose)
    return seen


@pytest.fixture
def set_lanes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Choice]:
    """Sets the number of lanes of every many-heads launch that follows, whatever the call."""
    from pagedmla.kernels.gluon import launch
    from pagedmla.kernels.gluon.choice import many_heads

    def setter(count: int) -> Choice:
        # a call that is known is repeated with what was chosen then
        MEMO.clear()
        found = many_heads(count, Target.detect(DEVICE).compute_units)
        monkeypatch.setattr(launch, "choose", lambda args, compute_units: found)
        return found

    return setter
