"""Fixtures of the vLLM plug-in's tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
from integrations.vllm import stand_in


@pytest.fixture
def modules() -> Iterator[dict[str, ModuleType]]:
    """The stand-in's modules, importable as vllm."""
    with stand_in.installed() as found:
        yield found


@pytest.fixture
def backend(modules: dict[str, ModuleType]) -> ModuleType:
    """The adapter, over the stand-in."""
    return importlib.import_module("pagedmla.integrations.vllm.backend")
