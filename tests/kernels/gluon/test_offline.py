"""The Gluon kernels compile for Hopper on any machine, fit its shared memory, and keep their accumulators in registers.

These tests run in a process that interprets kernels, so whatever is compiled is compiled in another one.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedmla.contract import rules_gluon
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import accepted_problems
from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.kernels.compile_gate import BACKENDS, KERNEL_NAMES, run_gate
from pagedmla.kernels.gluon.few_heads.kernel import decode_few_heads
from pagedmla.kernels.gluon.many_heads import decode_many_heads
from pagedmla.kernels.gluon.offline import KERNELS, MOST_SPILLED_BYTES, over_limit
from pagedmla.kernels.gluon.variants import all_variants, descriptors, representative_variants, variants
from pagedmla.kernels.split_kv.resources import Resources
from pagedmla.kernels.split_kv.variants import Variant, divisor

DECODES = {"few_heads": decode_few_heads, "many_heads": decode_many_heads}
ROOT = Path(__file__).resolve().parents[3]
H200 = KNOWN_TARGETS["sm_90"]


def _facts(variant: Variant) -> list[tuple[str, Any]]:
    """What a decode variant says of itself; numbers that choose between pieces of code, by their choice."""
    values = dict(variant.constants)
    for name in ("NUM_HEADS", "PAGE_SIZE"):
        values[name] = divisor(values[name])
    return [*values.items(), ("dtype", dict(variant.pointers)["out"]), ("aligned", variant.aligned)]


def test_whatever_an_accepted_problem_launches_is_known_and_its_pairs_are_compiled() -> None:
    whole, part = set(all_variants(H200)), representative_variants(H200)
    assert set(part) <= whole
    assert {variant.kernel for variant in part} == set(KERNELS) <= set(KERNEL_NAMES)
    compiled = {}
    for kernel in DECODES:
        decodes = [variant for variant in part if variant.kernel == kernel]
        # each takes seconds
        assert 4 <= len(decodes) <= 10
        compiled[kernel] = {
            pair for variant in decodes for pair in itertools.combinations(_facts(variant), 2)
        }
    accepted = accepted_problems(H200, "gluon")
    assert len(accepted) > 50
    for problem in accepted:
        for variant in variants(problem, H200):
            assert variant in whole, variant
            if variant.kernel in DECODES:
                assert set(itertools.combinations(_facts(variant), 2)) <= compiled[variant.kernel], variant


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({"num_heads": 16}, {"few_heads"}),
        ({"num_heads": 5, "max_q_len": 3}, {"few_heads"}),
        ({"num_heads": 5, "max_q_len": 4}, set(KERNELS)),
        ({"num_heads": 17}, set(KERNELS) - {"few_heads"}),
        ({"num_heads": 5, "max_q_len": 4, "num_kv_splits": 3}, set(KERNELS) - {"few_heads"}),
    ],
    # a set's words come in another order in each process
    ids=lambda value: str(value) if isinstance(value, dict) else f"{len(value)}-kernels",
)
def test_each_number_of_rows_has_its_kernels(changes: dict[str, Any], kernels: set[str]) -> None:
    """A ragged call may have few rows a sequence where some have many."""
    problem = DecodeProblem(**({"softmax_scale": 0.07} | changes))
    assert {variant.kernel for variant in variants(problem, H200)} == kernels


@pytest.mark.parametrize("arch", [arch for arch in KNOWN_TARGETS if arch != "sm_90"])
def test_nothing_is_compiled_for_what_the_table_refuses(arch: str) -> None:
    assert all_variants(KNOWN_TARGETS[arch]) == representative_variants(KNOWN_TARGETS[arch]) == ()


@pytest.mark.parametrize("name", DECODES)
def test_a_variant_names_every_argument_that_is_no_number(name: str) -> None:
    kernel = DECODES[name]
    variant = next(v for v in representative_variants(H200) if v.kernel == name and v.aligned)
    named = {*dict(variant.constants), *dict(variant.pointers), *descriptors(variant)}
    assert named <= set(kernel.arg_names)
    left = [parameter for parameter in kernel.params if parameter.name not in named]
    numbers = ("_stride", "num_", "rows_per_page", "capacity", "q_rope_column", "even_q_len", "scale_log2")
    assert all(any(word in parameter.name for word in numbers) for parameter in left)


# the most and the least that a variant of each kernel compiles: several causal query tokens of ragged sequences, and one
_COMPILE = """
import json
from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.kernels.gluon.offline import compile_variant, over_limit
from pagedmla.kernels.gluon.variants import variants
from pagedmla.contract.problem import DecodeProblem

