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
import torch

from pagedmla.contract import rules_gluon
from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import accepted_problems
from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.kernels.compile_gate import BACKENDS, KERNEL_NAMES
from pagedmla.kernels.gluon import launch
from pagedmla.kernels.gluon.choice import choose
from pagedmla.kernels.gluon.offline import KERNELS, MOST_SPILLED_BYTES, over_limit
from pagedmla.kernels.gluon.variants import (
    ALIGNED,
    all_variants,
    descriptors,
    representative_variants,
    variants,
)
from pagedmla.kernels.split_kv.resources import Resources
from pagedmla.kernels.split_kv.variants import Variant, divisor

ROOT = Path(__file__).resolve().parents[3]
H200 = KNOWN_TARGETS["sm_90"]


def _facts(variant: Variant) -> list[tuple[str, Any]]:
    """What a variant says of itself; numbers that choose between pieces of code, by their choice."""
    values = dict(variant.constants)
    for name in ("NUM_HEADS", "PAGE_SIZE", "LANES"):
        values[name] = divisor(values.get(name, 1))
    return [*values.items(), ("dtype", dict(variant.pointers)["out"]), ("aligned", variant.aligned)]


def test_whatever_an_accepted_problem_launches_is_known_and_its_pairs_are_compiled() -> None:
    whole, part = set(all_variants(H200)), representative_variants(H200)
    assert set(part) <= whole
    assert {variant.kernel for variant in part} == set(KERNELS) <= set(KERNEL_NAMES)
    compiled = {}
    for kernel in KERNELS:
        decodes = [variant for variant in part if variant.kernel == kernel]
        # each takes seconds
        assert 4 <= len(decodes) <= 14
        compiled[kernel] = {
            pair for variant in decodes for pair in itertools.combinations(_facts(variant), 2)
        }
    accepted = accepted_problems(H200, "gluon")
    assert len(accepted) > 50
    for problem in accepted:
        for variant in variants(problem, H200):
            assert variant in whole, variant
            assert set(itertools.combinations(_facts(variant), 2)) <= compiled[variant.kernel], variant


def test_every_number_of_lanes_is_among_them_with_one_group_of_row_tiles_and_with_several() -> None:
    found = {
        (values["LANES"], values["ONE_ROW_TILE"])
        for values in (dict(variant.constants) for variant in all_variants(H200))
        if "LANES" in values and not values["RAGGED"]
    }
    assert found == set(itertools.product((1, 2, 3, 4), (False, True)))


def _args(num_heads: int, q_len: int | None, num_seqs: int, **options: Any) -> DecodeArguments:
    """A call of sequences of so many query tokens each; None: ragged ones, two on average."""
    tokens = num_seqs * (2 if q_len is None else q_len)
    table = torch.zeros(num_seqs, 3, dtype=torch.int32)
    starts = None if q_len is not None else torch.zeros(num_seqs + 1, dtype=torch.int32)
    q, cache = torch.empty(tokens, num_heads, 576, device="meta"), torch.empty(4, 64, 576, device="meta")
    given = {"softmax_scale": 0.07, "causal": True, "kv_lora_rank": 512} | options
    q, cache = q.bfloat16(), cache.bfloat16()
    return DecodeArguments(q, None, cache, table, table[:, 0], starts, **given)


@pytest.mark.parametrize("options", [{}, {"causal": False}], ids=str)
@pytest.mark.parametrize("num_seqs", [3, 40])
@pytest.mark.parametrize("q_len", [1, 2, 3, 8, None])
@pytest.mark.parametrize("num_heads", [1, 5, 16, 20, 64, 96, 128])
def test_what_a_call_launches_is_among_the_variants_of_its_problem(
    num_heads: int, q_len: int | None, num_seqs: int, options: dict[str, Any]
) -> None:
    args = _args(num_heads, q_len, num_seqs, **options)
    problem, choice = args.problem(), choose(args, H200.compute_units)
    launched = launch.decode_constants(args, problem, choice) | {"block_table_column_stride": 1}
    found = [v for v in variants(problem, H200) if v.kernel == choice.kernel and v.aligned]
    assert launched in [dict(variant.constants) for variant in found]


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({"num_heads": 16}, {"few_heads"}),
        ({"num_heads": 16, "page_size": 1}, {"few_heads"}),
        ({"num_heads": 5, "max_q_len": 3}, {"few_heads"}),
        ({"num_heads": 5, "max_q_len": 4}, {"few_heads", "many_heads"}),
        ({"num_heads": 17}, {"many_heads"}),
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


@pytest.mark.parametrize("name", KERNELS)
def test_a_variant_names_every_argument_that_is_no_number(name: str) -> None:
    kernel = KERNELS[name]
    variant = next(v for v in representative_variants(H200) if v.kernel == name and v.aligned)
    named = {*dict(variant.constants), *dict(variant.pointers), *descriptors(variant)}
    assert named <= set(kernel.arg_names)
    left = [parameter for parameter in kernel.params if parameter.name not in named]
    assert set(ALIGNED) & set(kernel.arg_names) == set(ALIGNED) & set(dict(variant.pointers))
    numbers = (
        "_stride",
        "_chunks",
        "num_",
        "rows_per_page",
        "capacity",
        "q_rope_column",
        "even_q_len",
        "scale_log2",
    )
    assert all(any(word in parameter.name for word in numbers) for parameter in left)


