"""VIEW: strides and storage offsets are part of a tensor; the same numbers give the same bits however they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import arguments, check, make_batch, run, same_bits
from torch import Tensor

from pagedmla.contract.errors import InvalidArgument, PagedMLAError

PAIRS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float8_e4m3fnuz, torch.float8_e4m3fnuz),
]
MODES: list[dict[str, Any]] = [{}, {"num_kv_splits": 3}, {"batch_invariant": True}]


def _padded(tensor: Tensor, *extra: int) -> Tensor:
    """The tensor as a slice of a larger one: extra rows, columns, ... and an offset on every axis."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    # all bits set: nan in every floating dtype
    large = torch.full(
        [size + 2 * more for size, more in zip(tensor.shape, extra, strict=True)],
        -1 if bits != torch.uint8 else 255,
    )
    view = large.to(bits).view(tensor.dtype)
    for axis, more in enumerate(extra):
        view = view.narrow(axis, more, tensor.shape[axis])
    view.copy_(tensor)
    return view


def _heads_first(q: Tensor) -> Tensor:
    """[T, H, d] numbers stored as [H, T, d], as a batched projection leaves them."""
    return q.transpose(0, 1).contiguous().transpose(0, 1)


def _every_other(tensor: Tensor) -> Tensor:
    """Stored in the even places of axis 0 of a tensor twice as long."""
    return tensor.repeat_interleave(2, dim=0)[::2]


VIEWS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "q rows apart": lambda call: {"q": _padded(call["q"], 1, 0, 0)},
    "q heads apart": lambda call: {"q": _padded(call["q"], 0, 2, 0)},
    "q inner slice": lambda call: {"q": _padded(call["q"], 1, 1, 8)},
    "q odd slice": lambda call: {"q": _padded(call["q"], 0, 0, 3)},
    "q heads first": lambda call: {"q": _heads_first(call["q"])},
    "cache slots apart": lambda call: {"kv_cache": _padded(call["kv_cache"], 0, 3, 0)},
    "cache inner slice": lambda call: {"kv_cache": _padded(call["kv_cache"], 1, 0, 8)},
    "cache odd slice": lambda call: {"kv_cache": _padded(call["kv_cache"], 1, 1, 1)},
    "cache offset": lambda call: {"kv_cache": _padded(call["kv_cache"], 2, 0, 0)},
    "table columns": lambda call: {"block_table": _padded(call["block_table"], 0, 3)},
    "table rows": lambda call: {"block_table": _every_other(call["block_table"])},
    "table transposed": lambda call: {"block_table": call["block_table"].T.contiguous().T},
    "lens strided": lambda call: {"seq_lens": _every_other(call["seq_lens"])},
    "starts strided": lambda call: {"cu_seqlens_q": _every_other(call["cu_seqlens_q"])},
    "lens offset": lambda call: {"seq_lens": _padded(call["seq_lens"], 3)},
}


def _call(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> dict[str, Any]:
    batch = make_batch([33, 0, 127, 16], [1, 2, 3, 1], num_heads=5, q_dtype=q_dtype, kv_dtype=kv_dtype)
    return arguments(batch, 16)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), PAIRS, ids=str)
def test_same_bits(q_dtype: torch.dtype, kv_dtype: torch.dtype, name: str, mode: dict[str, Any]) -> None:
    call = _call(q_dtype, kv_dtype)
    plain = run(call, **mode)
    change = VIEWS[name](call)
    for key, value in change.items():
        assert same_bits((value,), (call[key],))
        assert value.stride() != call[key].stride() or value.storage_offset()
    assert same_bits(plain, run(call | change, **mode))


@pytest.mark.parametrize("name", ["q", "kv_cache"])
def test_an_inner_stride_is_refused(name: str) -> None:
    call = _call(torch.bfloat16, torch.bfloat16)
    wide = call[name].repeat_interleave(2, dim=-1)[..., ::2]
    with pytest.raises(InvalidArgument) as caught:
        run(call | {name: wide})
    assert caught.value.argument == name


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), PAIRS, ids=str)
def test_a_pair_of_queries_with_strides_of_their_own(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, mode: dict[str, Any]
) -> None:
    call = _call(q_dtype, kv_dtype)
    latent, rope = call["q"][..., :32], call["q"][..., 32:]
    plain = run(call, **mode)
    check(plain, call)
    for pair in (
        (latent, rope),
        (latent.contiguous(), rope.contiguous()),
        (_heads_first(latent), _padded(rope, 1, 2, 5)),
        (_padded(latent, 2, 0, 16), _heads_first(rope)),
    ):
        assert same_bits(plain, run(call, q=pair, **mode))


