"""``mla_decode_fwd``: AITER's arguments, the oracle's values, our own decode's bits, in both modes and for every page size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import arguments, expect, make_batch, run, same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import batches
from torch import Tensor

from pagedmla.compat import aiter
from pagedmla.conformance import numerics
from pagedmla.contract.errors import InvalidArgument
from pagedmla.paging.csr import block_table_to_csr

GARBAGE = (-1, 2**31 - 1, -(2**31), 7)
# AITER's own list, what it aborts on (20, and 64 with one token), and the counts that it folds
HEADS = (1, 8, 16, 20, 32, 64, 96, 128)
DEEPSEEK = (512, 64)


def aiter_call(call: dict[str, Any]) -> dict[str, Any]:
    """The same batch in AITER's words: ``o`` holds nan, and the list of pages goes on with garbage."""
    q, cache = call["q"], call["kv_cache"]
    csr = block_table_to_csr(call["block_table"], call["seq_lens"], cache.shape[1])
    out_dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    return {
        "q": q,
        "kv_buffer": cache.unsqueeze(2),
        "o": torch.full((*q.shape[:2], call["kv_lora_rank"]), math.nan, dtype=out_dtype),
        "qo_indptr": call["cu_seqlens_q"],
        "kv_indptr": csr.kv_indptr,
        "kv_indices": torch.cat([csr.kv_indices, torch.tensor(GARBAGE, dtype=torch.int32)]),
        "kv_last_page_lens": csr.kv_last_page_len,
        "max_seqlen_q": max(1, int(call["cu_seqlens_q"].diff().max())),
        "page_size": cache.shape[1],
        "sm_scale": call["softmax_scale"],
        "causal": call["causal"],
        "q_scale": call["q_scale"],
        "kv_scale": call["kv_scale"],
    }


def metadata(given: dict[str, Any]) -> dict[str, Tensor]:
    """The six buffers of the persistent mode, full of garbage before they are filled."""
    heads, num_requests = given["q"].shape[1], given["qo_indptr"].shape[0] - 1
    dtypes = (given["q"].dtype, given["kv_buffer"].dtype)
    info = aiter.get_mla_metadata_info_v1(
        num_requests, given["max_seqlen_q"], heads, *dtypes, is_sparse=False
    )
    names = (
        "work_meta_data",
        "work_indptr",
        "work_info_set",
        "reduce_indptr",
        "reduce_final_map",
        "reduce_partial_map",
    )
    buffers = {
        name: torch.full(
            (size,) if isinstance(size, int) else size, 99, dtype=dtype, device=given["q"].device
        )
        for name, (size, dtype) in zip(names, info, strict=True)
    }
    aiter.get_mla_metadata_v1(
        given["qo_indptr"],
        given["kv_indptr"],
        given["kv_last_page_lens"],
        heads,
        1,
        given["causal"],
        buffers["work_meta_data"],
        buffers["work_info_set"],
        buffers["work_indptr"],
        *(buffers[name] for name in names[3:]),
        page_size=given["page_size"],
        max_seqlen_qo=given["max_seqlen_q"],
    )
    return buffers


def decode(given: dict[str, Any], persistent: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Runs the call; the first result is the caller's ``o``."""
    buffers = metadata(given) if persistent else {}
    out, lse = aiter.mla_decode_fwd(**given, **buffers, return_lse=True, **options)
    assert out is given["o"]
    assert lse is not None
    return out, lse


def check(given: dict[str, Any], call: dict[str, Any], persistent: bool, **options: Any) -> None:
    """Within the derived bound of the oracle, and the bits of our own decode."""
    result = decode(given, persistent, **options)
    comparison = numerics.compare(*result, expect(call))
    assert comparison.passed, comparison.detail
    splits = None if persistent else options.get("num_kv_splits")
    own = run(call, backend=None, max_q_len=given["max_seqlen_q"], num_kv_splits=splits)
    assert same_bits(result, own)


def lengths(page_size: int) -> list[int]:
    return [0, 1, 127, page_size, 131, page_size + 1, max(page_size - 1, 2)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("num_heads", HEADS)
def test_head_counts(num_heads: int, persistent: bool) -> None:
    call = arguments(make_batch([0, 131, 1, 65], num_heads=num_heads, dims=DEEPSEEK), 64)
    check(aiter_call(call), call, persistent)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 8])
