"""An option that an implementation refuses ends in a refusal: no property dies of it, and what it takes is still asked."""

from __future__ import annotations

import math

import pytest
import torch
from conformance.properties.questions import CPU, SMALL

from pagedmla.conformance.adapters.adapter import Conventions, Options
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.asking import WatchedSubject, ask
from pagedmla.conformance.findings import Finding
from pagedmla.conformance.properties import KINDS, properties_of
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.reproducer import show
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Refused, Step, Subject
from pagedmla.contract.errors import Unsupported

_WHY = "takes no batch_invariant"


class NoInvariantMode(Ours):
    """As the Gluon backend: it claims the option, says no when it is asked, and has no conventions for what it refuses."""

    def __init__(self) -> None:
        super().__init__("torch")

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        return _WHY if options.get("batch_invariant") else super().refuses(spec, options, device)

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        if self.refuses(spec, options, device) is not None:
            raise Unsupported("batch_invariant", "batch_invariant", "False", "True")
        return super().conventions_for(spec, options, device)


# WIDTH reserves a large pool, and PERF is for devices
ASKED = [prop for kind in KINDS if kind not in ("WIDTH", "PERF") for prop in properties_of(kind)]
ABOUT_THE_OPTION = ("batch-invariance", "unrolled-bits")


def found(prop: Property) -> Finding:
    return ask(prop, WatchedSubject(NoInvariantMode(), CPU), SMALL, examples=8, seed=0)


@pytest.mark.parametrize("prop", ASKED, ids=lambda prop: f"{prop.kind}-{prop.name}")
def test_a_refused_option_is_no_accident(prop: Property) -> None:
    finding = found(prop)
    assert not finding.bad, finding.detail
    if prop.name in ABOUT_THE_OPTION:
        assert (finding.status, finding.detail) == ("refused", _WHY)
    else:
        assert finding.status == "passed", finding.detail
        assert finding.examples


def test_conventions_are_asked_for_what_is_taken_alone() -> None:
    subject, spec = Subject(NoInvariantMode(), CPU), SMALL.spec((5,))
    assert subject.conventions(spec, {}).lse_base == math.e
    with pytest.raises(Refused, match=_WHY):
        subject.conventions(spec, {"batch_invariant": True})


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"no_such_option": 1}])
def test_a_refused_call_can_be_shown(options: Options) -> None:
    shown = show(NoInvariantMode(), Step(SMALL.spec((5,)), options), CPU)
    assert shown.lse_base == math.e
    assert next(iter(options)) in shown.lines
