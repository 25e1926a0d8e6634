"""What a plan of FlashInfer's wrapper keeps: the batch, the workspace, the backend."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from batches import check, same_bits
from compat.flashinfer_calls import (
    NATURAL,
    NO_WORKSPACE,
    attend,
    call_of,
    csr,
    inputs,
    planned,
    record_decodes,
    statics,
)

from pagedmla import kernels
from pagedmla.compat.flashinfer import BatchMLAPagedAttentionWrapper
from pagedmla.contract import support
from pagedmla.contract.support import Refusal


def test_what_the_caller_does_to_its_tensors_after_plan_changes_nothing() -> None:
    call = call_of([40, 0, 17], [2, 1, 2])
    expected = attend(call)
    given_ = {name: tensor.clone() for name, tensor in csr(call).items()}
    wrapper = BatchMLAPagedAttentionWrapper(NO_WORKSPACE)
    wrapper.plan(**given_, **statics(call))
    for tensor in given_.values():
        tensor.fill_(-1)
    for apart in (False, True):
        found = wrapper.run(**inputs(call, apart), **NATURAL)
        check(found, call)
        assert same_bits(found[1:], expected[1:])


def test_the_workspace_is_the_callers_where_it_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    decodes = record_decodes(monkeypatch)
    call = call_of([131, 0, 17], [2, 1, 2])
    expected = attend(call)
    buffer = torch.full((2**25,), math.nan)
    wrapper = planned(call, float_workspace_buffer=buffer)
    found = wrapper.run(**inputs(call), **NATURAL)
    assert same_bits(found, expected)
    assert decodes[-1][1]["workspace"].data_ptr() == buffer.data_ptr()
    small = planned(call, float_workspace_buffer=torch.empty(10, dtype=torch.uint8))
    made = small.run(**inputs(call), **NATURAL)
    assert same_bits(made, expected)
    first = decodes[-1][1]["workspace"].data_ptr()
    small.plan(**csr(call), **statics(call))
    small.run(**inputs(call))
    assert decodes[-1][1]["workspace"].data_ptr() == first


@pytest.mark.parametrize("backend", ["auto", "fa2", "fa3", "torch"])
def test_their_backends_mean_our_choice(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decodes = record_decodes(monkeypatch)
    call = call_of([20, 3])
    check(planned(call, backend=backend).run(**inputs(call), **NATURAL), call)
    assert decodes[0][1]["backend"] == ("torch" if backend == "torch" else None)


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The best backend, "picky", takes every problem, and reads packed caches alone; what it ran on, as strides."""
    ran: list[str] = []
    module = ModuleType("picky_backend")
    own = kernels.load("torch")

    def refuses_tensors(args: Any) -> Refusal | None:
        if args.kv_cache.is_contiguous():
            return None
        return Refusal("picky", "strides", "kv_cache", "a packed cache", str(args.kv_cache.stride()))

    def decode(args: Any, *rest: Any) -> None:
        ran.append(str(args.kv_cache.stride()))
        own.decode(args, *rest)

    members = {"refuses_tensors": refuses_tensors, "decode": decode, "workspace_size": own.workspace_size}
    for name, value in members.items():
        setattr(module, name, value)
    row = support.BackendSupport("picky", "packed caches alone", rules=())
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(kernels.MODULES, "picky", module.__name__)
    monkeypatch.setattr(support, "BACKENDS", {"picky": row, **support.BACKENDS})
    for cached in (support.choose_backend, support.refusals):
        cached.cache_clear()
    yield ran
    for cached in (support.choose_backend, support.refusals):
        cached.cache_clear()


def test_a_cache_that_the_best_backend_cannot_read_goes_to_the_next(picky: list[str]) -> None:
    """The plan does not know the tensors yet: it leaves the choice to the run, and has memory for either."""
    call = call_of([20, 3])
    wrapper = planned(call)
    check(wrapper.run(**inputs(call), **NATURAL), call)
    assert len(picky) == 1
    wide = torch.cat([call["kv_cache"], call["kv_cache"]], dim=-1)[..., : call["kv_cache"].shape[-1]]
    check(wrapper.run(**inputs(call | {"kv_cache": wide}), **NATURAL), call)
    assert len(picky) == 1
