"""Every Triton kernel once, on the smallest shapes, for a checker of device memory:

    compute-sanitizer --tool memcheck python tests/device/sanitize.py
    compute-sanitizer --tool racecheck python tests/device/sanitize.py

Values are checked too; 'ok' is the last line.  PYTORCH_NO_CUDA_MEMORY_CACHING=1 makes every tensor an allocation of its own, so
that an access past one is seen.  Without a card the kernels are interpreted.
"""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path

import torch

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from triton_backend import (
    DEVICE,
    DTYPES,
    INVARIANT,
    MODES,
    ON_CARD,
    arguments,
    check,
    make_batch,
    problem_of,
    run,
)  # fmt: skip

import pagedmla
from pagedmla.kernels.triton import merge_states
from pagedmla.kernels.triton.append import append
from pagedmla.kernels.triton.csr import block_table_to_csr

DIMS = (512, 64) if ON_CARD else (32, 8)
HEADS = (1, 16, 20, 128) if ON_CARD else (1, 20)
LENS, Q_LENS = [65, 0, 3, 1, 130], [1, 2, 3, 0, 2]


def check_decodes() -> None:
    """All schedules over one-token and 64-token pages, even and ragged, with an exact workspace."""
    for num_heads, page_size, mode in product(HEADS, (1, 64), [*MODES, {"num_kv_splits": 1}]):
        batch = make_batch(LENS, Q_LENS, num_heads=num_heads, dims=DIMS, q_dtype=DTYPES[-1])
        call = arguments(batch, page_size, spare_columns=0, spare_pages=1)
        size = pagedmla.workspace_size(*problem_of(call, 3, **mode), DEVICE, "triton")
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
        check(run(call, workspace=workspace, max_q_len=3, **mode), call)
    even = arguments(make_batch(LENS, num_heads=16, dims=DIMS, q_dtype=DTYPES[-1]), 64, spare_columns=0)
    for mode in MODES:
        check(run(even | {"cu_seqlens_q": None}, **mode), even)


def check_garbage() -> None:
    """Ids, lengths and starts that lead outside: nothing may be read or written there."""
    call = arguments(make_batch(LENS, Q_LENS, num_heads=4, dims=DIMS, q_dtype=DTYPES[-1]), 16)
    for value, mode in product((-1, 2**31 - 1, -(2**31)), (*MODES[:1], INVARIANT)):
        bad = {name: torch.full_like(call[name], value) for name in ("block_table", "seq_lens")}
        starts = torch.tensor([value, 5, 3, value, -7, 2**31 - 1], dtype=torch.int32, device=DEVICE)
        run(call | bad | {"cu_seqlens_q": starts}, **mode)


def check_paging() -> None:
    """append, and the block table in CSR form."""
    latent = torch.randn(4, DIMS[0], device=DEVICE)
    k_pe = torch.randn(4, DIMS[1], device=DEVICE)
    cache = torch.zeros(2, 3, sum(DIMS), device=DEVICE)
    append(cache, latent, k_pe, torch.tensor([5, -1, 0, 6], device=DEVICE))
    rows = torch.cat([latent, k_pe], 1)
    assert torch.equal(cache.view(6, -1)[[5, 0]], rows[[0, 2]])
    assert not bool(cache.view(6, -1)[1:5].any())
    table = torch.arange(8, dtype=torch.int32, device=DEVICE).view(2, 4)
    lens = torch.tensor([33, 64], dtype=torch.int32, device=DEVICE)
    indptr, indices, last = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (3, 8, 2))
    block_table_to_csr(table, lens, 16, 2, indptr, indices, last)
    assert indptr.tolist() == [0, 3, 7]
    assert indices[:7].tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert last.tolist() == [1, 16]


def check_merge_states() -> None:
    """Two equal states and an empty one: the same values, and a logarithm that is larger by ln 2."""
    out, lse = torch.randn(3, 5, DIMS[0], device=DEVICE), torch.randn(3, 5, device=DEVICE)
    empty = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    merged, merged_lse = merge_states([out, empty[0], out], [lse, empty[1], lse])
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(merged_lse, lse + 0.6931471805599453)


def main() -> None:
    """Runs everything."""
    for checks in (check_paging, check_merge_states, check_decodes, check_garbage):
        checks()
        if ON_CARD:
            torch.cuda.synchronize()
    print("ok")  # noqa: T201


if __name__ == "__main__":
    main()
