"""The oracle keeps the contract: masks, empty rows, rows of nobody, memory of nobody, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from batches import arguments, make_batch, same_bits

from pagedmla import reference
from pagedmla.contract.errors import InvalidArgument, Unsupported


def test_rows_that_see_no_key_are_zero_with_lse_minus_infinity() -> None:
    call = arguments(make_batch([3, 0, 4], [5, 2, 1]))
    out, lse = reference.decode(**call)
    assert out.dtype == lse.dtype == torch.float64
    blind = [0, 1, 5, 6]  # the first two of five queries over three keys, and both over none
    assert torch.equal(out[blind], torch.zeros_like(out[blind]))
    assert bool((lse[blind] == -math.inf).all())
    seen = [2, 3, 4, 7]
    assert bool(out[seen].isfinite().all() & lse[seen].isfinite().all())


def test_rows_of_no_sequence_are_zero_whatever_they_hold() -> None:
    call = arguments(make_batch([9, 4], [2, 1]))
    padding = torch.full((1, *call["q"].shape[1:]), math.nan, dtype=call["q"].dtype)
    padded = call | {"q": torch.cat([padding, call["q"], padding]), "cu_seqlens_q": call["cu_seqlens_q"] + 1}
    out, lse = reference.decode(**padded)
    assert torch.equal(out[[0, -1]], torch.zeros_like(out[[0, -1]]))
    assert bool((lse[[0, -1]] == -math.inf).all())
    assert same_bits((out[1:-1], lse[1:-1]), reference.decode(**call))


def test_causal_row_sees_keys_up_to_its_own_position() -> None:
    batch = make_batch([10], [3], q_dtype=torch.float32)
    call = arguments(batch, page_size=3)
    together, _ = reference.decode(**call)
    for query in range(3):
        single = call | {
            "q": call["q"][query : query + 1],
            "seq_lens": torch.tensor([8 + query], dtype=torch.int32),
            "cu_seqlens_q": None,
        }
        alone, _ = reference.decode(**single)
        torch.testing.assert_close(together[query], alone[0], rtol=1e-14, atol=1e-15)
    everything, _ = reference.decode(**(call | {"causal": False}))
    assert not torch.allclose(everything[0], together[0])
    torch.testing.assert_close(everything[2], together[2], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("page_size", [1, 2, 16, 480])
def test_layout_and_poison_change_no_bit(page_size: int) -> None:
    batch = make_batch([17, 0, 1, 33], [1, 2, 1, 3])
    first = reference.decode(**arguments(batch, 16))
    second = reference.decode(**arguments(batch, page_size, layout_seed=5, poison="finite"))
    assert same_bits(first, second)


def test_a_query_pair_is_its_concatenation() -> None:
    batch = make_batch([12, 5], [2, 1])
    call = arguments(batch)
    rank = batch.kv_lora_rank
    pair = (call["q"][..., :rank], call["q"][..., rank:])
    assert same_bits(reference.decode(**call), reference.decode(**(call | {"q": pair})))


def test_out_and_lse_get_the_result_in_their_dtype() -> None:
    call = arguments(make_batch([12, 0]))
    out, lse = torch.full((2, 4, 32), math.nan, dtype=torch.bfloat16), torch.full((2, 4), math.nan)
    exact, exact_lse = reference.decode(
        **call, out=out, lse=lse, backend="torch", num_kv_splits=3, validate=True
    )
    assert torch.equal(out, exact.to(torch.bfloat16))
    assert torch.equal(lse, exact_lse.float())


def test_attend_gives_what_decode_is_made_of() -> None:
    batch = make_batch([7, 0, 20], [2, 1, 1])
    call = arguments(batch)
    out, lse = reference.decode(**call)
    for part in reference.attend(**call):
        keys = batch.tokens[part.sequence].double()
        assert torch.equal(part.keys, keys)
        assert torch.equal(part.values, keys[:, : batch.kv_lora_rank])
        assert torch.equal(out[part.rows], part.probabilities @ part.values)
        assert torch.equal(lse[part.rows], part.lse)
        if len(keys):
            totals = part.probabilities.sum(-1)
            torch.testing.assert_close(totals, torch.ones_like(totals), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"seq_lens": torch.tensor([65, 1], dtype=torch.int32)}, "seq_lens"),
        ({"seq_lens": torch.tensor([-1, 1], dtype=torch.int32)}, "seq_lens"),
        ({"block_table": torch.full((2, 4), -1, dtype=torch.int32)}, "block_table"),
        ({"block_table": torch.full((2, 4), 99, dtype=torch.int32)}, "block_table"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 1], dtype=torch.int32)}, "cu_seqlens_q"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 3], dtype=torch.int32)}, "cu_seqlens_q"),
        ({"q": torch.zeros(3, 4, 40), "cu_seqlens_q": None}, "q"),
        ({"q": torch.zeros(2, 4, 41)}, "kv_cache"),
        ({"kv_scale": 0.5}, "kv_scale"),
        ({"q_scale": 0.5}, "q_scale"),
    ],
)
def test_what_leads_outside_is_refused(change: dict[str, object], argument: str) -> None:
    call = arguments(make_batch([20, 1]), spare_columns=2)
    with pytest.raises(InvalidArgument) as caught:
        reference.decode(**(call | change))
    assert caught.value.argument == argument


def test_a_packed_layout_is_not_built() -> None:
    call = arguments(make_batch([4]))
    packed = torch.zeros(2, 16, 656, dtype=torch.uint8)
    with pytest.raises(Unsupported) as caught:
        reference.decode(**(call | {"kv_cache": packed}))
    assert caught.value.code == "kv_layout"
