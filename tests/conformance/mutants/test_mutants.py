"""Broken kernels, each with one fault that libraries really had: a property of the fault's kind must catch every one.

A check that cannot fail proves nothing; these show that each kind's can, and that a kernel without a fault passes all.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from conformance.mutants.adapter import KernelAdapter
from conformance.mutants.faults import (
    arch,
    dcp,
    empty,
    fp8,
    graph,
    lse,
    mem,
    model,
    num,
    page,
    qlen,
    shape,
    split,
    sync,
    view,
    width,
)
from conformance.mutants.kernel import Kernel

from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.examine import Verdict, examine
from pagedmla.conformance.properties import KINDS, properties_of
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.subject import Subject

CPU = torch.device("cpu")
_SMALL = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "page_size": 16}
FEW_HEADS = Configuration("h4 p16 32+8 bf16", {**_SMALL, "num_heads": 4}, most_keys=150)
FLOAT8 = Configuration(
    "h4 p16 32+8 bf16/e4m3fn", {**_SMALL, "num_heads": 4, "kv_dtype": "e4m3fn"}, most_keys=150
)
# folded to tiles of 16 heads, and slow
MANY_HEADS = Configuration("h128 p16 32+8 bf16", {**_SMALL, "num_heads": 128}, most_keys=40)
CONFIGURATIONS = (FEW_HEADS, FLOAT8, MANY_HEADS)
EXAMPLES_OF_THE_UNBROKEN = {FEW_HEADS.name: 10, FLOAT8.name: 5, MANY_HEADS.name: 2}
ATTEMPTS = ((FEW_HEADS, 5), (FLOAT8, 5), (FEW_HEADS, 30), (MANY_HEADS, 10), (FLOAT8, 30), (MANY_HEADS, 30))
"""Examples that a mutant's properties get until one fails: most are caught at once."""

FAULTS = (
    *page.FAULTS, *width.FAULTS, *empty.FAULTS, *graph.FAULTS, *split.FAULTS, *lse.FAULTS, *mem.FAULTS, *qlen.FAULTS,
    *shape.FAULTS, *model.FAULTS, *fp8.FAULTS, *view.FAULTS, *dcp.FAULTS, *sync.FAULTS, *num.FAULTS, *arch.FAULTS,
)  # fmt: skip
# PERF is about waiting for a device and about its memory, which a CPU has not
ASKED_KINDS = tuple(sorted(set(KINDS) - {"PERF"}))


def _examine(
    kernel: type[Kernel], prop: Property, configuration: Configuration, max_examples: int
) -> Verdict | None:
    """What comes of it, or None where the property is not asked."""
    adapter = KernelAdapter(kernel)
    if prop.objection(adapter, CPU) is not None:
        return None
    scope = Scope(adapter, configuration, CPU)
    return examine(prop, Subject(adapter, CPU), scope, max_examples=max_examples, shrink_seconds=0.0)


def _failure(kernel: type[Kernel]) -> Verdict | None:
    """The first failed verdict of a property of the kernel's kind."""
    for (configuration, examples), prop in product(ATTEMPTS, properties_of(kernel.kind)):
        verdict = _examine(kernel, prop, configuration, examples)
        if verdict is not None and verdict.status == "failed":
            return verdict
    return None


def _param(kind: str, value: object, name: str) -> ParameterSet:
    """Those of WIDTH reserve a large pool."""
    return pytest.param(value, id=name, marks=[pytest.mark.large] if kind == "WIDTH" else [])


@pytest.mark.parametrize("kind", [_param(kind, kind, kind) for kind in ASKED_KINDS])
def test_the_unbroken_kernel_passes(kind: str) -> None:
    for prop in properties_of(kind):
        asked = 0
        for configuration in CONFIGURATIONS:
            verdict = _examine(Kernel, prop, configuration, EXAMPLES_OF_THE_UNBROKEN[configuration.name])
            if verdict is not None:
                assert verdict.status != "failed", (
                    prop.name,
                    configuration.name,
                    verdict.detail,
                    verdict.example,
                )
                asked += verdict.examples
        # one that is never asked, or refused each time, would show nothing
        assert asked or prop.objection(KernelAdapter(), CPU), prop.name


@pytest.mark.parametrize(
    "kernel", [_param(kernel.kind, kernel, f"{kernel.kind}-{kernel.__name__}") for kernel in FAULTS]
)
def test_a_property_of_its_kind_catches(kernel: type[Kernel]) -> None:
    verdict = _failure(kernel)
    assert verdict is not None, kernel.__doc__
    # a read outside of the memory is a fault on a device and an IndexError here; another error is a mistake in the mutant
    assert not verdict.detail.startswith("raised") or verdict.detail.startswith("raised IndexError"), (
        verdict.detail
    )


def test_there_are_faults_of_every_kind() -> None:
    assert {kernel.kind for kernel in FAULTS} == set(ASKED_KINDS)
    assert len(FAULTS) == len({kernel.__name__ for kernel in FAULTS})
