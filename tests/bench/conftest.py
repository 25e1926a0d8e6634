"""Small batches for the benchmark's tests."""

from __future__ import annotations

import pytest
import torch

from pagedmla.bench.batch import DecodeBatch, build_batch
from pagedmla.bench.shapes import DecodeShape


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def small_batch(
    *seq_lens: int, q_len: int = 1, heads: int = 3, page_size: int = 16, dtype: torch.dtype = torch.bfloat16
) -> DecodeBatch:
    shape = DecodeShape("small", seq_lens, heads, q_len)
    return build_batch(shape, page_size, dtype, torch.device("cpu"))
