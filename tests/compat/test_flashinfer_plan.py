"""What a plan of FlashInfer's wrapper keeps: the batch, the workspace, the backend."""

from __future__ import annotations

import math

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

from pagedmla.compat.flashinfer import BatchMLAPagedAttentionWrapper


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
    assert decodes[0][1]["backend"] == "torch"
