"""What is held against whom: nan around the tokens, faults that do not come again, refusals and declared conventions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.asking import ask
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.findings import Finding, blame_nan_once
from pagedmla.conformance.properties import properties_of
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Subject

CPU = torch.device("cpu")
SMALL = Configuration(
    "small", {"num_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "page_size": 16}, most_keys=40
)
Answer = tuple[Tensor, Tensor | None]


class Changed(Ours):
    """Ours with its answer changed."""

    def __init__(self, change: Callable[[Call, Tensor, Tensor], Answer], **fields: Any) -> None:
        super().__init__("torch")
        self.change, self.fields = change, fields

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        return replace(super().conventions_for(spec, options, device), **self.fields)

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        prepared = super().prepare(call, options, out, lse)

        def run() -> Answer:
            result, result_lse = prepared.run()
            assert result_lse is not None
            return self.change(call, result, result_lse)

        return PreparedCall(run)


def page_tails_leak(call: Call, out: Tensor, lse: Tensor) -> Answer:
    """What lies behind the last token is multiplied by a weight of 0."""
    return out + 0.0 * call.kv_cache.sum().to(out.dtype), lse


def findings(adapter: Adapter, *kinds: str) -> list[Finding]:
    subject = Subject(adapter, CPU)
    return [ask(prop, subject, SMALL, examples=8, seed=0) for kind in kinds for prop in properties_of(kind)]


def test_a_leak_of_nan_is_never_without_a_finding() -> None:
    """Where its kind was not asked, whatever it breaks is reported, with the cause beside it."""
    found = findings(Changed(page_tails_leak), "PAGE")
    assert {finding.status for finding in found} == {"failed"}
    assert all(finding.only_with_nan and finding.reproducer for finding in found)
    assert blame_nan_once(found) == found


def test_a_leak_of_nan_is_held_against_its_own_kind_where_that_was_asked() -> None:
    found = blame_nan_once(findings(Changed(page_tails_leak), "MEM", "PAGE", "MODEL"))
    statuses = {kind: {f.status for f in found if f.kind == kind} for kind in ("MEM", "PAGE", "MODEL")}
    assert "failed" in statuses["MEM"]
    assert statuses["PAGE"] == statuses["MODEL"] == {"passed"}
    assert all("see MEM" in f.detail for f in found if f.kind == "PAGE")


def test_other_failures_stand_beside_a_leak() -> None:
    leak = Finding("MEM", "poison", "p", "small", "failed")
    other = Finding("PAGE", "moved-pages", "p", "small", "failed", detail="wrong")
    assert blame_nan_once([leak, other]) == [leak, other]


def test_a_fault_with_a_memory_is_kept_and_not_blamed_on_nan() -> None:
    calls = []

    def third_call_is_wrong(call: Call, out: Tensor, lse: Tensor) -> Answer:
        calls.append(call)
        return (2 * out if len(calls) == 3 else out), lse

    found = ask(
        properties_of("NUM")[0], Subject(Changed(third_call_is_wrong), CPU), SMALL, examples=8, seed=0
    )
    assert found.status == "failed"
    assert not found.only_with_nan


def test_a_wrong_dtype_of_out_is_found_and_a_declared_one_is_not() -> None:
    def widened(call: Call, out: Tensor, lse: Tensor) -> Answer:
        return out.float(), lse

    prop = properties_of("MODEL")[0]
    found = ask(prop, Subject(Changed(widened), CPU), SMALL, examples=4, seed=0)
    assert found.status == "failed"
    assert "out has dtype torch.float32 where torch.bfloat16 is right" in found.detail
    declared = Changed(widened, out_dtype=torch.float32)
    assert ask(prop, Subject(declared, CPU), SMALL, examples=4, seed=0).status == "passed"


def test_an_lse_that_is_declared_away_is_not_looked_at() -> None:
    adapter = Changed(lambda call, out, lse: (out, torch.zeros_like(lse)), lse_base=None)
    assert {finding.status for finding in findings(adapter, "PAGE")} == {"passed"}
    wrong = Changed(lambda call, out, lse: (out, torch.zeros_like(lse)), lse_base=math.e)
    assert "failed" in {finding.status for finding in findings(wrong, "PAGE")}


def test_not_implemented_is_a_refusal_and_another_error_is_not() -> None:
    class Small(Ours):
        error: type[Exception] = NotImplementedError

        def prepare(
            self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
        ) -> Prepared:
            if call.page_size != 16:
                raise self.error("pages of 16")
            return super().prepare(call, options, out, lse)

    prop = next(prop for prop in properties_of("PAGE") if prop.name == "page-sizes")
    adapter = Small("torch")
    assert ask(prop, Subject(adapter, CPU), SMALL, examples=8, seed=0).status in ("passed", "refused")
    adapter.error = RuntimeError
    assert ask(prop, Subject(adapter, CPU), SMALL, examples=8, seed=0).status == "failed"


def test_an_adapter_without_a_call_says_so() -> None:
    with pytest.raises(TypeError, match="prepare"):
        Adapter().prepare(None, {})  # type: ignore[arg-type]
