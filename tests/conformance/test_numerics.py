"""The error bound holds an honest float32 computation and rejects small faults: it can pass, and it can fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from batches import Batch, arguments, make_batch
from torch import Tensor

from pagedmla import reference
from pagedmla.conformance import numerics

LENGTHS = (2, 17, 64, 131, 300)
DIMS = ((32, 8), (512, 64))
DTYPES = (torch.bfloat16, torch.float32)


def honest(
    part: reference.SequenceAttention,
    softmax_scale: float,
    out_dtype: torch.dtype,
    p_dtype: torch.dtype = torch.float32,
    block: int = 16,
) -> tuple[Tensor, Tensor]:
    """A streaming float32 decode of one sequence, block by block with a running maximum, as kernels do it."""
    queries, keys, values = part.queries.float(), part.keys.float(), part.values.float()
    hidden = part.scores == -math.inf
    state = queries.new_zeros(*queries.shape[:2], values.shape[1])
    total, largest = queries.new_zeros(queries.shape[:2]), torch.full(queries.shape[:2], -math.inf)
    for start in range(0, keys.shape[0], block):
        stop = start + block
        scores = (queries @ keys[start:stop].T * softmax_scale).masked_fill(
            hidden[..., start:stop], -math.inf
        )
        highest = torch.maximum(largest, scores.amax(-1))
        weights = torch.exp(scores - highest.unsqueeze(-1)).nan_to_num(nan=0.0)
        rescale = torch.exp(largest - highest).nan_to_num(nan=0.0)
        state = state * rescale.unsqueeze(-1) + weights.to(p_dtype).float() @ values[start:stop]
        total, largest = total * rescale + weights.sum(-1), highest
    out = state / total.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return out.to(out_dtype), largest + torch.log(total)


def compare_with(
    batch: Batch,
    out_dtype: torch.dtype,
    fault: Callable[[reference.SequenceAttention], reference.SequenceAttention] | None = None,
    scale: float = 1.0,
    p_dtype: torch.dtype = torch.float32,
    claimed: torch.dtype = torch.float32,
) -> numerics.Comparison:
    """Holds the honest decode of a (perhaps faulty) batch against the bound of the right one."""
    call = arguments(batch)
    expected = numerics.expect(**call, out_dtype=out_dtype, p_dtype=claimed)
    out, lse = (
        torch.zeros_like(expected.out, dtype=out_dtype),
        torch.zeros_like(expected.lse, dtype=torch.float32),
    )
    for part in reference.attend(**call):
        used = fault(part) if fault else part
        out[part.rows], lse[part.rows] = honest(used, scale * batch.softmax_scale, out_dtype, p_dtype)
    lse = torch.where(expected.lse == -math.inf, -math.inf, lse) if fault is None and scale == 1 else lse
    # planted faults must be seen in the values themselves, not only in the logarithm
    return numerics.compare(out, lse if fault is None else expected.lse.float(), expected)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("p_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_honest_computations_pass(dims: tuple[int, int], dtype: torch.dtype, p_dtype: torch.dtype) -> None:
    batch = make_batch([1, *LENGTHS], [1, 3, 2, 1, 1, 2], num_heads=8, dims=dims, q_dtype=dtype)
    result = compare_with(batch, dtype, p_dtype=p_dtype, claimed=p_dtype)
    assert result.passed, result.detail
    assert 0 < result.out_bound_ratio <= 1


@pytest.mark.parametrize("spread", [0.01, 6.0, 40.0])
def test_flat_and_peaked_softmax_pass(spread: float) -> None:
    batch = make_batch(LENGTHS, num_heads=8, q_dtype=torch.float32, spread=spread)
    result = compare_with(batch, torch.float32)
    assert result.passed, result.detail


def _dropped(part: reference.SequenceAttention) -> reference.SequenceAttention:
    return replace(part, keys=part.keys[:-1], values=part.values[:-1], scores=part.scores[..., :-1])


def _wrong_at_page_edge(part: reference.SequenceAttention) -> reference.SequenceAttention:
    # the last token of the first page, or the first token where there is no full page, is taken for the next one
    token = min(15, len(part.keys) - 2)
    keys = part.keys.clone()
    keys[token] = keys[token + 1]
    return replace(part, keys=keys, values=keys[:, : part.values.shape[1]])


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
class TestPlantedFaults:
    """Each is far below what an eye would see, and each must miss the bound."""

    def test_one_key_dropped(self, dims: tuple[int, int], dtype: torch.dtype, length: int) -> None:
        batch = make_batch([length], num_heads=16, dims=dims, q_dtype=dtype)
        assert compare_with(batch, dtype, _dropped).out_bound_ratio > 1

    def test_one_wrong_token_at_a_page_edge(
        self, dims: tuple[int, int], dtype: torch.dtype, length: int
    ) -> None:
        batch = make_batch([length], num_heads=16, dims=dims, q_dtype=dtype)
        assert compare_with(batch, dtype, _wrong_at_page_edge).out_bound_ratio > 1

    def test_scale_off_by_one_percent(self, dims: tuple[int, int], dtype: torch.dtype, length: int) -> None:
        batch = make_batch([length], num_heads=16, dims=dims, q_dtype=dtype)
        assert compare_with(batch, dtype, scale=1.01).out_bound_ratio > 1

    def test_causal_mask_off_by_one(self, dims: tuple[int, int], dtype: torch.dtype, length: int) -> None:
        batch = make_batch([length], [2], num_heads=16, dims=dims, q_dtype=dtype)

        def unmask(part: reference.SequenceAttention) -> reference.SequenceAttention:
            return replace(part, scores=torch.zeros_like(part.scores))

        assert compare_with(batch, dtype, unmask).out_bound_ratio > 1

    def test_weights_in_bfloat16_while_float32_is_claimed(
        self, dims: tuple[int, int], dtype: torch.dtype, length: int
    ) -> None:
        batch = make_batch([length], num_heads=16, dims=dims, q_dtype=dtype)
        assert compare_with(batch, dtype, p_dtype=torch.bfloat16).out_bound_ratio > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_bound_is_hardly_more_than_the_output_rounding(dtype: torch.dtype) -> None:
    call = arguments(make_batch([131], num_heads=16, dims=(512, 64), q_dtype=dtype))
    expected = numerics.expect(**call, out_dtype=dtype)
    rounding = torch.finfo(dtype).eps / 2
    assert expected.bound.mean() < (rounding + 2e-3) * expected.out.abs().mean()


def test_a_row_without_keys_must_be_exactly_zero() -> None:
    call = arguments(make_batch([0, 3], [1, 5], q_dtype=torch.float32))
    expected = numerics.expect(**call, out_dtype=torch.float32)
    blind = expected.lse == -math.inf
    assert bool((expected.bound[blind] == 0).all())
    assert bool((expected.bound[~blind] > 0).all())
    tiny = expected.out.float()
    tiny[0, 0, 0] = 1e-30
    result = numerics.compare(tiny, expected.lse.float(), expected)
    assert not result.passed
    assert result.out_index == (0, 0, 0)
    assert result.out_bound_ratio == math.inf


def _right() -> tuple[Tensor, Tensor, numerics.Expected]:
    expected = numerics.expect(
        **arguments(make_batch([0, 5], q_dtype=torch.float32)), out_dtype=torch.float32
    )
    return expected.out.float(), expected.lse.float(), expected


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [0, 1])
def test_nan_and_infinity_in_out_never_pass(wrong: float, row: int) -> None:
    out, lse, expected = _right()
    assert numerics.compare(out, lse, expected).passed
    out[row, 2, 3] = wrong
    result = numerics.compare(out, lse, expected)
    assert not result.passed
    assert result.out_index == (row, 2, 3)


@pytest.mark.parametrize(
    ("row", "wrong"),
    [(0, math.nan), (0, math.inf), (0, -1e30), (0, 0.0), (1, math.nan), (1, math.inf), (1, -math.inf)],
)
def test_lse_infinities_must_match(row: int, wrong: float) -> None:
    out, lse, expected = _right()
    lse[row, 1] = wrong
    result = numerics.compare(out, lse, expected)
    assert not result.passed
    assert result.lse_index == (row, 1)
    assert result.detail.startswith("lse[")


def test_lse_of_another_base_fails() -> None:
    out, lse, expected = _right()
    assert not numerics.compare(out, lse / math.log(2), expected).passed
    assert not numerics.compare(out, lse + 1e-4, expected).passed


def test_past_its_range_an_lse_is_infinite_and_nowhere_else() -> None:
    out, lse, expected = _right()
    limit = expected.lse[1:].abs().median().item()
    past = expected.lse.isfinite() & (expected.lse.abs() > limit)
    assert 0 < int(past.sum()) < past[1:].numel()
    cut = torch.where(past, math.inf * lse.sign(), lse)
    assert numerics.compare(out, cut, expected, lse_limit=limit).passed
    assert numerics.compare(out, lse, expected, lse_limit=limit).passed
    assert not numerics.compare(out, cut, expected).passed
    assert not numerics.compare(out, torch.where(past, -cut, cut), expected, lse_limit=limit).passed
    everything = torch.where(expected.lse.isfinite(), math.inf * lse.sign(), lse)
    assert not numerics.compare(out, everything, expected, lse_limit=limit).passed


def test_wrong_shapes_are_said() -> None:
    out, lse, expected = _right()
    assert "shape" in numerics.compare(out, lse.T.contiguous(), expected).detail
    assert "shape" in numerics.compare(out[:, :2], lse, expected).detail


def test_an_empty_batch_passes() -> None:
    _, _, expected = _right()
    empty = numerics.Expected(expected.out[:0], expected.lse[:0], expected.bound[:0])
    assert numerics.compare(torch.zeros(0, 4, 32), torch.zeros(0, 4), empty).passed
