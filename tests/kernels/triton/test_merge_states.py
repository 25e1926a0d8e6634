"""merge_states on the device: against float64, the identity bit for bit, NaN, any number of states, any strides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagedmla import kernels
from pagedmla.kernels.triton.merge_states import merge_states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
U32 = 2.0**-24
EMPTY = (-math.inf, math.inf)
States = tuple[list[Tensor], list[Tensor]]


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def same_bits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(bits(x.contiguous()), bits(y.contiguous()))
        for x, y in zip(a, b, strict=True)
    )


def make_states(count: int, rows: tuple[int, int], dv: int, dtype: torch.dtype, seed: int = 0) -> States:
    """States of which some rows have no keys (both words for it, with NaN for values), some rows in every state."""
    generator = torch.Generator().manual_seed(seed)
    outs, lses = [], []
    for state in range(count):
        out = torch.randn(*rows, dv, generator=generator)
        lse = torch.randn(*rows, generator=generator) * 20
        empty = torch.rand(rows, generator=generator) < 0.3
        empty[0, 0] = True
        out[empty], lse[empty] = math.nan, EMPTY[state % 2]
        outs.append(out.to(dtype).to(DEVICE))
        lses.append(lse.to(DEVICE))
    return outs, lses


def merge_in_double(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    logs = torch.stack(lses).cpu().double()
    logs = torch.where(logs == math.inf, -math.inf, logs)
    total = torch.logsumexp(logs, dim=0)
    weights = torch.exp(logs - torch.where(total == -math.inf, 0.0, total)).unsqueeze(-1)
    values = torch.where(weights == 0, 0.0, torch.stack(outs).cpu().double())
    return (weights * values).sum(0), total


def check_merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges and holds the result against float64: exponentials, their sum, a share and a product a state, a rounding."""
    out, lse = merge_states(outs, lses)
    assert (out.dtype, lse.dtype) == (outs[0].dtype, torch.float32)
    wanted, wanted_lse = merge_in_double(outs, lses)
    finite = torch.stack(lses)[torch.stack(lses).isfinite()]
    size = torch.stack(outs).cpu().double().nan_to_num(0.0, 0.0, 0.0).abs().amax(0)
    largest = finite.abs().max().item() if finite.numel() else 0.0
    error = (4 * len(outs) + 8 + 4 * largest) * U32 * size
    # half a step of the output's dtype, of a subnormal too
    smallest = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    bound = error + torch.finfo(out.dtype).eps / 2 * (wanted.abs() + error) + smallest
    assert bool(((out.cpu().double() - wanted).abs() <= bound).all())
    empty = wanted_lse == -math.inf
    assert torch.equal(lse.cpu() == -math.inf, empty)
    assert bool((out.cpu()[empty] == 0).all())
    torch.testing.assert_close(lse.cpu().double()[~empty], wanted_lse[~empty], rtol=1e-6, atol=1e-6)
    return out, lse


@given(
    st.sampled_from([1, 2, 3, 4, 9]),
    st.sampled_from([(1, 1), (3, 2), (2, 3)]),
    st.sampled_from([1, 17, 512, 640]),
    st.sampled_from(DTYPES),
    st.sampled_from(["list", "stacked", "strided"]),
)
def test_any_number_of_states_agrees_with_float64(
    count: int, rows: tuple[int, int], dv: int, dtype: torch.dtype, kind: str
) -> None:
    outs, lses = make_states(count, rows, dv, dtype, seed=dv)
    plain = check_merge(outs, lses)
    assert same_bits(plain, merge_states(outs, lses))
    if kind == "stacked":
        assert same_bits(plain, merge_states(torch.stack(outs).unbind(0), torch.stack(lses).unbind(0)))
    if kind == "strided":
        assert same_bits(plain, merge_states([spread(out) for out in outs], [spread(lse) for lse in lses]))


