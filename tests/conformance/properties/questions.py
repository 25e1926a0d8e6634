"""What the tests of the properties share: what is asked, of whom, and what is expected to come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedmla
from pagedmla.conformance.adapters.adapter import Adapter, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration, configurations_for
from pagedmla.conformance.examine import Verdict, examine
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.subject import Subject

Raw = tuple[Tensor, Tensor | None]
Decoded = tuple[Tensor, Tensor]

CPU = torch.device("cpu")
SMALL = Configuration(
    "small", {"num_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "page_size": 16}, most_keys=150
)
TENSORS = ("q", "kv_cache", "block_table", "seq_lens")

each_configuration = pytest.mark.parametrize(
    "configuration", configurations_for(Ours("torch"), CPU), ids=lambda configuration: configuration.name
)


def each(properties: Sequence[Property]) -> pytest.MarkDecorator:
    """Asks for ``prop`` by ``prop``."""
    return pytest.mark.parametrize("prop", properties, ids=lambda prop: prop.name)


def each_fault(faults: Sequence[tuple[str, Any]]) -> pytest.MarkDecorator:
    """``name`` of the property that catches it, and ``faulty``: an adapter, or what one is made of."""
    return pytest.mark.parametrize(
        ("name", "faulty"),
        faults,
        ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
    )


def verdict(
    adapter: Adapter, prop: Property, configuration: Configuration = SMALL, examples: int = 30
) -> Verdict:
    """What ``prop`` says of ``adapter``; a failing example is not made smaller."""
    scope = Scope(adapter, configuration, CPU)
    return examine(prop, Subject(adapter, CPU), scope, max_examples=examples, shrink_seconds=0.0)


def expect_kept(
    adapter: Adapter, prop: Property, configuration: Configuration = SMALL, examples: int = 30
) -> Verdict:
    """As ``verdict``, which must be that the promise is kept."""
    found = verdict(adapter, prop, configuration, examples)
    assert found.status == "passed", f"{found.status}: {found.detail}\n{found.example}"
    return found


def expect_broken(adapter: Adapter, prop: Property, examples: int = 30) -> Verdict:
    """As ``verdict``, which must be that the promise is broken, with the calls that show it."""
    found = verdict(adapter, prop, examples=examples)
    assert found.status == "failed", found
    assert found.steps, found
    return found


class Faulty(Ours):
    """The torch backend with one fault: in what it makes of a call, or in what it makes of the result."""

    def __init__(
        self, change: Callable[[Call], Call] | None = None, spoil: Callable[[Call, Raw], Raw] | None = None
    ) -> None:
        super().__init__("torch")
        self.change, self.spoil = change, spoil

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        prepared = super().prepare(self.change(call) if self.change else call, options, out, lse)
        spoil = self.spoil
        return prepared if spoil is None else PreparedCall(lambda: spoil(call, prepared.run()))


def unclaimed(adapter: Adapter) -> Adapter:
    """The same without the claim that one kernel runs tensors however they lie: as an automatic choice of kernels."""
    other = copy(adapter)
    other.features = adapter.features - {"one_kernel"}
    return other


def nudged(result: Raw) -> Raw:
    """The same but for the last bit of each logarithm, far inside every bound."""
    out, lse = result
    assert lse is not None
    lse.copy_(torch.where(lse.isfinite(), torch.nextafter(lse, torch.tensor(torch.inf)), lse))
    return out, lse


class Answering(Ours):
    """Takes what the torch backend takes, and answers with what ``fault`` makes of the call and its options."""

    def __init__(self, fault: Callable[[Call, Options], Decoded]) -> None:
        super().__init__("torch")
        self.fault = fault

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        def run() -> Raw:
            own_out, own_lse = self.fault(call, options)
            return own_out if out is None else out.copy_(own_out), own_lse if lse is None else lse.copy_(
                own_lse
            )

        return PreparedCall(run)


def right(call: Call, options: Options, **changes: Any) -> Decoded:
    """The torch backend on a call of which some arguments are changed."""
    tensors = {name: changes.pop(name, getattr(call, name)) for name in TENSORS}
    return pagedmla.decode(
        *tensors.values(), **{**call.semantics(), **options, "backend": "torch", **changes}
    )
