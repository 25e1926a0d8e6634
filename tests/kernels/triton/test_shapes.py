"""SHAPE: any number of heads, latent and rope sizes within the table's; what is refused is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import same_bits
from triton_backend import DTYPES, INVARIANT, MODES, SPLITS, arguments, checked, make_batch, run

from pagedmla.contract.errors import Unsupported

pytestmark = pytest.mark.usefixtures("short_cuts")

# around the tiles of 16, 32 and 64 rows
HEADS = (1, 3, 15, 16, 17, 31, 33, 64, 65, 130)
DIMS = ((512, 64), (512, 0), (256, 32), (128, 32), (48, 6), (100, 62), (1, 0), (7, 2), (33, 0))


@pytest.mark.parametrize("num_heads", HEADS)
def test_head_counts(num_heads: int) -> None:
    call = arguments(make_batch([33, 1], [2, 1], num_heads=num_heads))
    checked(call)
    if num_heads in (3, 17, 65):
        checked(call, **SPLITS)


@pytest.mark.parametrize("num_heads", [5, 80])
def test_head_slicing(num_heads: int) -> None:
    """Heads do not know of each other: a slice of the queries gives the slice of the results."""
    call = arguments(make_batch([40, 0, 3], [1, 1, 2], num_heads=num_heads))
    out, lse = checked(call)
    heads = slice(num_heads // 2, num_heads)
    sliced = checked(call | {"q": call["q"][:, heads]})
    torch.testing.assert_close(sliced[0], out[:, heads], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(sliced[1], lse[:, heads], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_and_rope_sizes(dims: tuple[int, int], dtype: torch.dtype) -> None:
    call = arguments(make_batch([40, 0, 1], num_heads=5, dims=dims, q_dtype=dtype))
    out, _ = checked(call)
    assert out.shape == (3, 5, dims[0])
    if dims in ((100, 62), (512, 0)):
        checked(call, **SPLITS)


def test_every_row_and_head_has_its_own_answer() -> None:
    out, _ = run(arguments(make_batch([20, 30, 40], [2, 1, 2], num_heads=6)))
    assert len({tuple(row.tolist()) for row in out.flatten(0, 1)}) == 30


def test_padding_to_a_tile_is_inert() -> None:
    """Heads added to fill a row tile change no bit of the others, whatever they hold."""
    for num_heads, more in ((5, 11), (17, 15)):
        call = arguments(make_batch([40, 5], [1, 2], num_heads=num_heads))
        padding = torch.full_like(call["q"][:, :1], torch.nan).expand(-1, more, -1)
        padded = run(call | {"q": torch.cat([call["q"], padding], 1)}, **INVARIANT)
        alone = run(call, **INVARIANT)
        assert same_bits(alone, (padded[0][:, :num_heads], padded[1][:, :num_heads])), num_heads


@pytest.mark.parametrize(
    ("batch", "options", "code", "argument"),
    [
        ({"q_dtype": torch.float32}, {}, "dtype_pair", "kv_cache"),
        ({"kv_dtype": torch.float8_e4m3fn}, {}, "dtype_pair", "kv_cache"),
        ({"q_dtype": torch.float8_e4m3fn}, {}, "dtype_pair", "kv_cache"),
        ({"kv_dtype": torch.bfloat16}, {}, "dtype_pair", "kv_cache"),
        ({"dims": (513, 64)}, {}, "head_dim", "q"),
        ({"dims": (512, 66)}, {}, "head_dim", "q"),
        ({}, {"schedule": "persistent", "num_kv_splits": 2}, "schedule", "schedule"),
        ({}, {"schedule": "persistent", "batch_invariant": True}, "schedule", "schedule"),
        ({}, {"num_kv_splits": 2, "batch_invariant": True}, "num_kv_splits", "num_kv_splits"),
        ({}, {"num_kv_splits": 65536}, "num_kv_splits", "num_kv_splits"),
    ],
)
def test_what_is_not_built_is_refused(
    batch: dict[str, Any], options: dict[str, Any], code: str, argument: str
) -> None:
    call = arguments(make_batch([9], **batch))
    with pytest.raises(Unsupported) as caught:
        run(call, **options)
    assert [(refusal.code, refusal.argument) for refusal in caught.value.refusals] == [(code, argument)]
    assert caught.value.refusals[0].backend == "triton"


@pytest.mark.parametrize(
    "mode", [*MODES, {"schedule": "persistent"}, {"schedule": "split", "num_kv_splits": 2}], ids=str
)
def test_every_mode_that_is_named_runs(mode: dict[str, Any]) -> None:
    checked(arguments(make_batch([40, 0], num_heads=2)), **mode)
