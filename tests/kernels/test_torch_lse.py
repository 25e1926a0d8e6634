"""LSE: the logarithm of every row, by value, and the algebra of merging what was attended apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from batches import Batch, arguments, check, decode, expect, make_batch, run, same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches, cuts
from torch import Tensor

import pagedmla
from pagedmla.contract.errors import InvalidArgument

U32 = 2.0**-24
# our own word for a row without keys, and that of other libraries, which a merge tolerates
EMPTY = (-math.inf, math.inf)


def merge_in_double(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The merge worked out in float64, with +inf read as empty; for states without nan."""
    logs = torch.stack(lses).double()
    logs = torch.where(logs == math.inf, -math.inf, logs)
    total = torch.logsumexp(logs, dim=0)
    weights = torch.exp(logs - torch.where(total == -math.inf, 0.0, total)).unsqueeze(-1)
    values = torch.where(weights == 0, 0.0, torch.stack(outs).double())
    return (weights * values).sum(0), total


def check_merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges and holds the result against float64: k products, sums and exponentials, and the output's rounding."""
    out, lse = pagedmla.merge_states(outs, lses)
    wanted, wanted_lse = merge_in_double(outs, lses)
    finite = torch.stack(lses)[torch.stack(lses).isfinite()]
    size = torch.stack(outs).double().nan_to_num(0.0, 0.0, 0.0).abs().amax(0)
    largest = finite.abs().max().item() if finite.numel() else 0.0
    error = (4 * len(outs) + 8 + 4 * largest) * U32 * size
    bound = error + torch.finfo(out.dtype).eps / 2 * (wanted.abs() + error) + 1e-40
    assert bool(((out.double() - wanted).abs() <= bound).all())
    empty = wanted_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert bool((out[empty] == 0).all())
    torch.testing.assert_close(lse[~empty].double(), wanted_lse[~empty], rtol=1e-6, atol=1e-6)
    return out, lse


def pieces_of(batch: Batch, edges: list[list[int]], piece: int) -> Batch:
    """The batch over one run of each sequence's keys."""
    tokens = [keys[edge[piece] : edge[piece + 1]] for keys, edge in zip(batch.tokens, edges, strict=True)]
    return replace(batch, tokens=tuple(tokens))


