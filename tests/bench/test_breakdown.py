"""The parts of a decode: summed up by kernel, and what is left between them."""

from __future__ import annotations

import pytest
import torch

from pagedmla.bench.breakdown import Breakdown, Part, parts_of, profiled_parts, repeated, short_name


def test_launches_are_summed_up_by_name_and_shared_over_the_calls() -> None:
    launches = [("plan", 2.0), ("decode", 30.0), ("plan", 4.0), ("decode", 34.0), ("merge", 1.0)]
    parts = parts_of(launches, calls=2)
    assert parts == (Part("decode", 1.0, 32.0), Part("plan", 1.0, 3.0), Part("merge", 0.5, 0.5))
    assert Breakdown(parts, decode_us=40.0).between_us == pytest.approx(4.5)
    assert parts_of([], 10) == ()


def test_the_profiler_sees_what_runs_and_only_that() -> None:
    a = torch.ones(64, 64)
    parts = profiled_parts(repeated(lambda: torch.mm(a, a), 4), 4, torch.device("cpu"))
    (product,) = [part for part in parts if part.name == "aten::mm"]
    assert product.launches == 1.0
    assert product.us > 0
    assert not any("add" in part.name for part in parts)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void cutlass::device_kernel<flash::Kernel<64, (bool)1> >(Params)", "cutlass::device_kernel"),
        ("_mla_decode_fwd_kernel", "_mla_decode_fwd_kernel"),
        ("flash_mla(int)", "flash_mla"),
    ],
)
def test_a_kernels_name_is_shown_without_its_arguments(name: str, short: str) -> None:
    assert short_name(name) == short