def test_query_lengths(q_len: int, causal: bool, persistent: bool) -> None:
    """Shorter than the query, too: rows that see nothing."""
    batch = make_batch([*lengths(16), 3], [q_len] * 8, num_heads=16, causal=causal)
    call = arguments(batch, 16)
    check(aiter_call(call), call, persistent)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(page_size: int, persistent: bool) -> None:
    """Last pages that are not full, in both modes."""
    call = arguments(make_batch(lengths(page_size), [1, 2, 0, 3, 1, 8, 1], num_heads=5), page_size)
    check(aiter_call(call), call, persistent)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz),
    ],
)
def test_dtypes_and_their_scales(q_dtype: torch.dtype, kv_dtype: torch.dtype, persistent: bool) -> None:
    batch = make_batch([33, 0, 127], [2, 1, 1], num_heads=16, q_dtype=q_dtype, kv_dtype=kv_dtype)
    call = arguments(batch, 16)
    check(aiter_call(call), call, persistent)
    for name in ("q_scale", "kv_scale"):
        if call[name] is not None:
            call[name] = torch.tensor([call[name]])
    check(aiter_call(call), call, persistent)


def test_scales_of_wide_numbers_are_not_looked_at() -> None:
    """Engines hand them over in any case; AITER's kernels for bf16 do not read them."""
    call = arguments(make_batch([33, 5]))
    plain = decode(aiter_call(call), False)
    scaled = aiter_call(call) | {"q_scale": torch.tensor([3.0]), "kv_scale": torch.tensor([5.0])}
    assert same_bits(decode(scaled, False), plain)


@given(st.data())
def test_any_lengths(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 3, 16, 64]))
    batch = data.draw(batches(page_size, max_q_len=4, causal=data.draw(st.booleans())))
    call = arguments(batch, page_size, layout_seed=data.draw(st.integers(0, 99)))
    if call["q"].shape[0]:
        splits = data.draw(st.sampled_from([None, 1, 2, 5]))
        check(aiter_call(call), call, data.draw(st.booleans()), num_kv_splits=splits)


@pytest.mark.parametrize("persistent", [False, True])
def test_what_is_not_owned_does_not_matter(persistent: bool) -> None:
    batch = make_batch([127, 0, 16, 33], [1, 2, 3, 1], num_heads=16)
    plain = decode(aiter_call(arguments(batch, 16)), persistent)
    for poison in ("inf", "finite"):
        given = aiter_call(arguments(batch, 16, poison=poison))
        given["kv_indices"][-len(GARBAGE) :] = 0
        assert same_bits(decode(given, persistent), plain)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 200])
def test_lse_is_written_for_every_number_of_splits(splits: int) -> None:
    call = arguments(make_batch([64, 0, 1, 131], num_heads=16))
    given = aiter_call(call)
    indptr = torch.arange(5, dtype=torch.int32) * splits
    check(given, call, False, num_kv_splits=splits, num_kv_splits_indptr=indptr)


@pytest.mark.parametrize("persistent", [False, True])
def test_with_and_without_lse(persistent: bool) -> None:
    call = arguments(make_batch([64, 3], num_heads=8))
    one, two, three = (aiter_call(call) for _ in range(3))
    _, lse = decode(one, persistent)
    out, nothing = aiter.mla_decode_fwd(**two, **(metadata(two) if persistent else {}))
    assert nothing is None
    storage = torch.full((4, 8), math.nan)
    _, into = decode(three, persistent, lse=storage[1:3])
    assert into.data_ptr() == storage[1:3].data_ptr()
    assert same_bits((one["o"], lse), (out, storage[1:3]))
    assert bool(storage[[0, 3]].isnan().all())


