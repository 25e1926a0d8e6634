"""The Gluon backend's row of the support table: what it takes, what it leaves to others, and with which numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import batches
import pytest
import torch

from pagedmla.conformance.cases import cases_for
from pagedmla.contract import rules_gluon
from pagedmla.contract.errors import Unsupported
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import (
    AXES,
    BACKENDS,
    Refusal,
    accepted_problems,
    choose_backend,
    refusals,
)
from pagedmla.contract.target import KNOWN_TARGETS, Target

H200 = KNOWN_TARGETS["sm_90"]
MANY = DecodeProblem(128, 0.07)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 17},
        {"num_heads": 16},
        {"num_heads": 1},
        {"num_heads": 5, "max_q_len": 3},
        {"num_heads": 16, "schedule": "persistent"},
        {"num_heads": 16, "causal": False, "page_size": 192},
        {"num_heads": 16, "page_size": 1},
        {"num_heads": 5, "max_q_len": 3, "page_size": 48},
        {"num_heads": 5, "max_q_len": 4},
        {"page_size": 1},
        {"page_size": 480},
        {"page_size": 128},
        {"num_heads": 17, "page_size": 16},
        {"page_size": 192},
        {"q_dtype": torch.float16, "kv_layout": "fp16"},
        {"causal": False, "max_q_len": 3},
        {"schedule": "persistent"},
    ],
    ids=str,
)
def test_what_it_takes_it_is_chosen_for(changes: dict[str, Any]) -> None:
    assert choose_backend(replace(MANY, **changes), H200) == "gluon"


@pytest.mark.parametrize(
    ("changes", "code", "argument", "number", "instead"),
    [
        ({"num_heads": 16, "schedule": "split"}, "schedule", "schedule", "'split'", "triton"),
        ({"schedule": "split"}, "schedule", "schedule", "'split'", "triton"),
        ({"num_heads": 5, "max_q_len": 3, "num_kv_splits": 2}, "num_kv_splits", "num_kv_splits", "2", "triton"),
        ({"schedule": "split", "num_kv_splits": 1}, "num_kv_splits", "num_kv_splits", "1", "triton"),
        ({"num_heads": 16, "batch_invariant": True}, "batch_invariant", "batch_invariant", "True", "triton"),
        ({"kv_lora_rank": 256}, "head_dim", "q", "256 + 64", "triton"),
        ({"qk_rope_head_dim": 0}, "head_dim", "q", "512 + 0", "triton"),
        ({"batch_invariant": True}, "batch_invariant", "batch_invariant", "True", "triton"),
        ({"kv_layout": "fp8_per_tensor"}, "dtype_pair", "kv_cache", "torch.bfloat16 with a fp8_per_tensor", "torch"),
        ({"schedule": "persistent", "num_kv_splits": 2}, "num_kv_splits", "num_kv_splits", "2", None),
        ({"num_kv_splits": 65536}, "num_kv_splits", "num_kv_splits", "65536", "torch"),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_refuses_is_named_with_the_number_and_goes_to_the_next(
    changes: dict[str, Any], code: str, argument: str, number: str, instead: str | None
) -> None:
    problem = replace(MANY, **changes)
    (found,) = refusals(problem, H200, "gluon")
    assert (found.backend, found.code, found.argument) == ("gluon", code, argument)
    assert number in found.got
    if instead is None:
        with pytest.raises(Unsupported):
            choose_backend(problem, H200)
    else:
        assert choose_backend(problem, H200) == instead


@pytest.mark.parametrize("arch", [arch for arch in KNOWN_TARGETS if arch != "sm_90"])
def test_other_gpus_are_left_to_triton(arch: str) -> None:
    found = refusals(MANY, KNOWN_TARGETS[arch], "gluon")
    assert "target" in {refusal.code for refusal in found}
    assert choose_backend(MANY, KNOWN_TARGETS[arch]) == "triton"


def test_too_little_shared_memory_is_refused_with_the_number() -> None:
    needed = rules_gluon._SHARED_BYTES
    assert refusals(MANY, Target("nvidia", "sm_90", 132, needed), "gluon") == ()
    (refusal,) = refusals(MANY, Target("nvidia", "sm_90", 132, needed - 1), "gluon")
    assert (refusal.code, refusal.argument) == ("shared_memory", "device")
    assert str(needed) in refusal.wanted
    assert str(needed - 1) in refusal.got


@pytest.fixture
def _other_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    refusals.cache_clear()
    choose_backend.cache_clear()
    yield
    refusals.cache_clear()
    choose_backend.cache_clear()


@pytest.mark.usefixtures("_other_triton")
@pytest.mark.parametrize(("version", "got"), [("3.9.0", "triton 3.9.0"), ("", "no triton")])
def test_a_triton_that_it_was_not_run_with_is_refused(
    version: str, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gluon is experimental: 3.7 renamed a word that the kernel uses."""
    monkeypatch.setattr(rules_gluon, "_triton_version", lambda: version)
    (refusal,) = refusals(MANY, H200, "gluon")
    assert (refusal.code, refusal.got) == ("import", got)
    assert choose_backend(MANY, H200) == "triton"


def test_named_on_a_cpu_it_is_refused_by_name_and_never_proposed() -> None:
    call = batches.arguments(batches.make_batch([5], num_heads=32, dims=(512, 64)), 64)
    with pytest.raises(Unsupported) as caught:
        batches.run(call, backend="gluon")
    assert (caught.value.refusals[0].code, caught.value.refusals[0].argument) == ("target", "device")
    with pytest.raises(Unsupported) as caught:
        batches.run(call, backend=None, schedule="persistent")
    assert {refusal.backend for refusal in caught.value.refusals} == {"torch"}


def test_a_backend_that_was_passed_over_is_not_chosen_and_its_reason_is_told() -> None:
    reason = Refusal("gluon", "strides", "kv_cache", "others", "these")
    assert choose_backend(MANY, H200, None, (reason,)) == "triton"
    nobodys = replace(MANY, kv_layout="fp8_ds_mla")
    with pytest.raises(Unsupported) as caught:
        choose_backend(nobodys, H200, None, (reason,))
    assert caught.value.refusals[0] is reason
    assert {refusal.backend for refusal in caught.value.refusals} == {"gluon", "triton", "torch"}


def test_weights_are_rounded_to_the_caches_dtype() -> None:
    for dtype, layout in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        assert BACKENDS["gluon"].p_dtype(replace(MANY, q_dtype=dtype, kv_layout=layout)) == dtype


def test_cases_from_the_table_visit_every_value_that_is_taken() -> None:
    """Each value of each axis that the backend takes with some number of rows is in a case that a card runs."""
    cases = cases_for(H200, "gluon")
    problems = [case.problem for case in cases]
    assert problems == accepted_problems(H200, "gluon")
    for axis in AXES:
        for sample in axis.samples:
            tries = [replace(MANY, **(rows | sample)) for rows in ({}, {"max_q_len": 16}, {"num_heads": 16})]
            taken = any(not refusals(problem, H200, "gluon") for problem in tries)
            seen = any(
                all(getattr(problem, name) == value for name, value in sample.items()) for problem in problems
            )
            assert seen == taken, sample
    assert any(case.ragged for case in cases)
    assert {problem.q_dtype for problem in problems} == {torch.bfloat16, torch.float16}
