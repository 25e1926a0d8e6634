"""FlashInfer's signatures, argument for argument, and the example of the page that tells how to change over."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import check
from compat.flashinfer_calls import LOG2_E

from pagedmla.compat import flashinfer
from pagedmla.compat.flashinfer import BatchMLAPagedAttentionWrapper

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate_flashinfer.md"
REQUIRED = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            "__init__",
            {
                "float_workspace_buffer": REQUIRED,
                "use_cuda_graph": False,
                "qo_indptr": None,
                "kv_indptr": None,
                "kv_indices": None,
                "kv_len_arr": None,
                "backend": "auto",
            },
        ),
        (
            "plan",
            {
                "qo_indptr": REQUIRED,
                "kv_indptr": REQUIRED,
                "kv_indices": REQUIRED,
                "kv_len_arr": REQUIRED,
                "num_heads": REQUIRED,
                "head_dim_ckv": REQUIRED,
                "head_dim_kpe": REQUIRED,
                "page_size": REQUIRED,
                "causal": REQUIRED,
                "sm_scale": REQUIRED,
                "q_data_type": REQUIRED,
                "kv_data_type": REQUIRED,
                "use_profiler": False,
            },
        ),
        (
            "run",
            {
                "q_nope": REQUIRED,
                "q_pe": REQUIRED,
                "ckv_cache": REQUIRED,
                "kpe_cache": REQUIRED,
                "out": None,
                "lse": None,
                "return_lse": False,
                "profiler_buffer": None,
                "kv_len": None,
                "page_table": None,
                "return_lse_base_on_e": False,
                # 0.7.4 has it in this place
                "o_scale": None,
            },
        ),
    ],
)
def test_the_signatures_are_theirs(method: str, expected: dict[str, Any]) -> None:
    """flashinfer-python 0.6.8, flashinfer/mla/_core.py, written down by hand."""
    found = inspect.signature(getattr(BatchMLAPagedAttentionWrapper, method))
    _, *parameters = found.parameters.values()
    by_position = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert [(p.name, p.default) for p in by_position] == list(expected.items())
    by_name = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    newer = {"ckv_scale": None, "ckv_scale_arr": None, "kpe_scale": None} if method == "run" else {}
    assert by_name == newer


def test_the_wrapper_is_all_that_is_exported() -> None:
    assert flashinfer.__all__ == ["BatchMLAPagedAttentionWrapper"]


def test_the_page_s_example_runs_and_is_right() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    exec(compile(blocks[0], PAGE.name, "exec"), names)
    call = {
        "q": names["q"],
        "kv_cache": names["cache"],
        "block_table": names["kv_indices"].view(4, 99),
        "seq_lens": names["kv_len"],
        "softmax_scale": 192**-0.5,
        "causal": False,
    }
    check((names["out"], names["lse"] / LOG2_E), call)
