"""FlashMLA's calls over ours: its signature and conventions, our values to the bit, and what is refused by name."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import arguments, check, expect, make_batch, same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import lengths, seeds
from torch import Tensor

import pagedmla
from pagedmla.compat.flash_mla import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.target import KNOWN_TARGETS, Target

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate_flash_mla.md"
HEADS, PAGES, Q_LENS = (1, 16, 20, 64, 128), (1, 16, 64), (1, 2, 3)
DIMS = (512, 64)
SOME = torch.zeros(2, dtype=torch.int32)


def seq_lens(page_size: int) -> list[int]:
    """Lengths with holes, one token, primes and the edges of a page."""
    return [0, 1, 127, 131, page_size, page_size + 1, 2 * page_size - 1]


def call_of(lens: list[int], q_len: int = 1, page_size: int = 16, **options: Any) -> dict[str, Any]:
    layout = options.pop("layout", {})
    return arguments(make_batch(lens, [q_len] * len(lens), **options), page_size, **layout)


def theirs(call: dict[str, Any]) -> dict[str, Any]:
    """A call of ours, with the same number of query tokens for each sequence, in FlashMLA's words."""
    num_seqs = call["seq_lens"].shape[0]
    return {
        "q": call["q"].unflatten(0, (num_seqs, -1)),
        "k_cache": call["kv_cache"].unsqueeze(2),
        "block_table": call["block_table"],
        "cache_seqlens": call["seq_lens"],
        "head_dim_v": call["kv_lora_rank"],
        "tile_scheduler_metadata": None,
        "softmax_scale": call["softmax_scale"],
        "causal": call["causal"],
    }


def packed(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """FlashMLA's results as ours: [num_tokens, num_heads, dv] and [num_tokens, num_heads]."""
    return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def ours(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    tensors = [call[name] for name in ("q", "kv_cache", "block_table", "seq_lens")]
    options = {name: call[name] for name in ("softmax_scale", "causal", "kv_lora_rank")}
    return pagedmla.decode(*tensors, **options)


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("q_len", Q_LENS)
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_bits(num_heads: int, q_len: int, causal: bool) -> None:
    page_size = PAGES[(HEADS.index(num_heads) + q_len + causal) % 3]
    lens = seq_lens(page_size)
    call = call_of(lens, q_len, page_size, num_heads=num_heads, dims=DIMS, causal=causal, seed=q_len)
    given_ = theirs(call)
    metadata = get_mla_metadata(call["seq_lens"], q_len * num_heads, 1)
    given_["tile_scheduler_metadata"], given_["num_splits"] = metadata
    out, lse = flash_mla_with_kvcache(**given_)
    assert out.shape == (len(lens), q_len, num_heads, 512)
    assert lse.shape == (len(lens), num_heads, q_len)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    check(packed(out, lse), call)
    assert same_bits(packed(out, lse), ours(call))


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 32, 64, 480])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_page_size_and_dtype(page_size: int, dtype: torch.dtype) -> None:
    call = call_of(seq_lens(page_size), 2, page_size, q_dtype=dtype)
    found = packed(*flash_mla_with_kvcache(**theirs(call)))
    check(found, call)
    assert same_bits(found, ours(call))


@given(st.data())
def test_any_lengths(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from(PAGES))
    lens = data.draw(st.lists(lengths(page_size), min_size=1, max_size=5))
    q_len, causal = data.draw(st.sampled_from(Q_LENS)), data.draw(st.booleans())
    call = call_of(lens, q_len, page_size, causal=causal, seed=data.draw(seeds))
    found = packed(*flash_mla_with_kvcache(**theirs(call)))
    check(found, call)
    assert same_bits(found, ours(call))


