"""What FlashInfer's wrapper is not made of, what it does not plan and what it does not run, each refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import check
from compat.flashinfer_calls import NATURAL, NO_WORKSPACE, call_of, csr, inputs, planned, statics
from torch import Tensor

from pagedmla.compat.flashinfer import BatchMLAPagedAttentionWrapper
from pagedmla.contract.errors import InvalidArgument, PlanMismatch, Unsupported

BF16 = torch.bfloat16


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "kind", "argument"),
    [
        ({"float_workspace_buffer": None}, InvalidArgument, "float_workspace_buffer"),
        ({"float_workspace_buffer": torch.zeros(9, 9).T[1:]}, InvalidArgument, "float_workspace_buffer"),
        ({"use_cuda_graph": 1}, InvalidArgument, "use_cuda_graph"),
        ({"backend": "cutlass"}, Unsupported, "backend"),
        ({"backend": "trtllm-gen"}, Unsupported, "backend"),
        ({"backend": None}, InvalidArgument, "backend"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_what_a_wrapper_is_not_made_of(changed: dict[str, Any], kind: type, argument: str) -> None:
    with pytest.raises(kind) as raised:
        BatchMLAPagedAttentionWrapper(**{"float_workspace_buffer": NO_WORKSPACE} | changed)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("changed", "kind", "argument", "words"),
    [
        ({"qo_indptr": i32(1, 2, 3)}, InvalidArgument, "qo_indptr", "sequence 0"),
        ({"qo_indptr": i32(0, 3, 2)}, InvalidArgument, "qo_indptr", "never fall, got 3..2 for sequence 1"),
        ({"qo_indptr": i32(0, 1)}, InvalidArgument, "qo_indptr", "[2]"),
        ({"qo_indptr": [0, 1, 2]}, InvalidArgument, "qo_indptr", "list"),
        ({"kv_indptr": i32(0, 2, 1)}, InvalidArgument, "kv_indptr", "sequence 1"),
        (
            {"kv_indptr": i32(0, 2, 5)},
            InvalidArgument,
            "kv_indptr",
            "kv_indices at 3, got 2..5 for sequence 1",
        ),
        ({"kv_indptr": i32(1, 2, 3)}, InvalidArgument, "kv_indptr", "sequence 0"),
        ({"kv_indptr": i32(0, 2, 3, 3)}, InvalidArgument, "kv_indptr", "[4]"),
        ({"kv_indices": torch.zeros(3, dtype=torch.int64)}, InvalidArgument, "kv_indices", "int64"),
        ({"kv_len_arr": i32(33, 3)}, InvalidArgument, "kv_len_arr", "sequence 0"),
        ({"kv_len_arr": i32(20, -1)}, InvalidArgument, "kv_len_arr", "sequence 1"),
        ({"num_heads": 0}, InvalidArgument, "num_heads", "0"),
        ({"head_dim_ckv": 0}, InvalidArgument, "head_dim_ckv", "0"),
        ({"head_dim_kpe": 7}, InvalidArgument, "head_dim_kpe", "7"),
        ({"page_size": 0}, InvalidArgument, "page_size", "0"),
        ({"causal": None}, InvalidArgument, "causal", "None"),
        ({"sm_scale": None}, InvalidArgument, "sm_scale", "None"),
        ({"sm_scale": math.nan}, InvalidArgument, "sm_scale", "nan"),
        ({"q_data_type": torch.float8_e4m3fn}, Unsupported, "q_data_type", "float8"),
        ({"q_data_type": "bf16"}, Unsupported, "q_data_type", "bf16"),
        ({"kv_data_type": torch.float16}, Unsupported, "kv_data_type", "float16"),
        ({"kv_data_type": torch.uint8}, Unsupported, "kv_data_type", "uint8"),
        ({"use_profiler": True}, Unsupported, "use_profiler", "bool"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_plans_that_are_refused(changed: dict[str, Any], kind: type, argument: str, words: str) -> None:
    call = call_of([20, 3])
    wrapper = planned(call)
    with pytest.raises(kind) as raised:
        wrapper.plan(**csr(call) | statics(call) | changed)
    assert raised.value.argument == argument
    assert words in str(raised.value)
    # the plan before it stands
    check(wrapper.run(**inputs(call), **NATURAL), call)


@pytest.mark.parametrize(
    ("changed", "kind", "argument"),
    [
        ({"q_nope": torch.zeros(3, 4, 32, dtype=BF16)}, PlanMismatch, "q_pe"),
        (
            {"q_nope": torch.zeros(3, 4, 32, dtype=BF16), "q_pe": torch.zeros(3, 4, 8, dtype=BF16)},
            PlanMismatch,
            "q_nope",
        ),
        (
            {"q_nope": torch.zeros(1, 4, 32, dtype=BF16), "q_pe": torch.zeros(1, 4, 8, dtype=BF16)},
            PlanMismatch,
            "q_nope",
        ),
        ({"q_nope": torch.zeros(2, 5, 32, dtype=BF16)}, PlanMismatch, "q_nope"),
        ({"q_nope": torch.zeros(2, 4, 32)}, PlanMismatch, "q_nope"),
        ({"q_nope": torch.zeros(2, 4, 32, dtype=BF16, device="meta")}, PlanMismatch, "q_nope"),
        ({"q_nope": None}, InvalidArgument, "q_nope"),
        ({"q_pe": torch.zeros(2, 4, 6, dtype=BF16)}, PlanMismatch, "q_pe"),
        ({"q_pe": None}, InvalidArgument, "q_pe"),
        ({"ckv_cache": torch.zeros(9, 32, 32, dtype=BF16)}, PlanMismatch, "ckv_cache"),
        ({"ckv_cache": torch.zeros(9, 16, 32)}, PlanMismatch, "ckv_cache"),
        ({"ckv_cache": torch.zeros(16, 32, dtype=BF16)}, PlanMismatch, "ckv_cache"),
        ({"kpe_cache": torch.zeros(9, 16, 8, dtype=BF16)}, PlanMismatch, "kpe_cache"),
        ({"kpe_cache": None}, InvalidArgument, "kpe_cache"),
        ({"out": torch.zeros(2, 4, 32)}, InvalidArgument, "out"),
        ({"out": torch.zeros(3, 4, 32, dtype=BF16)}, InvalidArgument, "out"),
        ({"lse": torch.zeros(4, 2)}, InvalidArgument, "lse"),
        ({"profiler_buffer": torch.zeros(1)}, Unsupported, "profiler_buffer"),
        ({"kv_len": i32(1)}, Unsupported, "kv_len"),
        ({"page_table": i32(1)}, Unsupported, "page_table"),
        ({"o_scale": 1.0}, Unsupported, "o_scale"),
        ({"ckv_scale": 1.0}, InvalidArgument, "ckv_scale"),
        ({"kpe_scale": 1.0}, InvalidArgument, "kpe_scale"),
        ({"ckv_scale_arr": torch.ones(1)}, Unsupported, "ckv_scale_arr"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_runs_that_are_refused(changed: dict[str, Any], kind: type, argument: str) -> None:
    call = call_of([20, 3])
    with pytest.raises(kind) as raised:
        planned(call).run(**inputs(call) | changed)
    assert raised.value.argument == argument


def test_run_before_plan() -> None:
    with pytest.raises(PlanMismatch, match=r"plan\(\)") as raised:
        BatchMLAPagedAttentionWrapper(NO_WORKSPACE).run(**inputs(call_of([20, 3])))
    assert raised.value.code == "no_plan"


@pytest.mark.parametrize("apart", [False, True])
def test_training_is_refused(apart: bool) -> None:
    call = call_of([20, 3], q_dtype=torch.float32)
    cache = call["kv_cache"].nan_to_num().requires_grad_()
    parts = {"ckv_cache": cache[..., :32], "kpe_cache": cache[..., 32:].clone() if apart else cache[..., 32:]}
    with pytest.raises(Unsupported) as raised:
        planned(call).run(**inputs(call) | parts)
    assert raised.value.code == "training"
    with torch.no_grad():
        check(planned(call).run(**inputs(call) | parts, **NATURAL), call)
