"""Our own modules with other projects' call signatures, examined through the adapters of those signatures."""

from __future__ import annotations

import math

import pytest
import torch

from pagedmla.conformance.adapters import make_adapter
from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.configurations import CONFIGURATIONS, Configuration, configurations_for
from pagedmla.conformance.examine import examine
from pagedmla.conformance.properties import properties_of
from pagedmla.conformance.properties.property import Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Refused, Subject

CPU = torch.device("cpu")
NAMES = (
    "aiter:pagedmla.compat.aiter",
    "flash_mla:pagedmla.compat.flash_mla",
    "flashinfer:pagedmla.compat.flashinfer",
)
FP8 = {"kv_dtype": "e4m3fn"}


@pytest.fixture(params=NAMES)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    found = make_adapter(request.param)
    assert found.load(None) is None
    assert found.version.startswith("pagedmla ")
    return found


def test_their_batches_are_right(adapter: Adapter) -> None:
    subject = Subject(adapter, CPU)
    for fields in (
        {"num_heads": 3, "page_size": 16},
        {"num_heads": 3, "page_size": 1, "dtype": "fp32"},
        {"num_heads": 20, "q_lens": (2, 2, 2)},
        {"num_heads": 3, "q_lens": (2, 2, 2), "causal": False, "kv_lora_rank": 256},
    ):
        for options in adapter.options:
            subject.checked(BatchSpec((131, 0, 7), **fields), options)  # type: ignore[arg-type]


def test_what_a_signature_cannot_say_is_refused(adapter: Adapter) -> None:
    subject = Subject(adapter, CPU)
    for fields, takers in (
        ({"q_lens": (2, 0, 1)}, (NAMES[0], NAMES[2])),
        ({"rows_before": 1, "rows_after": 2}, (NAMES[0],)),
        (FP8, (NAMES[0], NAMES[2])),
        ({**FP8, "dtype": "e4m3fn"}, (NAMES[0],)),
    ):
        spec = BatchSpec((40, 0, 7), num_heads=3, page_size=16, **fields)  # type: ignore[arg-type]
        if adapter.name in takers:
            subject.checked(spec, {})
        else:
            with pytest.raises(Refused):
                subject.checked(spec, {})


def test_rows_without_keys_are_promised_by_our_contract(adapter: Adapter) -> None:
    spec = BatchSpec((0, 3), num_heads=3)
    conventions = adapter.conventions_for(spec, {}, CPU)
    assert (conventions.empty_out, conventions.empty_lse, conventions.p_dtype) == (
        0.0,
        -math.inf,
        torch.float32,
    )
    assert adapter.conventions_for(spec, {"return_lse": False}, CPU).lse_base is None
    assert Subject(adapter, CPU).checked(spec, {"return_lse": False}).lse is None


def test_they_take_the_columns_that_we_take(adapter: Adapter) -> None:
    names = {configuration.name for configuration in configurations_for(adapter, CPU)}
    fp8 = {configuration.name for configuration in CONFIGURATIONS if "fp8" in configuration.tags}
    everything = {configuration.name for configuration in CONFIGURATIONS}
    assert names == (everything - fp8 if adapter.name == NAMES[1] else everything)


@pytest.mark.parametrize("name", ["moved-pages", "replayed-growth"])
def test_the_kit_finds_nothing(adapter: Adapter, name: str) -> None:
    assert "graph" in adapter.features
    scope = Scope(adapter, Configuration("small", {"num_heads": 3, "page_size": 16}, most_keys=100), CPU)
    prop = next(prop for prop in (*properties_of("PAGE"), *properties_of("GRAPH")) if prop.name == name)
    verdict = examine(prop, Subject(adapter, CPU), scope, max_examples=4)
    assert verdict.status == "passed", verdict
