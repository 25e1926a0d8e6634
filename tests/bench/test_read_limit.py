"""The page reader compiles for Hopper without one, fits it, and asks for as many bytes as a page has."""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from pagedmla.bench import read_limit

HOPPER_SHARED_BYTES = 232_448


def test_the_page_reader_compiles_for_hopper() -> None:
    signature = {
        "latent": f"tensordesc<bf16[64, 512],{read_limit.PAGE_LAYOUT!r}>",
        "rope": f"tensordesc<bf16[64, 64],{read_limit.PAGE_LAYOUT!r}>",
        "table": "*i32",
        "tiles_read": "*i32",
        "num_tiles": "i32",
        "STAGES": "constexpr",
    }
    source = GluonASTSource(read_limit.read_pages_kernel, signature, {"STAGES": read_limit.STAGES})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    page_bytes = 64 * (512 + 64) * 2
    assert read_limit.STAGES * page_bytes < kernel.metadata.shared <= HOPPER_SHARED_BYTES
    ptx = kernel.asm["ptx"]
    # a barrier that expects another number of bytes than come never opens
    assert set(re.findall(r"expect_tx[^;]*, (\d+);", ptx)) == {str(page_bytes)}
    assert "cp.async.bulk.tensor.2d" in ptx