def test_a_pair_without_rope() -> None:
    call = arguments(make_batch([33, 5], dims=(32, 0)), 16)
    pair = (call["q"], call["q"].new_empty(2, 4, 0))
    assert same_bits(run(call), run(call, q=pair))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_layers_interleaved_in_one_pool(mode: dict[str, Any]) -> None:
    """[page, layer, slot, d] and [page, slot, layer, d]: the pages of one layer lie between those of the others."""
    call = _call(torch.bfloat16, torch.bfloat16)
    cache = call["kv_cache"]
    pages, slots, dim = cache.shape
    plain = run(call, **mode)
    by_page = torch.full((pages, 3, slots, dim), torch.nan, dtype=cache.dtype)
    by_slot = torch.full((pages, slots, 3, dim), torch.nan, dtype=cache.dtype)
    by_page[:, 1], by_slot[:, :, 2] = cache, cache
    assert same_bits(plain, run(call, kv_cache=by_page[:, 1], **mode))
    assert same_bits(plain, run(call, kv_cache=by_slot[:, :, 2], **mode))


def test_an_expanded_table_and_cache() -> None:
    """Beams over one prompt: every row of the table is the same memory."""
    batch = make_batch([40], [1], num_heads=2)
    call = arguments(batch, 16)
    q = torch.cat([call["q"]] * 3)
    wide = call | {"q": q, "seq_lens": torch.full((3,), 40, dtype=torch.int32), "cu_seqlens_q": None}
    expanded = wide | {
        "block_table": call["block_table"].expand(3, -1),
        "seq_lens": call["seq_lens"].expand(3),
        "q": call["q"].expand(3, -1, -1),
    }
    copied = wide | {"block_table": call["block_table"].repeat(3, 1)}
    assert same_bits(run(copied), run(expanded))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("extra", [(2, 0, 0), (0, 3, 0), (0, 0, 5), (1, 2, 3)], ids=str)
def test_out_and_lse_as_views(extra: tuple[int, int, int], mode: dict[str, Any]) -> None:
    """Only the view is written; what lies between its rows and around it stays."""
    call = _call(torch.bfloat16, torch.bfloat16)
    plain = run(call, **mode)
    out_base = torch.full(
        [size + 2 * more for size, more in zip((7, 5, 32), extra, strict=True)], -768.0
    ).bfloat16()
    lse_base = torch.full([size + 2 * more for size, more in zip((7, 5), extra, strict=False)], -768.0)
    out, lse = out_base, lse_base
    for axis, (size, more) in enumerate(zip((7, 5, 32), extra, strict=True)):
        out = out.narrow(axis, more, size)
        lse = lse.narrow(axis, more, size) if axis < 2 else lse
    before = out_base.clone(), lse_base.clone()
    try:
        result = run(call, out=out, lse=lse, **mode)
    except PagedMLAError as error:
        pytest.fail(f"a strided result is refused: {error}")
    assert same_bits(plain, result)
    assert same_bits(plain, (out, lse))
    out.fill_(-768.0)
    lse.fill_(-768.0)
    assert same_bits(before, (out_base, lse_base)), "memory between or around the rows was written"


def test_out_with_heads_first() -> None:
    call = _call(torch.bfloat16, torch.bfloat16)
    out = torch.empty(5, 7, 32, dtype=torch.bfloat16).transpose(0, 1)
    lse = torch.empty(5, 7).transpose(0, 1)
    assert same_bits(run(call), run(call, out=out, lse=lse))
    assert same_bits(run(call), (out, lse))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"out": torch.zeros(7, 5, 32)}, "out"),
        ({"out": torch.zeros(7, 5, 32, dtype=torch.bfloat16, device="meta")}, "out"),
        ({"out": torch.zeros(1, 5, 32, dtype=torch.bfloat16).expand(7, -1, -1)}, "out"),
        ({"lse": torch.zeros(7, 5, dtype=torch.bfloat16)}, "lse"),
        ({"lse": torch.zeros(7, 1).expand(-1, 5)}, "lse"),
        ({"lse": torch.zeros(5, 7)}, "lse"),
        ({"seq_lens": torch.ones(4, dtype=torch.int64)}, "seq_lens"),
        ({"block_table": torch.zeros(4, 9, dtype=torch.int64)}, "block_table"),
        ({"kv_cache": [1, 2]}, "kv_cache"),
        ({"q": None}, "q"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "argument",
)
def test_wrong_dtypes_devices_and_overlaps_are_refused(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(_call(torch.bfloat16, torch.bfloat16) | change)
    assert caught.value.argument == argument
