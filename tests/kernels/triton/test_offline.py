"""The compile gate: what it reads from a compiler's output, what it compiles, and that it can fail.

These tests run in a process that interprets kernels, so whatever is compiled is compiled in another one.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import accepted_problems, refusals
from pagedmla.contract.target import KNOWN_TARGETS, Target
from pagedmla.kernels.compile_gate import KERNEL_NAMES, run_gate
from pagedmla.kernels.policy import TRITON_DECODE_CONFIGS, triton_decode_configs, triton_family
from pagedmla.kernels.split_kv.resources import Resources, parse_amdgcn, parse_cuobjdump
from pagedmla.kernels.triton.offline import KERNELS, over_limit
from pagedmla.kernels.triton.variants import (
    Variant,
    all_variants,
    page_path,
    pairwise,
    representative_variants,
    variants,
)

ROOT = Path(__file__).resolve().parents[3]

CUOBJDUMP = """
Resource usage:
 Common:
  GLOBAL:4
 Function helper:
  REG:32 STACK:4760 SHARED:0 LOCAL:0 CONSTANT[0]:812 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function decode_kernel:
  REG:255 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:812 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
AMDGCN = """
        .amdhsa_next_free_vgpr 394
    .private_segment_fixed_size: 272
    .sgpr_count:     96
    .sgpr_spill_count: 5
    .vgpr_count:     512
    .vgpr_spill_count: 67
"""


def test_registers_and_stack_are_read_from_nvidias_dump() -> None:
    assert parse_cuobjdump(CUOBJDUMP) == (255, 4760)
    assert parse_cuobjdump("REG:40 STACK:0 SHARED:0 LOCAL:24") == (40, 24)


def test_registers_and_private_memory_are_read_from_amds_assembly() -> None:
    assert parse_amdgcn(AMDGCN) == (512, 272)


@pytest.mark.parametrize("parse", [parse_cuobjdump, parse_amdgcn])
def test_output_that_names_no_kernel_is_no_clean_bill(parse: Any) -> None:
    with pytest.raises(ValueError, match="the compiler's output has no"):
        parse("Fatbin ptx code:\nno resource lines here\n")


