"""What the AITER-shaped calls refuse: by name, with what was wanted and what came, before anything is written."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedmla.compat import aiter
from pagedmla.contract.errors import InvalidArgument, PagedMLAError, PlanMismatch, Unsupported

METADATA = (
    "work_meta_data",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _call(**changed: Any) -> dict[str, Any]:
    call: dict[str, Any] = {
        "q": torch.zeros(2, 16, 40, dtype=torch.bfloat16),
        "kv_buffer": torch.zeros(5, 4, 1, 40, dtype=torch.bfloat16),
        "o": torch.full((2, 16, 32), math.nan, dtype=torch.bfloat16),
        "qo_indptr": _int32(0, 1, 2),
        "kv_indptr": _int32(0, 3, 4),
        "kv_indices": _int32(4, 0, 2, 1),
        "kv_last_page_lens": _int32(2, 4),
        "max_seqlen_q": 1,
        "page_size": 4,
    }
    return call | changed


def _buffers(num_workers: int = 3) -> dict[str, Tensor]:
    """Of two requests with one tile each."""
    sizes = ((num_workers + 1,), (num_workers + 1, 8), (3,), (2, 2), (2 * (num_workers - 1),))
    names = ("work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
    buffers = {name: torch.zeros(size, dtype=torch.int32) for name, size in zip(names, sizes, strict=True)}
    return {"work_metadata_ptrs": torch.zeros(2, dtype=torch.uint64)} | buffers


def _metadata(**changed: Any) -> dict[str, Any]:
    return dict(zip(METADATA, _buffers().values(), strict=True)) | changed


def _refused(kind: type[PagedMLAError], call: dict[str, Any]) -> PagedMLAError:
    with pytest.raises(kind) as error:
        aiter.mla_decode_fwd(**call)
    assert bool(call["o"].isnan().all())
    return error.value


def test_the_refusals_are_about_the_change_alone() -> None:
    for call in (_call(), _call(**_metadata())):
        aiter.mla_decode_fwd(**call)
        assert bool((call["o"] == 0).all())


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"nhead_kv": 2}, "nhead_kv"),
        ({"kv_buffer": torch.zeros(5, 4, 2, 40, dtype=torch.bfloat16)}, "nhead_kv"),
        ({"logit_cap": 30.0}, "logit_cap"),
        ({"logit_cap": math.nan}, "logit_cap"),
        ({"return_logits": True}, "return_logits"),
        ({"cp_world_size": 2}, "context_parallel"),
        ({"g_kv_indptr": _int32(0, 6, 8)}, "context_parallel"),
        ({"kv_buffer": torch.zeros(5, 4 * 656, dtype=torch.uint8)}, "kv_layout"),
        ({"kv_buffer": torch.zeros(5, 4, 1, 656, dtype=torch.uint8)}, "kv_layout"),
        ({"kv_buffer": torch.zeros(5, 4, 1, 40, dtype=torch.float16)}, "dtype_pair"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_what_is_not_built(changed: dict[str, Any], code: str) -> None:
    error = _refused(Unsupported, _call(**changed))
    assert (error.code, error.argument) == (code, next(iter(changed)))


def test_negative_and_zero_caps_are_none() -> None:
    for cap in (0, 0.0, -1.0):
        aiter.mla_decode_fwd(**_call(logit_cap=cap))


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"q": None}, "type"),
        ({"q": torch.zeros(2, 640, dtype=torch.bfloat16)}, "rank"),
        ({"kv_buffer": torch.zeros(5, 4, 40, dtype=torch.bfloat16)}, "rank"),
        ({"kv_buffer": torch.zeros(5, 4, 1, 48, dtype=torch.bfloat16)}, "shape"),
        ({"kv_buffer": torch.zeros(5, 4, 1, 40, dtype=torch.bfloat16, device="meta")}, "device"),
        ({"kv_buffer": torch.zeros(5, 4, 1, 40, dtype=torch.int32)}, "kv_dtype"),
        ({"o": torch.full((2, 512), math.nan, dtype=torch.bfloat16)}, "rank"),
        ({"o": torch.full((2, 16, 32), math.nan)}, "dtype"),
        ({"o": torch.full((3, 16, 32), math.nan, dtype=torch.bfloat16)}, "shape"),
        ({"o": torch.full((2, 16, 48), math.nan, dtype=torch.bfloat16)}, "shape"),
        ({"qo_indptr": torch.zeros(3)}, "dtype"),
        ({"qo_indptr": _int32()}, "shape"),
        ({"kv_indptr": _int32(0, 3)}, "shape"),
        ({"kv_indptr": torch.tensor([0, 3, 4])}, "dtype"),
        ({"kv_indices": _int32(4, 0, 2, 1)[:, None]}, "rank"),
        ({"kv_indices": None}, "type"),
        ({"kv_last_page_lens": _int32(2)}, "shape"),
        ({"kv_last_page_lens": _int32(2, 4).to("meta")}, "device"),
        ({"max_seqlen_q": 0}, "max_seqlen_q"),
        ({"max_seqlen_q": torch.tensor(1)}, "max_seqlen_q"),
        ({"page_size": 1}, "page_size"),
        ({"page_size": 64}, "page_size"),
        ({"sm_scale": 0.0}, "softmax_scale"),
        ({"sm_scale": math.nan}, "softmax_scale"),
        ({"logit_cap": "0"}, "logit_cap"),
        ({"num_kv_splits": 0}, "num_kv_splits"),
        ({"num_kv_splits_indptr": _int32(0, 1)}, "shape"),
        ({"cp_rank": 1}, "cp_rank"),
        ({"cp_world_size": 0}, "cp_world_size"),
        ({"causal": 1}, "type"),
        ({"return_lse": 1}, "type"),
        ({"max_pages": 0}, "max_pages"),
        ({"lse": torch.zeros(2, 15)}, "shape"),
        ({"workspace": torch.zeros(8)}, "dtype"),
        ({"backend": "cuda"}, "backend"),
        ({"validate": "yes"}, "type"),
        ({"kv_scale": None, "kv_buffer": torch.zeros(5, 4, 1, 40).to(FP8)}, "scale"),
        (
            {
                "q_scale": None,
                "q": torch.zeros(2, 16, 40).to(FP8),
                "kv_buffer": torch.zeros(5, 4, 1, 40).to(FP8),
            },
            "scale",
        ),
        ({"kv_scale": torch.ones(2), "kv_buffer": torch.zeros(5, 4, 1, 40).to(FP8)}, "scale"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_what_does_not_fit_is_named_in_aiters_words(changed: dict[str, Any], code: str) -> None:
    error = _refused(InvalidArgument, _call(**changed))
    assert (error.code, error.argument) == (code, next(iter(changed)))


def test_an_output_on_an_input_is_refused() -> None:
    q = torch.zeros(2, 16, 40, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument) as error:
        aiter.mla_decode_fwd(**_call(q=q, o=q[..., :32]))
    assert (error.value.code, error.value.argument) == ("overlap", "o")


@pytest.mark.parametrize("name", METADATA)
def test_half_of_the_metadata(name: str) -> None:
    """AITER would leave the persistent mode quietly, or follow a null pointer."""
    error = _refused(InvalidArgument, _call(**_metadata(**{name: None})))
    assert error.argument == name


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"work_meta_data": torch.zeros(2, dtype=torch.int64)}, "dtype"),
        ({"work_indptr": torch.zeros(4)}, "dtype"),
        ({"work_indptr": torch.zeros(4, 1, dtype=torch.int32)}, "rank"),
        ({"reduce_final_map": torch.zeros(2, 2, dtype=torch.int32, device="meta")}, "device"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_metadata_of_another_kind(changed: dict[str, Any], code: str) -> None:
    error = _refused(InvalidArgument, _call(**_metadata(**changed)))
    assert (error.code, error.argument) == (code, next(iter(changed)))


@pytest.mark.parametrize(
    "changed",
    [
        {"work_info_set": torch.zeros(3, 8, dtype=torch.int32)},
        {"reduce_indptr": _int32(0, 0)},
        {"reduce_final_map": torch.zeros(1, 2, dtype=torch.int32)},
        {"reduce_partial_map": _int32(0, 0, 0)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_metadata_of_a_smaller_batch(changed: dict[str, Any]) -> None:
    error = _refused(PlanMismatch, _call(**_metadata(**changed)))
    assert (error.code, error.argument) == ("metadata", next(iter(changed)))
    assert "2 requests, 16 heads" in error.wanted


def test_metadata_for_fewer_query_tokens() -> None:
    error = _refused(PlanMismatch, _call(**_metadata(), max_seqlen_q=9))
    assert error.argument == "work_info_set"


def test_metadata_for_a_larger_batch_is_fine() -> None:
    call = _call(**_metadata(reduce_indptr=torch.zeros(30, dtype=torch.int32)))
    aiter.mla_decode_fwd(**call)
    assert bool((call["o"] == 0).all())


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"batch_size": -1}, "batch_size"),
        ({"max_seqlen_qo": 0}, "max_seqlen_qo"),
        ({"num_head_qo": 0}, "num_head_qo"),
    ],
)
def test_sizes_out_of_range(changed: dict[str, int], name: str) -> None:
    given = {"batch_size": 1, "max_seqlen_qo": 1, "num_head_qo": 16, "is_sparse": False} | changed
    with pytest.raises(InvalidArgument) as error:
        aiter.get_mla_metadata_info_v1(**given, q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    assert error.value.argument == name


def _plan(**changed: Any) -> None:
    plan: dict[str, Any] = {
        "seqlens_qo_indptr": torch.tensor([0, 1, 2], dtype=torch.int32),
        "seqlens_kv_indptr": torch.tensor([0, 3, 4], dtype=torch.int32),
        "kv_last_page_lens": torch.tensor([1, 1], dtype=torch.int32),
        "num_heads_per_head_k": 16,
        "num_heads_k": 1,
        "is_causal": True,
    }
    aiter.get_mla_metadata_v1(**(plan | _buffers() | {"max_seqlen_qo": 1} | changed))


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"num_heads_k": 2}, "num_heads_k"),
        ({"topk": 2048}, "sparse"),
        ({"is_cp_round_robin": True}, "context_parallel"),
        ({"mla_version": 1}, "mla_version"),
    ],
)
def test_metadata_that_is_not_built_is_refused(changed: dict[str, Any], code: str) -> None:
    with pytest.raises(Unsupported) as error:
        _plan(**changed)
    assert (error.value.code, error.value.argument) == (code, next(iter(changed)))


def test_sparse_sizes_are_refused() -> None:
    with pytest.raises(Unsupported) as error:
        aiter.get_mla_metadata_info_v1(3, 1, 16, torch.bfloat16, torch.bfloat16, True)
    assert (error.value.code, error.value.argument) == ("sparse", "is_sparse")


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"work_info_set": torch.zeros(3, 8, dtype=torch.int32)}, "shape"),
        ({"work_info_set": torch.zeros(4, 9, dtype=torch.int32)}, "shape"),
        ({"work_info_set": torch.zeros(9, dtype=torch.int32)}, "rank"),
        ({"work_info_set": torch.zeros(8, 8, dtype=torch.int32).T}, "stride"),
        ({"work_indptr": torch.zeros(1, dtype=torch.int32)}, "shape"),
        ({"work_indptr": torch.zeros(4, dtype=torch.int64)}, "dtype"),
        ({"work_metadata_ptrs": torch.zeros(2, dtype=torch.int32)}, "dtype"),
        ({"work_metadata_ptrs": torch.zeros(3, dtype=torch.uint64)}, "shape"),
        ({"reduce_indptr": torch.zeros(2, dtype=torch.int32)}, "shape"),
        ({"reduce_final_map": torch.zeros(1, 2, dtype=torch.int32)}, "shape"),
        ({"reduce_final_map": torch.zeros(2, 3, dtype=torch.int32)}, "shape"),
        ({"reduce_partial_map": torch.zeros(3, dtype=torch.int32)}, "shape"),
        ({"reduce_partial_map": torch.zeros(4, dtype=torch.int32, device="meta")}, "device"),
        ({"reduce_partial_map": None}, "type"),
        ({"seqlens_qo_indptr": None}, "type"),
        ({"seqlens_qo_indptr": torch.zeros(3)}, "dtype"),
        ({"seqlens_kv_indptr": torch.zeros(2, dtype=torch.int32)}, "shape"),
        ({"kv_last_page_lens": torch.zeros(1, dtype=torch.int32)}, "shape"),
        ({"page_size": 0}, "page_size"),
        ({"kv_granularity": 0}, "kv_granularity"),
        ({"num_heads_per_head_k": 0}, "num_heads_per_head_k"),
        ({"max_seqlen_qo": 1.5}, "max_seqlen_qo"),
        ({"is_causal": 1}, "type"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_metadata_that_does_not_fit_is_named(changed: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        _plan(**changed)
    assert (error.value.code, error.value.argument) == (code, next(iter(changed)))