def test_what_no_row_owns_changes_no_bit() -> None:
    results = [
        flash_mla_with_kvcache(**theirs(call_of([5, 0, 33], 2, layout={"poison": poison})))
        for poison in ("nan", "inf", "finite")
    ]
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_empty_rows_are_minus_infinity_and_merge_as_nothing() -> None:
    """Theirs are +inf.  A causal query before the first key sees none either."""
    call = call_of([0, 2, 40], 3)
    out, lse = flash_mla_with_kvcache(**theirs(call))
    empty = torch.zeros(3, 4, 3, dtype=torch.bool)
    empty[0], empty[1, :, 0] = True, True
    assert torch.equal(lse == -math.inf, empty)
    assert bool((out.transpose(1, 2)[empty] == 0).all())
    other = torch.linspace(-5, 5, lse.numel()).view_as(lse)
    assert torch.equal(torch.logaddexp(lse, other)[empty], other[empty])
    states = packed(out, lse), packed(torch.ones_like(out), other)
    merged, merged_lse = pagedmla.merge_states(*map(list, zip(*states, strict=True)))
    rows = packed(out, empty)[1]
    assert bool((merged[rows] == 1).all())
    assert torch.equal(merged_lse[rows], states[1][1][rows])


def test_the_default_scale_is_theirs() -> None:
    """576 ** -0.5, the head size after absorption: a convention kept, and a trap."""
    call = call_of([127, 1, 0, 16], 2, dims=DIMS, num_heads=3, spread=0.3) | {"causal": False}
    given_ = theirs(call)
    scale, default = given_.pop("softmax_scale"), 576**-0.5
    del given_["causal"]
    found = packed(*flash_mla_with_kvcache(**given_))
    assert scale != default
    check(found, call | {"softmax_scale": default})
    assert same_bits(found, ours(call | {"softmax_scale": default}))


def test_views_are_read_where_they_lie() -> None:
    call = call_of([40, 17], 2, num_heads=6)
    expected = flash_mla_with_kvcache(**theirs(call))
    given_ = theirs(call)
    by_heads = given_["q"].transpose(1, 2).contiguous().transpose(1, 2)
    pool = torch.full((*call["kv_cache"].shape[:2], 3, 40), math.nan, dtype=torch.bfloat16)
    pool[:, :, 1:2] = given_["k_cache"]
    table = torch.full((2, 20), 2**31 - 1, dtype=torch.int32)
    table[:, 7 : 7 + call["block_table"].shape[1]] = call["block_table"]
    views = {
        "q": by_heads,
        "k_cache": pool[:, :, 1:2],
        "block_table": table[:, 7 : 7 + call["block_table"].shape[1]],
    }
    assert not by_heads.is_contiguous()
    for name, view in views.items():
        assert same_bits(expected, flash_mla_with_kvcache(**given_ | {name: view})), name


@pytest.mark.parametrize("lens", [[], [0], [0, 0]])
@pytest.mark.parametrize("q_len", [0, 1, 2])
def test_batches_of_nothing(lens: list[int], q_len: int) -> None:
    given_ = theirs(call_of([3, 4], 2))
    given_["q"] = given_["q"][:1, :1].expand(len(lens), q_len, -1, -1)
    given_["cache_seqlens"] = torch.tensor(lens, dtype=torch.int32)
    given_["block_table"] = given_["block_table"][: len(lens)]
    out, lse = flash_mla_with_kvcache(**given_)
    assert out.shape == (len(lens), q_len, 4, 32)
    assert lse.shape == (len(lens), 4, q_len)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def test_metadata_has_their_shapes() -> None:
    lens = torch.tensor([5, 0, 7], dtype=torch.int32)
    schedule, splits = get_mla_metadata(lens, 128, 1)
    assert schedule.dtype == splits.dtype == torch.int32
    assert schedule.dim() == 2
    assert schedule.shape[1] == 8
    assert schedule.shape[0] >= 1
    assert splits.tolist() == [0, 1, 2, 3]
    # the second generation, by position and by name
    assert get_mla_metadata(lens, 128, 1, 128, False, None)[1].tolist() == [0, 1, 2, 3]
    assert get_mla_metadata(lens, num_q_tokens_per_head_k=128, num_heads_k=1)[0].shape == schedule.shape
    newest, none = get_mla_metadata()
    assert isinstance(newest, FlashMLASchedMeta)
    assert none is None