def test_the_callers_tensors_stay_as_they_are() -> None:
    given = aiter_call(arguments(make_batch([64, 3, 0], [4, 1, 2], num_heads=32)))
    whole = torch.full((9, 40, 32), math.nan, dtype=torch.bfloat16)
    given["o"] = whole[1:8, 4:36]
    before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    address, strides = given["o"].data_ptr(), given["o"].stride()
    decode(given, True)
    assert (given["o"].data_ptr(), given["o"].stride()) == (address, strides)
    assert bool(whole[1:8, 4:36].isfinite().all())
    assert bool(whole[0].isnan().all() & whole[8].isnan().all() & whole[:, :4].isnan().all())
    for name in set(before) - {"o"}:
        assert same_bits((given[name],), (before[name],)), name


@pytest.mark.parametrize("last", [127, 2**31 - 1, 0, -5])
def test_a_last_page_length_out_of_range(last: int) -> None:
    """The founding fault: with one-token pages, engines gave the sequence's length.  Bounded; reported when asked."""
    call = arguments(make_batch([127, 131, 0], num_heads=16), 1)
    given = aiter_call(call)
    right = decode(aiter_call(call), False)
    given["kv_last_page_lens"][0] = last
    assert same_bits(decode(given, False), right)
    with pytest.raises(InvalidArgument) as error:
        decode(given, False, validate=True)
    assert (error.value.code, error.value.argument) == ("last_page_len", "kv_last_page_lens")
    assert str(last) in error.value.got


def test_a_last_page_length_past_the_page_is_a_full_page() -> None:
    batch = make_batch([32, 5], num_heads=4)
    given = aiter_call(arguments(batch, 16))
    right = decode(aiter_call(arguments(batch, 16)), False)
    given["kv_last_page_lens"][0] = 99
    assert same_bits(decode(given, False), right)


@pytest.mark.parametrize(
    ("name", "place", "value", "argument"),
    [
        ("kv_indptr", 1, 9, "kv_indptr"),
        ("kv_indptr", 0, -1, "kv_indptr"),
        ("kv_indptr", 3, 99, "kv_indptr"),
        ("kv_indices", 1, 10**6, "kv_indices"),
        ("kv_indices", 1, -1, "kv_indices"),
        ("qo_indptr", 3, 99, "qo_indptr"),
        ("qo_indptr", 0, 1, "qo_indptr"),
    ],
)
def test_other_values_out_of_range(name: str, place: int, value: int, argument: str) -> None:
    """Nothing outside the tensors is touched; ``validate`` names AITER's argument."""
    given = aiter_call(arguments(make_batch([20, 33, 40], num_heads=4)))
    given[name][place] = value
    guarded = torch.full((5, 4, 32), -768.0, dtype=torch.bfloat16)
    given["o"] = guarded[1:4]
    decode(given, False)
    assert bool((guarded[[0, 4]] == -768).all())
    with pytest.raises(InvalidArgument) as error:
        decode(given, False, validate=True)
    assert error.value.argument == argument


def test_a_query_longer_than_promised_is_reported() -> None:
    given = aiter_call(arguments(make_batch([20, 33], [1, 3], num_heads=4))) | {"max_seqlen_q": 2}
    with pytest.raises(InvalidArgument) as error:
        decode(given, False, validate=True)
    assert error.value.argument == "qo_indptr"


def test_longer_buffers_of_a_larger_batch() -> None:
    """Requests are counted by qo_indptr, as in AITER."""
    call = arguments(make_batch([33, 20], num_heads=4))
    given = aiter_call(call)
    right = decode(aiter_call(call), False)
    given["kv_indptr"] = torch.cat([given["kv_indptr"], torch.tensor([1, 10**6], dtype=torch.int32)])
    given["kv_last_page_lens"] = torch.cat(
        [given["kv_last_page_lens"], torch.tensor([77], dtype=torch.int32)]
    )
    assert same_bits(decode(given, False, validate=True), right)