target, found = KNOWN_TARGETS["sm_90"], {}
for kernel, problem, causal in (
    ("many_heads", DecodeProblem(20, 0.07, page_size=192, max_q_len=2), True),
    ("many_heads", DecodeProblem(128, 0.07), False),
    ("few_heads", DecodeProblem(5, 0.07, page_size=192, max_q_len=3), True),
    ("few_heads", DecodeProblem(16, 0.07), False),
):
    for variant in variants(problem, target):
        values = dict(variant.constants)
        if (variant.kernel == kernel and variant.aligned and values["RAGGED"] == values["CAUSAL"] == causal
                and values.get("SCAN") != 32):
            needed, compiled = compile_variant(variant, target)
            stores = [line.split()[-0] for line in compiled.asm["ptx"].splitlines() if "st.global" in line]
            found[kernel + " " + str(causal)] = dict(vars(needed), over=over_limit(needed, target), name=str(variant),
                                      wide=sum(".v2." in line or ".v4." in line for line in compiled.asm["ptx"].splitlines()
                                               if "st.global" in line), stores=len(stores))
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


@pytest.mark.parametrize("causal", ["True", "False"])
def test_the_kernel_for_many_heads_fits_what_the_table_says_and_hopper_has(
    figures: dict[str, dict[str, Any]], causal: str
) -> None:
    found = figures[f"many_heads {causal}"]
    assert found["over"] == "", found["name"]
    # queries and one pair of key blocks alone: 64 + 128 rows of 576 two-byte numbers
    assert 192 * 576 * 2 < found["shared_bytes"] <= rules_gluon._SHARED_BYTES <= H200.shared_memory_bytes
    assert found["spilled_bytes"] <= MOST_SPILLED_BYTES
    # 384 threads of 168 registers at launch are all that a multiprocessor has, once the warps share them out anew
    assert found["registers"] == 168


@pytest.mark.parametrize("causal", ["True", "False"])
def test_final_rows_are_written_in_wide_stores(figures: dict[str, dict[str, Any]], causal: str) -> None:
    """Two halves of 64 x 256 two-byte numbers and as many f32 ones: by 256 threads, in stores of a pair each."""
    found = figures[f"many_heads {causal}"]
    assert found["wide"] >= 2 * 64, found["name"]
    assert found["stores"] < 300, found["name"]


@pytest.mark.parametrize("causal", ["True", "False"])
def test_the_kernel_for_few_heads_is_alone_on_a_multiprocessor(
    figures: dict[str, dict[str, Any]], causal: str
) -> None:
    """Two KV tiles of 64 tokens and 16 query rows: a second program has no room, so a grid of one each is resident at once."""
    found = figures[f"few_heads {causal}"]
    assert found["over"] == "", found["name"]
    assert (2 * 64 + 16) * 576 * 2 < found["shared_bytes"] <= rules_gluon._SHARED_BYTES
    assert 2 * found["shared_bytes"] > H200.shared_memory_bytes
    # final rows of 16 bytes a store, not a number each
    assert found["wide"] >= 8, found["name"]


def test_what_spills_too_much_is_named_with_both_numbers() -> None:
    assert over_limit(Resources(231_416, 168, MOST_SPILLED_BYTES), H200) == ""
    assert f"{MOST_SPILLED_BYTES + 4} bytes spilled" in over_limit(
        Resources(0, 168, MOST_SPILLED_BYTES + 4), H200
    )
    assert "232449 bytes of shared memory" in over_limit(Resources(232_449, 168, 0), H200)


def test_the_gate_compiles_the_plan_in_this_backends_tiles_too() -> None:
    assert BACKENDS == ("triton", "gluon")
    (report,) = run_gate([H200], kernels=["plan_split"], processes=1)
    assert report.failures == ()
    tiles = {
        name
        for name in ("BLOCK_M=64 BLOCK_N=128", "BLOCK_M=64 BLOCK_N=64")
        if any(name in one.variant for one in report.compiled)
    }
    assert len(tiles) == 2
    assert DecodeProblem(128, 0.07) in accepted_problems(H200, "gluon")