@pytest.mark.parametrize(("rows", "parts"), [(1, 132), (64, 132), (65, 66), (128, 66), (384, 22), (10**6, 1)])
def test_metadata_has_as_many_parts_as_theirs(monkeypatch: pytest.MonkeyPatch, rows: int, parts: int) -> None:
    """Engines keep a buffer of that size.  Multiprocessors over tiles of 64 query rows, at least one."""
    monkeypatch.setattr(Target, "detect", lambda device: KNOWN_TARGETS["sm_90"])
    assert get_mla_metadata(SOME, rows, 1)[0].shape == (parts, 8)


def test_metadata_is_never_stale() -> None:
    """Made for other lengths, another batch or another form, filled with rubbish, or kept in a buffer of the caller's."""
    call = call_of([131, 0, 16], 2)
    expected = packed(*flash_mla_with_kvcache(**theirs(call)))
    check(expected, call)
    other = get_mla_metadata(torch.tensor([1], dtype=torch.int32), 8, 1)
    buffer = torch.full((200, 8), -(2**31), dtype=torch.int32)
    rubbish = torch.full((9,), 2**31 - 1, dtype=torch.int32)
    for schedule, splits in (other, (buffer, rubbish), get_mla_metadata(), (buffer[:1], None)):
        given_ = theirs(call) | {"tile_scheduler_metadata": schedule, "num_splits": splits}
        assert same_bits(expected, packed(*flash_mla_with_kvcache(**given_)))


def test_numpys_numbers_are_whole_numbers() -> None:
    given_ = theirs(call_of([20, 3], 2))
    expected = packed(*flash_mla_with_kvcache(**given_))
    head_dim_v = np.int64(given_["head_dim_v"])
    assert same_bits(expected, packed(*flash_mla_with_kvcache(**given_ | {"head_dim_v": head_dim_v})))
    schedule, splits = get_mla_metadata(SOME, np.int32(128), np.int64(1))
    wanted = get_mla_metadata(SOME, 128, 1)
    assert isinstance(schedule, Tensor)
    assert isinstance(splits, Tensor)
    assert torch.equal(schedule, wanted[0])
    assert torch.equal(splits, wanted[1])


def test_a_caller_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    given_ = theirs(call_of([20, 3, 0], 2))
    compiled = torch.compile(flash_mla_with_kvcache, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(**given_), flash_mla_with_kvcache(**given_))


def test_the_signatures_are_theirs() -> None:
    """flash_mla/flash_mla_interface.py at 02fe0d02e83f, written down by hand; the classic form is a prefix of it."""
    required = inspect.Parameter.empty
    assert [(p.name, p.default) for p in inspect.signature(flash_mla_with_kvcache).parameters.values()] == [
        ("q", required),
        ("k_cache", required),
        ("block_table", required),
        ("cache_seqlens", required),
        ("head_dim_v", required),
        ("tile_scheduler_metadata", required),
        ("num_splits", None),
        ("softmax_scale", None),
        ("causal", False),
        ("is_fp8_kvcache", False),
        ("indices", None),
        ("attn_sink", None),
        ("extra_k_cache", None),
        ("extra_indices_in_kvcache", None),
        ("topk_length", None),
        ("extra_topk_length", None),
    ]
    metadata = list(inspect.signature(get_mla_metadata).parameters)
    second = ["cache_seqlens", "num_heads_per_head_k", "num_heads_k", "num_heads_q", "is_fp8_kvcache", "topk"]
    assert metadata[:6] == second