@pytest.mark.parametrize("max_pages", [3, 9, 1000])
def test_most_pages_of_a_request(max_pages: int) -> None:
    call = arguments(make_batch([33, 0, 48, 1], num_heads=4))
    check(aiter_call(call), call, False, max_pages=max_pages)


def test_more_pages_than_promised_are_reported() -> None:
    given = aiter_call(arguments(make_batch([33, 20, 48], num_heads=4)))
    with pytest.raises(InvalidArgument) as error:
        decode(given, False, max_pages=2, validate=True)
    assert (error.value.code, error.value.argument) == ("max_pages", "kv_indptr")


@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 3}], ids=str)
def test_another_backend(options: dict[str, int]) -> None:
    """Named, it runs; the bits are its own."""
    call = arguments(make_batch([20, 0, 33], [1, 1, 2], num_heads=4, q_dtype=torch.float16))
    given = aiter_call(call)
    result = decode(given, not options, backend="triton", **options)
    comparison = numerics.compare(*result, expect(call, p_dtype=torch.float16))
    assert comparison.passed, comparison.detail
    assert same_bits(result, run(call, backend="triton", max_q_len=2, **options))


def test_a_stale_schedule_does_no_harm() -> None:
    """One plan, other lengths: what a captured graph replays."""
    planned = metadata(aiter_call(arguments(make_batch([500, 1, 3], [2, 2, 2], num_heads=16))))
    call = arguments(make_batch([0, 131, 64], [2, 2, 2], num_heads=16))
    given = aiter_call(call)
    out, lse = aiter.mla_decode_fwd(**given, **planned, return_lse=True)
    assert lse is not None
    assert same_bits((out, lse), run(call, backend=None, max_q_len=2))


def test_rows_of_no_request() -> None:
    """Padding behind the last request, as engines leave it in graphs: no keys, so 0 and -inf."""
    given = aiter_call(arguments(make_batch([33, 20, 5, 7], num_heads=4)))
    given["qo_indptr"] = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32)
    out, lse = decode(given, True)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert bool((lse[2:] == -math.inf).all() & lse[:2].isfinite().all())


@pytest.mark.parametrize("persistent", [False, True])
def test_no_requests_and_no_pages(persistent: bool) -> None:
    empty = aiter_call(arguments(make_batch([0, 0], num_heads=4)))
    out, lse = decode(empty | {"kv_indices": empty["kv_indices"][:0]}, persistent)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((lse == -math.inf).all())
    none = empty | {"q": empty["q"][:0], "o": empty["o"][:0], "qo_indptr": empty["qo_indptr"][:1]}
    out, lse = decode(none, persistent)
    assert (list(out.shape), list(lse.shape)) == ([0, 4, 32], [0, 4])


def test_the_scale_that_is_left_out_is_aiters() -> None:
    """1 / sqrt(576): from the size of a cached row, which is no model's scale."""
    call = arguments(make_batch([33, 5], num_heads=2, dims=DEEPSEEK))
    given = aiter_call(call)
    result = decode(given | {"sm_scale": None}, False)
    comparison = numerics.compare(*result, expect(call | {"softmax_scale": 576**-0.5}))
    assert comparison.passed, comparison.detail


def test_no_value_is_read_on_a_device() -> None:
    """A meta tensor has no values: whatever waits for one raises."""
    given = aiter_call(arguments(make_batch([33, 0, 131], [1, 2, 3], num_heads=4)))
    on_meta = {
        name: value.to("meta") if isinstance(value, Tensor) else value for name, value in given.items()
    }
    out, lse = decode(on_meta, True)
    assert (out.shape, lse.shape) == (given["o"].shape, given["o"].shape[:2])
