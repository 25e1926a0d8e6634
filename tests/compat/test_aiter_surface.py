"""The AITER-shaped calls as a caller meets them: AITER's parameters, and the page that tells how to come over."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pagedmla
from pagedmla.compat import aiter

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate_aiter.md"
REQUIRED = inspect.Parameter.empty

# aiter/mla.py and aiter/ops/attention.py, August 2026
DECODE = {
    **dict.fromkeys(["q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices"], REQUIRED),
    **dict.fromkeys(["kv_last_page_lens", "max_seqlen_q"], REQUIRED),
    "page_size": 1,
    "nhead_kv": 1,
    "sm_scale": None,
    "logit_cap": 0.0,
    "num_kv_splits": None,
    "num_kv_splits_indptr": None,
    "work_meta_data": None,
    "work_indptr": None,
    "work_info_set": None,
    "reduce_indptr": None,
    "reduce_final_map": None,
    "reduce_partial_map": None,
    "q_scale": None,
    "kv_scale": None,
    "intra_batch_mode": False,
    "return_logits": False,
    "return_lse": False,
    "g_kv_indptr": None,
    "cp_world_size": 1,
    "cp_rank": 0,
    "causal": True,
}
INFO = {
    **dict.fromkeys(
        ["batch_size", "max_seqlen_qo", "num_head_qo", "q_dtype", "kv_dtype", "is_sparse"], REQUIRED
    ),
    "fast_mode": True,
    "num_kv_splits": 32,
    "intra_batch_mode": False,
    "max_split_per_batch": -1,
}
METADATA = {
    **dict.fromkeys(["seqlens_qo_indptr", "seqlens_kv_indptr", "kv_last_page_lens"], REQUIRED),
    **dict.fromkeys(["num_heads_per_head_k", "num_heads_k", "is_causal"], REQUIRED),
    **dict.fromkeys(["work_metadata_ptrs", "work_info_set", "work_indptr"], REQUIRED),
    **dict.fromkeys(["reduce_indptr", "reduce_final_map", "reduce_partial_map"], REQUIRED),
    "page_size": 1,
    "kv_granularity": 16,
    "max_seqlen_qo": -1,
    "uni_seqlen_qo": -1,
    "fast_mode": True,
    "topk": -1,
    "max_split_per_batch": -1,
    "intra_batch_mode": False,
    "is_cp_round_robin": False,
    "mla_version": 0,
    "dtype_q_nope": None,
    "dtype_q_rope": None,
    "dtype_kv_nope": None,
    "dtype_kv_rope": None,
    "dtype_q": None,
    "dtype_kv": None,
}
REDUCE = {
    **dict.fromkeys(["partial_output", "partial_lse", "reduce_indptr", "reduce_final_map"], REQUIRED),
    **dict.fromkeys(["reduce_partial_map", "max_seqlen_q", "num_kv_splits", "final_output"], REQUIRED),
    "final_lse": None,
}
EXTENSIONS = {
    "mla_decode_fwd": {"max_pages": None, "lse": None, "workspace": None, "backend": None, "validate": False},
    "get_mla_metadata_info_v1": {"device": None},
}


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (aiter.mla_decode_fwd, DECODE),
        (aiter.get_mla_metadata_info_v1, INFO),
        (aiter.get_mla_metadata_v1, METADATA),
        (aiter.mla_reduce_v1, REDUCE),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_names_order_and_defaults(function: Callable[..., Any], wanted: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(wanted.items())
    extensions = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert extensions == EXTENSIONS.get(function.__name__, {})


def test_modules_are_where_aiter_has_them() -> None:
    assert aiter.mla.mla_decode_fwd is aiter.mla_decode_fwd
    assert sorted(aiter.__all__) == sorted(
        ["get_mla_metadata_info_v1", "get_mla_metadata_v1", "mla_decode_fwd", "mla_reduce_v1"]
    )


def test_the_pages_code_runs_and_is_right() -> None:
    one, two = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(one, PAGE.name, "exec"), names)  # the project's own page
    table = torch.tensor([[5, 2, 7], [3, -1, -1]], dtype=torch.int32)
    lengths = torch.tensor([131, 20], dtype=torch.int32)
    cache = names["kv_buffer"].squeeze(2)
    out, lse = pagedmla.reference.decode(names["q"], cache, table, lengths, softmax_scale=192**-0.5)
    torch.testing.assert_close(names["o"].double(), out, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(names["lse"].double(), lse, rtol=1e-5, atol=1e-5)
    written = names["o"].clone()
    names["o"].fill_(torch.nan)
    exec(compile(two, PAGE.name, "exec"), names)
    assert torch.equal(names["o"], written)
    assert torch.equal(names["lse_persistent"], names["lse"])


@pytest.mark.parametrize("function", [DECODE, INFO, METADATA], ids=["decode", "info", "metadata"])
def test_the_page_names_what_is_there(function: dict[str, Any]) -> None:
    """Each argument that the page's tables speak of is a parameter of some call."""
    known = {*DECODE, *INFO, *METADATA, *REDUCE, *EXTENSIONS["mla_decode_fwd"], "device"}
    refused = PAGE.read_text().split("## What is refused")[1]
    words = {
        word
        for row in re.findall(r"^\| (.*?) \|", refused, flags=re.M)
        for word in re.findall(r"`(\w+)`", row)
    }
    assert words <= known
    assert words & set(function)
