"""LSE: the logarithm of every row, by value; asking for it changes no bit of the output."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import same_bits
from triton_backend import DEVICE, DTYPES, MODES, arguments, checked, make_batch, run

import pagedmla

pytestmark = pytest.mark.usefixtures("short_cuts")


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_asking_for_lse_changes_no_bit_of_out(mode: dict[str, Any]) -> None:
    call = arguments(make_batch([70, 0, 16], [1, 2, 3], num_heads=5))
    plain, plain_lse = run(call, **mode)
    given, given_lse = run(call, lse=torch.full((6, 5), math.nan, device=DEVICE), **mode)
    into, _ = run(call, out=torch.full_like(plain, math.nan), **mode)
    assert same_bits((plain, plain, plain_lse), (given, into, given_lse))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [*MODES, {"num_kv_splits": 1}], ids=str)
def test_natural_logarithm_by_hand(mode: dict[str, Any], dtype: torch.dtype) -> None:
    """n equal keys of score s: lse is s + ln n, whichever pieces they were cut into."""
    lengths = [1, 2, 10, 90]
    q = torch.ones(4, 1, 6, dtype=dtype, device=DEVICE)
    kv = torch.full((4, 96, 6), 0.5, dtype=dtype, device=DEVICE)
    table = torch.arange(4, dtype=torch.int32, device=DEVICE)[:, None]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    options = {"softmax_scale": 0.25, "kv_lora_rank": 4, "backend": "triton"}
    out, lse = pagedmla.decode(q, kv, table, seq_lens, **options, **mode)
    assert lse[:, 0].tolist() == pytest.approx([0.75 + math.log(n) for n in lengths], abs=2e-6)
    assert bool((out == 0.5).all())


def test_shape_is_tokens_by_heads_when_they_are_equal() -> None:
    out, lse = checked(arguments(make_batch([3, 4, 5, 6], num_heads=4)))
    assert (out.shape, lse.shape, lse.dtype) == ((4, 4, 32), (4, 4), torch.float32)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_states_of_pieces_merge_to_the_whole(mode: dict[str, Any]) -> None:
    """Keys cut in three, one piece empty for a sequence, attended to apart and merged by the Triton kernel."""
    batch = make_batch([70, 40], [1, 2], num_heads=4, causal=False)
    whole = arguments(batch)
    pieces = []
    for cuts in (
        (slice(0, 33), slice(0, 0)),
        (slice(33, 34), slice(0, 17)),
        (slice(34, None), slice(17, None)),
    ):
        tokens = tuple(keys[cut] for keys, cut in zip(batch.tokens, cuts, strict=True))
        pieces.append(checked(arguments(replace(batch, tokens=tokens)), **mode))
    outs, lses = zip(*pieces, strict=True)
    merged, merged_lse = pagedmla.merge_states(outs, lses)
    out, lse = checked(whole, **mode)
    # three roundings to half precision, and one more
    torch.testing.assert_close(merged, out, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)
