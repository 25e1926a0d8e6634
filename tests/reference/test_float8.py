"""The table of 8-bit floats, built from the definition, against torch's conversion: two sources, 256 codes, two formats."""

from __future__ import annotations

import math

import pytest
import torch
from batches import arguments, make_batch

from pagedmla import reference
from pagedmla.contract.errors import InvalidArgument

FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@pytest.mark.parametrize("dtype", FORMATS)
def test_all_codes_agree_with_torch(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(
        reference.float8_table(dtype).nan_to_num(nan=-1e9), codes.view(dtype).double().nan_to_num(nan=-1e9)
    )


def test_the_formats_differ_where_the_definitions_say() -> None:
    fn, fnuz = (reference.float8_table(dtype) for dtype in FORMATS)
    assert (fn[0x7E], fn[0x01], fn[0x38]) == (448.0, 2.0**-9, 1.0)
    assert (fnuz[0x7F], fnuz[0x01], fnuz[0x38]) == (240.0, 2.0**-10, 0.5)
    assert fn.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert fnuz.isnan().nonzero().flatten().tolist() == [0x80]
    assert math.copysign(1, fn[0x80]) == -1


@pytest.mark.parametrize("dtype", FORMATS)
def test_scales_multiply_on_reading(dtype: torch.dtype) -> None:
    batch = make_batch([21, 3], q_dtype=dtype)
    call = arguments(batch)
    out, lse = reference.decode(**call)
    scale = {name: torch.tensor(call[name], dtype=torch.float32).double() for name in ("q_scale", "kv_scale")}
    plain = call | {
        "q": call["q"].double() * scale["q_scale"],
        "kv_cache": (call["kv_cache"].double() * scale["kv_scale"]).float().double().float(),
        "q_scale": None,
        "kv_scale": None,
    }
    plain_out, plain_lse = reference.decode(**plain)
    torch.testing.assert_close(out, plain_out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-5)


def test_other_dtypes_have_no_table() -> None:
    with pytest.raises(InvalidArgument):
        reference.float8_table(torch.float16)