def test_what_does_not_fit_is_named_with_both_numbers() -> None:
    target = KNOWN_TARGETS["gfx942"]
    assert over_limit(Resources(65536, 512, 0), target) == ""
    assert (
        over_limit(Resources(65537, 512, 0), target) == "65537 bytes of shared memory, and gfx942 has 65536"
    )
    assert "513 columns of tensor memory" in over_limit(Resources(0, 0, 0, 513), KNOWN_TARGETS["sm_100"])


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 32, 64, 128, 256, 480])
def test_pages_are_read_in_three_ways(page_size: int) -> None:
    in_a_page = all(first // page_size == (first + 31) // page_size for first in range(0, 96 * page_size, 32))
    assert (page_path(page_size, 32) == "tile in a page") == in_a_page
    kinds = {1: "one", 3: "other", 480: "other"}
    assert page_path(page_size, 1024) == f"page a token, {kinds.get(page_size, 'power of two')}"


@pytest.mark.parametrize("arch", ["sm_90"])
def test_whatever_an_accepted_problem_launches_is_among_all_variants(arch: str) -> None:
    target = KNOWN_TARGETS[arch]
    known = set(all_variants(target))
    accepted = accepted_problems(target, "triton")
    assert len(accepted) > 150
    asked = {variant for problem in accepted for variant in variants(problem, target)}
    assert asked <= known
    assert {variant.kernel for variant in asked} == {
        "plan_persistent",
        "plan_split",
        "decode",
        "merge_partials",
    }


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_the_part_that_is_compiled_holds_every_pair_that_a_problem_asks_for(arch: str) -> None:
    target = KNOWN_TARGETS[arch]
    part = representative_variants(target)
    assert len(part) < 120
    assert {variant.kernel for variant in part} == set(KERNELS)
    # the Gluon backend's own are no kernels of this one
    assert set(KERNELS) == set(KERNEL_NAMES) - {"few_heads", "many_heads"}
    asked = (v for problem in accepted_problems(target, "triton") for v in variants(problem, target))
    assert _pairs(asked) <= _pairs(part)


def _pairs(some: Iterable[Variant]) -> set[tuple[Any, Any]]:
    """Pairs of what decode variants say of themselves; numbers that choose between pieces of code, only by their choice."""
    found: set[tuple[Any, Any]] = set()
    for variant in some:
        values = dict(variant.constants)
        if variant.kernel == "decode":
            values["PAGE_SIZE"] = values["PAGE_SIZE"] % values["BLOCK_N"] == 0
            values["PACKED"] = values["PACKED"] > 0
            values["NUM_HEADS"] = bin(values["NUM_HEADS"]).count("1") == 1
            facts = [*values.items(), dict(variant.pointers)["kv_cache"], variant.aligned]
            found |= set(itertools.combinations(facts, 2))
    return found


def test_a_pair_that_one_variant_alone_has_keeps_that_variant() -> None:
    whole = representative_variants(KNOWN_TARGETS["sm_80"])
    lone = replace(whole[-1], factors=("lone", *whole[-1].factors[1:]), aligned=not whole[-1].aligned)
    assert lone in pairwise([*whole, lone])


# one process for all: Triton's import is most of the time
_COMPILE = """
import json
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.kernels.policy import TRITON_DECODE_CONFIGS, TritonDecodeConfig
from pagedmla.kernels.triton.offline import compile_variant, over_limit
from pagedmla.kernels.triton.variants import _decode_variants

problem = DecodeProblem(16, 0.07, page_size=3, max_q_len=2)

def compile_last(config, arch, causal):
    found = [v for v in _decode_variants(problem, config) if v.aligned and dict(v.constants)["CAUSAL"] == causal]
    needed, compiled = compile_variant(found[-1], KNOWN_TARGETS[arch])
    text = compiled.asm.get("amdgcn", "")
    spills = [int(line.split(":")[1]) for line in text.splitlines() if ".vgpr_spill_count:" in line]
    return dict(vars(needed), over=over_limit(needed, KNOWN_TARGETS[arch]), vgpr_spills=max(spills, default=0))

smallest = TRITON_DECODE_CONFIGS["other"][0][1]
found = {arch: compile_last(smallest, arch, True) for arch in ("sm_80", "gfx942")}
found["too large"] = compile_last(TritonDecodeConfig(16, 64, False, 4, 2, 1), "gfx942", False)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        capture_output=True, text=True, timeout=240, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_the_smallest_tiles_need_no_more_than_the_support_table_says(
    figures: dict[str, dict[str, Any]], arch: str
) -> None:
    """The estimate that refuses small devices is the compiler's figure or more, so what is accepted fits."""
    tiny = Target("nvidia", "sm_80", 1, 1)
    refusal = next(
        r for r in refusals(DecodeProblem(16, 0.07, page_size=3), tiny, "triton") if r.code == "shared_memory"
    )
    estimate = int(re.search(r"(\d+) bytes", refusal.wanted)[1])  # type: ignore[index]
    found = figures[arch]
    assert found["over"] == ""
    # the tiles of keys alone are 16 tokens of 512 latent numbers, two bytes each
    assert 16 * 512 * 2 <= found["shared_bytes"] <= estimate
    assert 64 < found["registers"] <= (255 if arch == "sm_80" else 512)


def test_amds_spills_are_all_in_the_report(figures: dict[str, dict[str, Any]]) -> None:
    for name in ("gfx942", "too large"):
        # a spilled register takes 4 bytes of private memory, unless it went to an accumulation register
        assert (figures[name]["spilled_bytes"] > 0) >= (figures[name]["vgpr_spills"] > 0), name
    assert figures["gfx942"]["spilled_bytes"] == 0


def test_tiles_too_large_for_gfx942_are_reported(figures: dict[str, dict[str, Any]]) -> None:
    found = figures["too large"]
    assert found["shared_bytes"] > 65536
    assert found["over"] == f"{found['shared_bytes']} bytes of shared memory, and gfx942 has 65536"


def test_the_gate_compiles_though_this_process_interprets_and_reports_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    whole, small = KNOWN_TARGETS["sm_80"], Target("nvidia", "sm_80", 108, 1000)
    seen = []
    reports = run_gate([whole, small], done=lambda *one: seen.append(one), kernels=["compact"], processes=1)
    assert [report.target for report in reports] == [whole, small]
    fits, does_not = reports
    assert fits.failures == ()
    assert len(fits.compiled) == len(does_not.compiled) == 2
    for one, again in zip(fits.compiled, does_not.compiled, strict=True):
        assert one.registers > 8
        fits_too = one.shared_bytes <= 1000
        assert again.failure == (
            "" if fits_too else f"{one.shared_bytes} bytes of shared memory, and sm_80 has 1000"
        )
    assert len(does_not.failures) == 1
    assert [total for _, _, total in seen] == [4] * 4
    document = does_not.document()
    assert document["failures"] == document["kernels"][0]["failures"] == 1
    assert document["kernels"][0]["variants"] == 2
    assert [one["failure"] for one in document["compiled"] if "failure" in one] == [
        does_not.failures[0].failure
    ]


@pytest.mark.parametrize("arch", KNOWN_TARGETS)
def test_every_row_of_the_policy_is_some_targets(arch: str) -> None:
    target = KNOWN_TARGETS[arch]
    problem = DecodeProblem(16, 0.07)
    assert triton_family(target) != "other"
    configs = triton_decode_configs(problem, target)
    assert configs == tuple(config for _, config in TRITON_DECODE_CONFIGS[triton_family(target)])
    less = Target(target.vendor, arch, target.compute_units, target.shared_memory_bytes - 1)
    assert triton_family(less) == "other"
