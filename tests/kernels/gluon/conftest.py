"""What the value tests of the Gluon kernel share."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pagedmla.contract.target import Target


@pytest.fixture
def few_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three programs in the persistent schedule: each goes through several segments, whole and cut ones."""
    from pagedmla.kernels.gluon import launch

    detect = Target.detect
    monkeypatch.setattr(
        launch, "Target", SimpleNamespace(detect=lambda device: replace(detect(device), compute_units=3))
    )