@given(st.data())
def test_attention_is_associative(data: st.DataObject) -> None:
    """Keys cut anywhere, pieces empty for some rows or all, merged in any order: one pass."""
    batch = data.draw(batches(16, max_q_len=2, max_seqs=3, most=150, causal=False, q_dtype=torch.float32))
    count = data.draw(st.integers(1, 5))
    edges = [data.draw(cuts(length, count)) for length in batch.seq_lens]
    order = data.draw(st.permutations(range(count)))
    parts = [decode(pieces_of(batch, edges, piece), 16) for piece in order]
    out, lse = check_merge([part[0] for part in parts], [part[1] for part in parts])
    expected = expect(arguments(batch))
    seen = expected.lse != -math.inf
    assert torch.equal(lse != -math.inf, seen)
    torch.testing.assert_close(lse[seen].double(), expected.lse[seen], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("empty_lse", EMPTY)
@pytest.mark.parametrize("garbage", [0.0, 1.0, math.nan, math.inf])
def test_merging_with_an_empty_state_is_the_identity(
    dtype: torch.dtype, empty_lse: float, garbage: float
) -> None:
    """Bit for bit, whatever the empty state's values are."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(5, 3, 17, generator=generator).to(dtype)
    lse = torch.randn(5, 3, generator=generator) * 30
    lse[2, 1], out[2, 1] = -math.inf, 0.0
    _check_identity(out, lse, torch.full_like(out, garbage), torch.full_like(lse, empty_lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_identity_keeps_minus_zero(dtype: torch.dtype) -> None:
    out, lse = torch.full((1, 2, 3), -0.0, dtype=dtype), torch.zeros(1, 2)
    _check_identity(out, lse, torch.zeros_like(out), torch.full_like(lse, -math.inf))


def _check_identity(out: Tensor, lse: Tensor, empty_out: Tensor, empty_lse: Tensor) -> None:
    for outs, lses in (
        ([out, empty_out], [lse, empty_lse]),
        ([empty_out, out], [empty_lse, lse]),
        ([empty_out, out, empty_out], [empty_lse, lse, empty_lse]),
        ([out], [lse]),
    ):
        assert same_bits(pagedmla.merge_states(outs, lses), (out, lse))


@pytest.mark.parametrize("first", EMPTY)
@pytest.mark.parametrize("second", EMPTY)
def test_two_empty_states_give_one(first: float, second: float) -> None:
    outs = [torch.full((2, 3, 4), math.nan)] * 2
    out, lse = pagedmla.merge_states(outs, [torch.full((2, 3), first), torch.full((2, 3), second)])
    assert torch.equal(out, torch.zeros(2, 3, 4))
    assert torch.equal(lse, torch.full((2, 3), -math.inf))


def test_a_real_nan_stays_visible() -> None:
    out, lse = torch.ones(2, 1, 3), torch.zeros(2, 1)
    bad = out.clone()
    bad[1, 0, 2] = math.nan
    merged, merged_lse = pagedmla.merge_states([bad, out], [lse, lse])
    assert merged.isnan().nonzero().tolist() == [[1, 0, 2]]
    assert bool(merged_lse.isfinite().all())
    merged, merged_lse = pagedmla.merge_states([out, out], [lse, torch.tensor([[math.nan], [0.0]])])
    assert bool(merged[0].isnan().all() & merged_lse[0].isnan().all())
    assert bool(merged[1].isfinite().all())


def test_a_row_that_is_empty_in_the_first_two_of_three() -> None:
    generator = torch.Generator().manual_seed(1)
    outs = [torch.randn(2, 3, 8, generator=generator) for _ in range(3)]
    lses = [torch.randn(2, 3, generator=generator) for _ in range(3)]
    for state in (0, 1):
        outs[state][1], lses[state][1] = 0.0, -math.inf
    out, lse = check_merge(outs, lses)
    assert same_bits((out[1], lse[1]), (outs[2][1], lses[2][1]))
    running = pagedmla.merge_states(outs[:2], lses[:2])
    out, lse = pagedmla.merge_states([running[0], outs[2]], [running[1], lses[2]])
    assert same_bits((out[1], lse[1]), (outs[2][1], lses[2][1]))


@pytest.mark.parametrize("size", [80.0, 2000.0, 1e6])
def test_logarithms_of_any_size(size: float) -> None:
    generator = torch.Generator().manual_seed(2)
    outs = [torch.randn(4, 3, 8, generator=generator) for _ in range(4)]
    lses = [size * torch.randn(4, 3, generator=generator) for _ in range(4)]
    check_merge(outs, lses)
    check_merge(outs, [lse - 3 * size for lse in lses])


def test_lists_and_stacks_are_the_same() -> None:
    generator = torch.Generator().manual_seed(3)
    outs, lses = torch.randn(3, 4, 2, 8, generator=generator), torch.randn(3, 4, 2, generator=generator)
    assert same_bits(pagedmla.merge_states(outs, lses), pagedmla.merge_states(list(outs), list(lses)))


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        ([], []),
        ([torch.zeros(2, 3, 4)], []),
        ([torch.zeros(2, 3, 4)], [torch.zeros(3, 2)]),
        ([torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)], [torch.zeros(2, 3)] * 2),
        ([torch.zeros(2, 3, 4)], [torch.zeros(2, 3, dtype=torch.float64)]),
        ([torch.zeros(2, 3, 4, dtype=torch.int32)], [torch.zeros(2, 3)]),
        ([torch.zeros(2, 3)], [torch.zeros(2, 3)]),
        (3, 4),
    ],
)
def test_states_that_do_not_fit_are_refused(outs: object, lses: object) -> None:
    with pytest.raises(InvalidArgument):
        pagedmla.merge_states(outs, lses)  # type: ignore[arg-type]


def test_asking_for_lse_changes_no_bit_of_out() -> None:
    call = arguments(make_batch([127, 0, 16, 300], [1, 2, 3, 1], num_heads=16))
    for options in ({}, {"num_kv_splits": 3}, {"batch_invariant": True}):
        plain, _ = run(call, **options)
        given, _ = run(call, lse=torch.full((7, 16), math.nan), **options)
        into, _ = run(call, out=torch.full((7, 16, 32), math.nan, dtype=torch.bfloat16), **options)
        assert same_bits((plain, plain), (given, into))


@pytest.mark.parametrize("size", [1, 8])
def test_shape_is_tokens_by_heads_when_they_are_equal(size: int) -> None:
    call = arguments(make_batch(range(3, 3 + size), num_heads=size, q_dtype=torch.float32))
    out, lse = run(call)
    assert lse.shape == (size, size)
    assert lse.dtype == torch.float32
    check((out, lse), call)


def test_natural_logarithm_by_hand() -> None:
    """n equal keys of score s: lse is s + ln n."""
    q, kv = torch.ones(1, 1, 6), torch.full((1, 16, 6), 0.5)
    for length in (1, 2, 10):
        _, lse = pagedmla.decode(
            q,
            kv,
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32),
            softmax_scale=0.25,
            kv_lora_rank=4,
        )
        assert lse.item() == pytest.approx(0.75 + math.log(length), abs=2e-6)
