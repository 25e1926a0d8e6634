"""The support table: what it accepts is chosen, what it refuses says why, and the samples cover it."""

from __future__ import annotations

import pickle

import pytest
import torch

from pagedmla.contract.errors import InvalidArgument, PlanMismatch, Unsupported
from pagedmla.contract.explain import explain
from pagedmla.contract.kv_layout import KV_LAYOUTS, layout_of_dtype
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.support import (
    AXES,
    BACKENDS,
    accepted_problems,
    choose_backend,
    refusals,
    sample_problems,
)
from pagedmla.contract.target import Target

CPU = Target("cpu", "x86_64", 2, 0)
H200 = Target("nvidia", "sm_90", 132, 232448, "NVIDIA H200", 4.61e12, 795e12)


def problem(**changes: object) -> DecodeProblem:
    return DecodeProblem(**({"num_heads": 16, "softmax_scale": 0.1} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("target", "backend"), [(CPU, "torch"), (H200, "torch"), (H200, "triton")])
def test_every_value_of_every_axis_is_in_an_accepted_problem_or_is_refused_everywhere(
    target: Target, backend: str
) -> None:
    accepted = accepted_problems(target, backend)
    for axis in AXES:
        for sample in axis.samples:
            alone = problem(**({"q_dtype": torch.bfloat16} | sample))
            covered = any(
                all(getattr(found, name) == value for name, value in sample.items()) for found in accepted
            )
            assert covered != bool(refusals(alone, target, backend)), sample


def test_triton_on_the_cpu_is_interpreted_named_and_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    half = problem(q_dtype=torch.float16, kv_layout="fp16")
    for value, accepted in (("1", True), ("0", False)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        refusals.cache_clear()
        choose_backend.cache_clear()
        assert choose_backend(half, CPU) == "torch"
        assert {found.code for found in refusals(problem(), CPU, "triton")} >= {"dtype_pair"}
        assert bool(refusals(half, CPU, "triton")) != accepted
        if accepted:
            assert choose_backend(half, CPU, "triton") == "triton"
    refusals.cache_clear()
    choose_backend.cache_clear()


def test_weights_are_rounded_as_the_table_says() -> None:
    half = problem(q_dtype=torch.float16, kv_layout="fp16")
    assert BACKENDS["torch"].p_dtype(half) == torch.float32
    assert BACKENDS["triton"].p_dtype(half) == torch.float16
    assert BACKENDS["triton"].p_dtype(problem()) == torch.bfloat16


def test_samples_are_distinct_and_few_enough_to_run() -> None:
    samples = list(sample_problems())
    assert len(samples) == len(set(samples))
    assert 200 < len(samples) < 3000


@pytest.mark.parametrize(
    ("changes", "code", "argument"),
    [
        ({"schedule": "persistent"}, "schedule", "schedule"),
        ({"kv_layout": "fp8_ds_mla"}, "dtype_pair", "kv_cache"),
        ({"q_dtype": torch.float8_e4m3fn}, "dtype_pair", "kv_cache"),
        ({"q_dtype": torch.float16}, "dtype_pair", "kv_cache"),
        ({"batch_invariant": True, "num_kv_splits": 2}, "num_kv_splits", "num_kv_splits"),
    ],
)
def test_refusals_are_raised_with_code_argument_wanted_and_got(
    changes: dict[str, object], code: str, argument: str
) -> None:
    with pytest.raises(Unsupported) as caught:
        choose_backend(problem(**changes), CPU, "torch")
    assert (caught.value.code, caught.value.argument) == (code, argument)
    assert caught.value.wanted in str(caught.value)
    assert caught.value.got in str(caught.value)


def test_all_reasons_are_reported_not_the_first_one() -> None:
    twice = problem(schedule="persistent", kv_layout="fp8_ds_mla")
    with pytest.raises(Unsupported) as caught:
        choose_backend(twice, CPU)
    assert {refusal.code for refusal in caught.value.refusals} == {"schedule", "dtype_pair"}
    assert {refusal.backend for refusal in caught.value.refusals} == {"torch"}
    assert "persistent" in str(caught.value)
    assert "fp8_ds_mla" in str(caught.value)


def test_an_unknown_backend_lists_the_built_ones() -> None:
    for call in (lambda: refusals(problem(), CPU, "cuda"), lambda: choose_backend(problem(), CPU, "cuda")):
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.argument == "backend"
        assert all(name in caught.value.wanted for name in BACKENDS)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 0},
        {"num_heads": True},
        {"num_heads": 1.0},
        {"kv_lora_rank": 0},
        {"qk_rope_head_dim": 7},
        {"qk_rope_head_dim": -2},
        {"page_size": 0},
        {"max_q_len": 0},
        {"q_dtype": torch.int8},
        {"kv_layout": "int4"},
        {"schedule": "magic"},
        {"num_kv_splits": 0},
        {"causal": 1},
        {"batch_invariant": None},
        {"softmax_scale": 0.0},
        {"softmax_scale": -0.1},
        {"softmax_scale": float("nan")},
        {"softmax_scale": float("inf")},
        {"softmax_scale": 1e-50},
        {"softmax_scale": 1e300},
        {"softmax_scale": "0.1"},
        {"softmax_scale": True},
    ],
)
def test_a_problem_that_nobody_could_run_is_invalid_and_names_the_field(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        problem(**changes)
    (field, value), *_ = changes.items()
    assert caught.value.argument in (field, "q")
    assert str(value).strip("'") in caught.value.got


@pytest.mark.parametrize("values", [(0, 1), (1, 0), (1, True), (1, 2.0)])
def test_bounds_are_positive_whole_numbers(values: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument):
        BatchBounds(*values)


def test_errors_survive_pickling_with_their_fields() -> None:
    found = refusals(problem(schedule="persistent"), CPU, "torch")
    for error in (
        InvalidArgument("code", "name", "this", "that"),
        PlanMismatch("code", "name", "this", "that"),
        Unsupported.from_refusals(found),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert (again.code, again.argument, again.wanted, again.got) == (
            error.code,
            error.argument,
            error.wanted,
            error.got,
        )


def test_bytes_of_a_token_are_those_of_the_named_layouts() -> None:
    expected = {
        "bf16": 1152,
        "fp16": 1152,
        "fp32": 2304,
        "fp8_per_tensor": 576,
        "fp8_fnuz_per_tensor": 576,
        "fp8_ds_mla": 656,
    }
    assert {name: layout.bytes_per_token(512, 64) for name, layout in KV_LAYOUTS.items()} == expected
    assert all(layout_of_dtype(layout.dtype) is layout for layout in KV_LAYOUTS.values())
    with pytest.raises(InvalidArgument):
        layout_of_dtype(torch.float64)


def test_explain_counts_bytes_and_operations_by_hand() -> None:
    found = explain(problem(num_heads=128), H200, BatchBounds(max_num_seqs=64, max_pages_per_seq=64))
    keys = 64 * 4096
    assert found.num_keys == keys
    assert found.bytes_read == keys * 576 * 2
    assert found.flops == 2 * 128 * keys * (576 + 512)
    # 64 sequences of 4,096 tokens and 128 heads are bound by arithmetic: 91.8 us at 795 TFLOP/s
    assert found.roofline_seconds == pytest.approx(91.8e-6, rel=1e-3)
    assert found.backend == "gluon"
    text = str(explain(problem(schedule="persistent"), CPU))
    assert "none" in text
    assert "schedule" in text
    assert "unknown" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_explain_names_the_backend_that_is_chosen(dtype: torch.dtype) -> None:
    """Also where one that only runs when it is named would take the problem: the interpreter on a CPU."""
    asked = problem(q_dtype=dtype, kv_layout="fp16" if dtype == torch.float16 else "bf16")
    for target in (CPU, H200):
        assert explain(asked, target).backend == choose_backend(asked, target)


@pytest.mark.parametrize(
    ("given", "argument"),
    [((None,), "problem"), ((problem(), "cpu"), "target"), ((problem(), CPU, 3), "bounds")],
)
def test_explain_wants_records(given: tuple, argument: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        explain(*given)
    assert caught.value.argument == argument


def test_targets_are_detected_late_and_built_by_hand() -> None:
    here = Target.detect("cpu")
    assert here.vendor == "cpu"
    assert here.compute_units == torch.get_num_threads()
    for device in ("cuda:97", "no such device", None):
        with pytest.raises(InvalidArgument) as caught:
            Target.detect(device)  # type: ignore[arg-type]
        assert caught.value.argument == "device"