def spread(tensor: Tensor) -> Tensor:
    """The same numbers with tokens and heads swapped in memory, and NaN between the heads."""
    holder = torch.full(
        (tensor.shape[1], tensor.shape[0] + 2, *tensor.shape[2:]), math.nan, dtype=tensor.dtype
    )
    view = holder.to(tensor.device).transpose(0, 1)[1:-1]
    return view.copy_(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("empty_lse", EMPTY)
@pytest.mark.parametrize("garbage", [0.0, 1.0, math.nan, math.inf])
def test_merging_with_an_empty_state_is_the_identity(
    dtype: torch.dtype, empty_lse: float, garbage: float
) -> None:
    """Bit for bit, minus zeros and subnormals included, whatever the empty state's values are."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(5, 3, 17, generator=generator).to(dtype)
    lse = torch.randn(5, 3, generator=generator) * 30
    tiny = torch.finfo(dtype).smallest_normal
    out[0, 0, :5] = torch.tensor([-0.0, 0.0, tiny / 2, -tiny / 4, math.inf], dtype=dtype)
    out[2, 1], lse[2, 1], lse[1, 0] = 0.0, -math.inf, -0.0
    out, lse = out.to(DEVICE), lse.to(DEVICE)
    empty = torch.full_like(out, garbage), torch.full_like(lse, empty_lse)
    for order in ([0, 1], [1, 0], [1, 0, 1], [1, 1, 0], [0]):
        outs, lses = [(out, empty[0])[i] for i in order], [(lse, empty[1])[i] for i in order]
        assert same_bits(merge_states(outs, lses), (out, lse))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_empty_states_alone_give_an_empty_one(count: int) -> None:
    outs = [torch.full((2, 3, 4), math.nan, device=DEVICE)] * count
    lses = [torch.full((2, 3), EMPTY[state % 2], device=DEVICE) for state in range(count)]
    out, lse = merge_states(outs, lses)
    assert torch.equal(bits(out), bits(torch.zeros(2, 3, 4)))
    assert torch.equal(lse.cpu(), torch.full((2, 3), -math.inf))


def test_a_real_nan_stays_visible() -> None:
    out, lse = torch.ones(2, 1, 3, device=DEVICE), torch.zeros(2, 1, device=DEVICE)
    bad = out.clone()
    bad[1, 0, 2] = math.nan
    for outs in ([bad, out], [out, bad], [out, out, bad]):
        merged, merged_lse = merge_states(outs, [lse] * len(outs))
        assert merged.isnan().nonzero().tolist() == [[1, 0, 2]]
        assert bool(merged_lse.isfinite().all())
    bad_lse = torch.tensor([[math.nan], [0.0]], device=DEVICE)
    for lses in ([lse, bad_lse], [bad_lse, lse], [bad_lse], [lse, lse, bad_lse]):
        merged, merged_lse = merge_states([out] * len(lses), lses)
        assert bool(merged[0].isnan().all() & merged_lse[0].isnan().all())
        assert bool(merged[1].isfinite().all() & merged_lse[1].isfinite().all())


@pytest.mark.parametrize("size", [80.0, 2000.0, 1e6])
def test_logarithms_of_any_size(size: float) -> None:
    generator = torch.Generator().manual_seed(2)
    outs = [torch.randn(4, 3, 8, generator=generator).to(DEVICE) for _ in range(4)]
    lses = [size * torch.randn(4, 3, generator=generator).to(DEVICE) for _ in range(4)]
    check_merge(outs, lses)
    check_merge(outs, [lse - 3 * size for lse in lses])


def test_values_near_the_largest_number_do_not_overflow_on_the_way() -> None:
    outs = [torch.full((1, 1, 4), 3e38, device=DEVICE)] * 3
    out, _ = merge_states(outs, [torch.zeros(1, 1, device=DEVICE)] * 3)
    torch.testing.assert_close(out.cpu(), outs[0].cpu(), rtol=1e-6, atol=0.0)


def test_no_rows_and_no_numbers() -> None:
    for shape in ((0, 3, 8), (2, 0, 8), (2, 3, 0)):
        outs = [torch.zeros(shape, device=DEVICE)] * 2
        lses = [torch.zeros(shape[:2], device=DEVICE)] * 2
        out, lse = merge_states(outs, lses)
        assert out.shape == shape
        torch.testing.assert_close(lse.cpu(), torch.full(shape[:2], math.log(2)))


def test_the_backend_merges_with_this_kernel() -> None:
    assert kernels.load("triton").merge_states is merge_states