@pytest.mark.parametrize(
    ("changed", "kind", "argument"),
    [
        ({"is_fp8_kvcache": True}, Unsupported, "is_fp8_kvcache"),
        ({"indices": SOME}, Unsupported, "indices"),
        ({"attn_sink": torch.zeros(4)}, Unsupported, "attn_sink"),
        ({"extra_k_cache": SOME}, Unsupported, "extra_k_cache"),
        ({"extra_indices_in_kvcache": SOME}, Unsupported, "extra_indices_in_kvcache"),
        ({"topk_length": SOME}, Unsupported, "topk_length"),
        ({"extra_topk_length": SOME}, Unsupported, "extra_topk_length"),
        ({"k_cache": torch.zeros(8, 16, 2, 40, dtype=torch.bfloat16)}, Unsupported, "k_cache"),
        ({"k_cache": torch.zeros(8, 16, 1, 40).to(torch.float8_e4m3fn)}, Unsupported, "k_cache"),
        ({"k_cache": torch.zeros(8, 16, 1, 40, dtype=torch.float16)}, InvalidArgument, "k_cache"),
        ({"k_cache": torch.zeros(8, 16, 40, dtype=torch.bfloat16)}, InvalidArgument, "k_cache"),
        ({"k_cache": torch.zeros(8, 16, 1, 42, dtype=torch.bfloat16)}, InvalidArgument, "k_cache"),
        ({"k_cache": None}, InvalidArgument, "k_cache"),
        ({"q": torch.zeros(4, 4, 40, dtype=torch.bfloat16)}, InvalidArgument, "q"),
        ({"q": torch.zeros(2, 2, 4, 40).to(torch.float8_e4m3fn)}, Unsupported, "q"),
        ({"q": torch.zeros(3, 2, 4, 40, dtype=torch.bfloat16)}, InvalidArgument, "block_table"),
        ({"block_table": None}, InvalidArgument, "block_table"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, InvalidArgument, "block_table"),
        ({"cache_seqlens": None}, InvalidArgument, "cache_seqlens"),
        ({"cache_seqlens": torch.zeros(3, dtype=torch.int32)}, InvalidArgument, "cache_seqlens"),
        ({"head_dim_v": 41}, InvalidArgument, "head_dim_v"),
        ({"head_dim_v": True}, InvalidArgument, "head_dim_v"),
        ({"head_dim_v": 32.0}, InvalidArgument, "head_dim_v"),
        ({"head_dim_v": torch.tensor(32)}, InvalidArgument, "head_dim_v"),
        ({"head_dim_v": np.int64(0)}, InvalidArgument, "head_dim_v"),
        ({"head_dim_v": np.int64(41)}, InvalidArgument, "head_dim_v"),
        ({"tile_scheduler_metadata": torch.zeros(1, 8)}, InvalidArgument, "tile_scheduler_metadata"),
        ({"tile_scheduler_metadata": 3}, InvalidArgument, "tile_scheduler_metadata"),
        ({"num_splits": FlashMLASchedMeta()}, InvalidArgument, "num_splits"),
        # a caller by position who has forgotten softmax_scale
        ({"softmax_scale": True}, InvalidArgument, "softmax_scale"),
        ({"softmax_scale": -1.0}, InvalidArgument, "softmax_scale"),
        ({"causal": 1}, InvalidArgument, "causal"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_refusals_name_the_argument(changed: dict[str, Any], kind: type, argument: str) -> None:
    given_ = theirs(call_of([20, 3], 2)) | changed
    with pytest.raises(kind) as raised:
        flash_mla_with_kvcache(**given_)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("changed", "kind", "argument"),
    [
        ({"topk": 2048}, Unsupported, "topk"),
        ({"is_fp8_kvcache": True}, Unsupported, "is_fp8_kvcache"),
        ({"num_heads_k": 2}, Unsupported, "num_heads_k"),
        ({"num_heads_k": None}, InvalidArgument, "num_heads_k"),
        ({"num_heads_per_head_k": 0}, InvalidArgument, "num_heads_per_head_k"),
        ({"cache_seqlens": [1, 2]}, InvalidArgument, "cache_seqlens"),
        ({"cache_seqlens": torch.zeros(2, dtype=torch.int64)}, InvalidArgument, "cache_seqlens"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_metadata_refusals_name_the_argument(changed: dict[str, Any], kind: type, argument: str) -> None:
    given_: dict[str, Any] = {"cache_seqlens": SOME, "num_heads_per_head_k": 16, "num_heads_k": 1}
    with pytest.raises(kind) as raised:
        get_mla_metadata(**given_ | changed)
    assert raised.value.argument == argument


def test_the_page_s_example_runs_and_is_right() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    exec(compile(blocks[0], PAGE.name, "exec"), names)
    call = {
        "q": names["q"].flatten(0, 1),
        "kv_cache": names["kv"].squeeze(2),
        "block_table": names["block_table"],
        "seq_lens": names["lengths"],
        "softmax_scale": 192**-0.5,
    }
    check(packed(names["out"], names["lse"]), call)
    assert bool((expect(call).lse[2:4] == -math.inf).all())