# The most and the least that a variant of each kernel compiles: several causal query tokens of ragged sequences, and one.  And
# what the assembler says of products that it had to wait for between each other: nothing, unless the waits are taken out.
_COMPILE = """
import json, re, subprocess, tempfile
from triton import knobs
from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.kernels.gluon.offline import compile_variant, over_limit
from pagedmla.kernels.gluon.variants import variants
from pagedmla.contract.problem import DecodeProblem

def said_of_products(ptx):
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", file.name + ".cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Compiling entry function" in done.stderr
    return [line for line in done.stderr.splitlines() if "wgmma" in line or "warpgroup" in line]

target, found = KNOWN_TARGETS["sm_90"], {}
for kernel, problem, largest in (
    ("many_heads", DecodeProblem(20, 0.07, page_size=192, max_q_len=2), True),
    ("many_heads", DecodeProblem(128, 0.07), False),
    ("few_heads", DecodeProblem(5, 0.07, page_size=48, max_q_len=3), True),
    ("few_heads", DecodeProblem(16, 0.07), False),
):
    for variant in variants(problem, target):
        values = dict(variant.constants)
        if (variant.kernel == kernel and variant.aligned and values["RAGGED"] == values["CAUSAL"] == largest
                and (values["SCAN"] > 32) == largest):
            needed, compiled = compile_variant(variant, target)
            ptx = compiled.asm["ptx"]
            stores = [line for line in ptx.splitlines() if "st.global" in line]
            facts = dict(vars(needed), over=over_limit(needed, target), name=str(variant), stores=len(stores),
                         wide=sum(".v4." in line for line in stores), said=said_of_products(ptx))
            if not largest:
                facts["said_without_waits"] = said_of_products(re.sub("wgmma.wait_group[^;]*;", "", ptx))
            found[kernel + (" largest" if largest else " smallest")] = facts
            break
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
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 4
    return found


@pytest.mark.parametrize("size", ["largest", "smallest"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_fits_what_the_table_says_and_hopper_has(
    figures: dict[str, dict[str, Any]], kernel: str, size: str
) -> None:
    found = figures[f"{kernel} {size}"]
    assert found["over"] == "", found["name"]
    assert found["shared_bytes"] <= rules_gluon._SHARED_BYTES <= H200.shared_memory_bytes
    # queries and KV tiles alone: rows of 576 two-byte numbers, but for the rotated part of the third tile
    tiles = (64 + 128) * 576 if kernel == "many_heads" else (16 + 192) * 576 - 64 * 64
    assert tiles * 2 < found["shared_bytes"]
    # a second program has no room, so a grid of one for each multiprocessor is resident at once
    assert 2 * found["shared_bytes"] > H200.shared_memory_bytes
    assert found["spilled_bytes"] <= MOST_SPILLED_BYTES


def test_the_table_asks_for_no_more_shared_memory_than_a_kernel_takes(
    figures: dict[str, dict[str, Any]],
) -> None:
    assert max(found["shared_bytes"] for found in figures.values()) == rules_gluon._SHARED_BYTES


@pytest.mark.parametrize("size", ["largest", "smallest"])
def test_the_warps_of_the_kernel_for_many_heads_share_out_all_registers(
    figures: dict[str, dict[str, Any]], size: str
) -> None:
    """384 threads of 168 registers at launch are all that a multiprocessor has, and the warps share them out anew."""
    assert figures[f"many_heads {size}"]["registers"] == 168


@pytest.mark.parametrize("size", ["largest", "smallest"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_final_rows_are_written_in_wide_stores(
    figures: dict[str, dict[str, Any]], kernel: str, size: str
) -> None:
    """16 bytes each: of 64 x 256 two-byte numbers 16 a thread, for each of two halves; of 16 x 512 8 a thread."""
    found = figures[f"{kernel} {size}"]
    assert found["wide"] >= (2 * 16 if kernel == "many_heads" else 8), found["name"]
    assert found["stores"] < 300, found["name"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_products_run_behind_one_another_and_beside_other_work(
    figures: dict[str, dict[str, Any]], kernel: str
) -> None:
    """The assembler says it where it makes each warpgroup product wait for the one before it, and that costs far more than any
    other thing that it may do; it says something, too, where a wait is missing.
    """
    for size in ("largest", "smallest"):
        assert figures[f"{kernel} {size}"]["said"] == []
    assert figures[f"{kernel} smallest"]["said_without_waits"]


def test_what_spills_too_much_is_named_with_both_numbers() -> None:
    assert over_limit(Resources(231_416, 168, MOST_SPILLED_BYTES), H200) == ""
    assert f"{MOST_SPILLED_BYTES + 4} bytes spilled" in over_limit(
        Resources(0, 168, MOST_SPILLED_BYTES + 4), H200
    )
    assert "232449 bytes of shared memory" in over_limit(Resources(232_449, 168, 0), H200)


def test_the_gate_asks_both_backends_and_knows_all_of_their_kernels() -> None:
    assert BACKENDS == ("triton", "gluon")
    assert set(KERNELS) == {"few_heads", "many_heads"}
    assert set(KERNELS) <= set(KERNEL_NAMES)
