"""The case list covers the support table and visits the edges; the inputs hold poison wherever nobody owns memory."""

from __future__ import annotations

import math

import pytest
import torch

from pagedmla.conformance.cases import Case, case_of, cases_for, count_cases
from pagedmla.conformance.inputs import GUARD_ROWS, POISONS, build_inputs, poison_tensor
from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.support import BACKENDS, accepted_problems
from pagedmla.contract.target import Target

TARGET = Target.detect("cpu")
CASES = [case for backend in BACKENDS for case in cases_for(TARGET, backend)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_accepted_problem_has_one_case(backend: str) -> None:
    cases = cases_for(TARGET, backend)
    assert [case.problem for case in cases] == accepted_problems(TARGET, backend)
    assert count_cases(TARGET, backend) == len(cases)
    assert len({case.name for case in cases}) == len(cases)


def test_lengths_visit_the_edges() -> None:
    for case in CASES:
        page = case.problem.page_size
        assert {0, 1, page - 1, page, page + 1, 127, 131} <= set(case.seq_lens)
        assert len(case.q_lens) == len(case.seq_lens)
        assert max(case.q_lens) == case.problem.max_q_len


def test_ragged_queries_include_none_and_more_than_keys() -> None:
    ragged = [case for case in CASES if case.ragged]
    assert len(ragged) > 20
    assert all(0 in case.q_lens for case in ragged)
    pairs = [pair for case in ragged for pair in zip(case.seq_lens, case.q_lens, strict=True)]
    assert any(0 < length < q_len for length, q_len in pairs)
    assert any(length == 0 < q_len for length, q_len in pairs)
    even = [case for case in CASES if case.problem.max_q_len > 1 and not case.ragged]
    assert len(even) > 5


def test_every_position_meets_an_empty_sequence() -> None:
    assert {case.seq_lens.index(0) for case in CASES} >= set(range(6))


def _case(**fields: object) -> Case:
    return case_of(DecodeProblem(num_heads=2, softmax_scale=0.07, **fields), index=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("layout", ["bf16", "fp32", "fp8_per_tensor", "fp8_fnuz_per_tensor"])
def test_live_numbers_do_not_depend_on_the_poison(poison: str, layout: str) -> None:
    case = _case(page_size=16, kv_layout=layout, max_q_len=3)
    nan, other = (build_inputs(case, "cpu", 7, kind) for kind in ("nan", poison))
    assert torch.equal(nan.block_table, other.block_table)
    assert torch.equal(nan.seq_lens, other.seq_lens)
    owned = torch.zeros(nan.kv_cache.shape[:2], dtype=torch.bool)
    for sequence, length in enumerate(case.seq_lens):
        for token in range(length):
            page = int(nan.block_table[sequence, token // 16])
            assert not owned[page, token % 16], "two tokens share a slot"
            owned[page, token % 16] = True
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[nan.kv_cache.dtype.itemsize]
    assert torch.equal(nan.kv_cache[owned].view(bits), other.kv_cache[owned].view(bits))
    live = nan.kv_cache[owned].double()
    assert bool(live.isfinite().all())
    assert bool(nan.kv_cache[~owned].double().isnan().all())
    assert (other.kv_cache[~owned].double().isfinite().all() == (poison == "finite")) or layout.startswith(
        "fp8"
    )
    assert int((~owned).sum()) > 0


def test_pages_are_permuted_and_unused_cells_hold_garbage() -> None:
    case = _case(page_size=16)
    inputs = build_inputs(case, "cpu", 7)
    num_pages, used = inputs.kv_cache.shape[0], []
    for sequence, length in enumerate(case.seq_lens):
        count = -(-length // 16)
        used += inputs.block_table[sequence, :count].tolist()
        unused = inputs.block_table[sequence, count:].tolist()
        assert len(unused) >= 3
        assert any(not 0 <= cell < num_pages for cell in unused)
    assert len(used) == len(set(used)) < num_pages
    assert used != sorted(used)
    cells = set(inputs.block_table.flatten().tolist())
    assert {-1, 2**31 - 1, -(2**31), num_pages} <= cells


def test_rows_without_keys_and_rows_of_nobody_are_poisoned() -> None:
    case = Case("x", _case(page_size=16, max_q_len=4).problem, (2, 0, 9), (4, 1, 3))
    inputs = build_inputs(case, "cpu", 7)
    assert inputs.cu_seqlens_q is not None
    assert inputs.cu_seqlens_q.tolist() == [1, 5, 6, 9]
    assert inputs.q.shape[0] == 11
    poisoned = inputs.q.isnan().all(-1).all(-1).nonzero().flatten().tolist()
    assert poisoned == [0, 1, 2, 5, 9, 10]
    assert bool(inputs.q[[3, 4, 6, 7, 8]].isfinite().all())


def test_results_start_as_nan_between_guards() -> None:
    inputs = build_inputs(_case(), "cpu", 7)
    assert bool(inputs.out.isnan().all() & inputs.lse.isnan().all())
    assert inputs.guards_intact()
    assert inputs.out.shape[0] == inputs.q.shape[0] == inputs.out_storage.shape[0] - 2 * GUARD_ROWS
    inputs.lse_storage[-1, 0] = math.nan
    assert not inputs.guards_intact()


def test_scores_are_neither_flat_nor_one_hot() -> None:
    for dims in ((512, 64), (128, 32), (512, 0)):
        case = _case(kv_lora_rank=dims[0], qk_rope_head_dim=dims[1])
        inputs = build_inputs(case, "cpu", 7)
        sequence = case.seq_lens.index(131)
        pages = inputs.block_table[sequence, :2].long()
        keys = inputs.kv_cache[pages].flatten(0, 1)[:128].double()
        scores = case.problem.softmax_scale * inputs.q[sequence].double() @ keys.T
        assert 1.0 < scores.std().item() < 2.5


@pytest.mark.parametrize("poison", POISONS)
def test_poison_kinds(poison: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values = poison_tensor((64,), dtype, poison, generator).float()
        assert bool({"nan": values.isnan(), "inf": values.isinf(), "finite": values.isfinite()}[poison].all())
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        values = poison_tensor((64,), dtype, poison, generator).float()
        largest = values.abs() == torch.finfo(dtype).max
        assert bool({"nan": values.isnan(), "inf": largest, "finite": values.isfinite()}[poison].all())


def test_seed_decides() -> None:
    case = _case(page_size=16)
    one, same, other = (build_inputs(case, "cpu", seed, "finite") for seed in (1, 1, 2))
    assert torch.equal(one.kv_cache, same.kv_cache)
    assert torch.equal(one.q, same.q)
    assert not torch.equal(one.q, other.q)
