"""The runner passes the rounded oracle and says briefly and rightly what is wrong with anything else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedmla import reference
from pagedmla.conformance.cases import Case, case_of
from pagedmla.conformance.runner import run_case
from pagedmla.contract.errors import Unsupported
from pagedmla.contract.problem import DecodeProblem

PROBLEM = DecodeProblem(
    num_heads=4, softmax_scale=0.07, kv_lora_rank=32, qk_rope_head_dim=8, page_size=16, max_q_len=3
)
CASE = case_of(PROBLEM, index=0)


def rounded_oracle(*tensors: Tensor, out: Tensor, lse: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """A perfect kernel: float64, rounded once."""
    reference.decode(*tensors, out=out, lse=lse, **options)
    return out, lse


@pytest.mark.parametrize("index", range(8))
def test_the_rounded_oracle_passes(index: int) -> None:
    result = run_case(case_of(PROBLEM, index), "cpu", None, rounded_oracle)
    assert result.passed, result.detail
    assert result.detail == ""
    assert 0 < result.out_bound_ratio <= 1
    assert result.lse_error < 1e-6


def test_an_error_becomes_a_failed_result() -> None:
    def refusing(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        raise Unsupported("dtype_pair", "kv_cache", "bf16", "fp16")

    result = run_case(CASE, "cpu", None, refusing)
    assert not result.passed
    assert result.detail == "Unsupported: kv_cache: wanted bf16, got fp16 [dtype_pair]"
    assert math.isnan(result.out_error)


def test_other_exceptions_are_not_swallowed() -> None:
    def broken(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        raise KeyError("a mistake in the kernel's own code")

    with pytest.raises(KeyError):
        run_case(CASE, "cpu", None, broken)


def test_a_wrong_number_is_located() -> None:
    sequence = CASE.seq_lens.index(127)
    row = 1 + sum(CASE.q_lens[:sequence])

    def off(*tensors: Tensor, out: Tensor, lse: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        rounded_oracle(*tensors, out=out, lse=lse, **options)
        out[row, 2, 7] += 0.5
        return out, lse

    result = run_case(CASE, "cpu", None, off)
    assert not result.passed
    assert result.out_bound_ratio > 10
    assert result.detail.startswith(f"out[{row}, 2, 7] is ")
    assert f"query 0 of {CASE.q_lens[sequence]} of sequence {sequence}, which has 127 keys" in result.detail


def test_a_written_guard_row_is_seen() -> None:
    def spilling(*tensors: Tensor, out: Tensor, lse: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        rounded_oracle(*tensors, out=out, lse=lse, **options)
        lse.as_strided((1,), (1,), lse.storage_offset() + lse.numel())[0] = 0.0
        return out, lse

    assert run_case(CASE, "cpu", None, spilling).detail == "rows around out or lse were written"


def test_results_elsewhere_than_in_the_given_tensors_are_seen() -> None:
    def elsewhere(*tensors: Tensor, out: Tensor, lse: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        rounded_oracle(*tensors, out=out, lse=lse, **options)
        return out.clone(), lse

    assert "another tensor" in run_case(CASE, "cpu", None, elsewhere).detail


def test_a_result_that_depends_on_unowned_memory_is_seen() -> None:
    def leaking(
        q: Tensor, kv_cache: Tensor, *tensors: Tensor, out: Tensor, lse: Tensor, **options: Any
    ) -> Any:
        rounded_oracle(q, kv_cache, *tensors, out=out, lse=lse, **options)
        # one unit in the last place, far inside every bound, when the pool holds no nan
        if not bool(kv_cache.isnan().any()):
            lse[1] = torch.nextafter(lse[1], torch.full_like(lse[1], math.inf))
        return out, lse

    case = Case("leak", PROBLEM, (5, 7, 3), (2, 1, 0))
    detail = run_case(case, "cpu", None, leaking).detail
    assert detail.startswith("lse[1, 0] ")
    assert "memory that nobody owns changed from nan to" in detail
