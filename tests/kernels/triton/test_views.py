"""VIEW: strides and storage offsets are part of a tensor; the same numbers give the same bits however they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import same_bits
from torch import Tensor
from triton_backend import (
    DEVICE,
    MODES,
    ON_CARD,
    PERSISTENT,
    SPLITS,
    arguments,
    check,
    checked,
    make_batch,
    run,
)

pytestmark = pytest.mark.usefixtures("short_cuts")


def _padded(tensor: Tensor, *extra: int) -> Tensor:
    """The tensor as a slice of a larger one of 0xFF: extra rows, columns, ... and an offset on every axis."""
    bits = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    sizes = [size + 2 * more for size, more in zip(tensor.shape, extra, strict=True)]
    view = torch.full(sizes, -1, dtype=bits, device=DEVICE).view(tensor.dtype)
    for axis, more in enumerate(extra):
        view = view.narrow(axis, more, tensor.shape[axis])
    return view.copy_(tensor)


def _heads_first(q: Tensor) -> Tensor:
    """[T, H, d] numbers stored as [H, T, d], as a batched projection leaves them."""
    return q.transpose(0, 1).contiguous().transpose(0, 1)


def _every_other(tensor: Tensor) -> Tensor:
    """Stored in the even places of axis 0 of a tensor twice as long, whose odd places hold 0xFF."""
    wide = torch.full((2 * tensor.shape[0], *tensor.shape[1:]), -1, dtype=tensor.dtype, device=DEVICE)
    wide[::2] = tensor
    return wide[::2]


def _interleaved_pages(cache: Tensor) -> Tensor:
    """[page, layer, slot, d]: one layer of three."""
    pool = torch.full((cache.shape[0], 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype, device=DEVICE)
    pool[:, 1] = cache
    return pool[:, 1]


def _interleaved_slots(cache: Tensor) -> Tensor:
    """[page, slot, layer, d]: one layer of three."""
    pages, slots, dim = cache.shape
    pool = torch.full((pages, slots, 3, dim), torch.nan, dtype=cache.dtype, device=DEVICE)
    pool[:, :, 2] = cache
    return pool[:, :, 2]


VIEWS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "q heads apart": lambda call: {"q": _padded(call["q"], 1, 2, 0)},
    "q odd slice": lambda call: {"q": _padded(call["q"], 0, 1, 3)},
    "q heads first": lambda call: {"q": _heads_first(call["q"])},
    "cache slots apart": lambda call: {"kv_cache": _padded(call["kv_cache"], 0, 3, 0)},
    "cache odd slice": lambda call: {"kv_cache": _padded(call["kv_cache"], 1, 1, 1)},
    "cache offset": lambda call: {"kv_cache": _padded(call["kv_cache"], 2, 0, 0)},
    "layers by page": lambda call: {"kv_cache": _interleaved_pages(call["kv_cache"])},
    "layers by slot": lambda call: {"kv_cache": _interleaved_slots(call["kv_cache"])},
    "table columns": lambda call: {"block_table": _padded(call["block_table"], 0, 3)},
    "table rows": lambda call: {"block_table": _every_other(call["block_table"])},
    "table transposed": lambda call: {"block_table": call["block_table"].T.contiguous().T},
    "lens strided": lambda call: {"seq_lens": _every_other(call["seq_lens"])},
    "starts strided": lambda call: {"cu_seqlens_q": _every_other(call["cu_seqlens_q"])},
    "lens offset": lambda call: {"seq_lens": _padded(call["seq_lens"], 3)},
}


def _call() -> dict[str, Any]:
    return arguments(make_batch([33, 0, 70], [1, 2, 3], num_heads=5), 16)


@pytest.mark.parametrize("mode", [PERSISTENT, SPLITS] if ON_CARD else [PERSISTENT], ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_same_bits(name: str, mode: dict[str, Any]) -> None:
    """Which mode reads them makes no difference to how an address is found: the split ones share the kernel."""
    call = _call()
    change = VIEWS[name](call)
    for key, value in change.items():
        assert same_bits((value,), (call[key],))
        assert value.stride() != call[key].stride() or value.storage_offset()
    assert same_bits(run(call, **mode), run(call | change, **mode))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_pair_of_queries_with_strides_of_their_own(mode: dict[str, Any]) -> None:
    call = _call()
    latent, rope = call["q"][..., :32], call["q"][..., 32:]
    plain = run(call, **mode)
    for pair in (
        (latent.contiguous(), rope.contiguous()),
        (_heads_first(latent), _padded(rope, 1, 2, 5)),
    ):
        assert same_bits(plain, run(call, q=pair, **mode))


def test_a_pair_without_rope() -> None:
    call = arguments(make_batch([33, 5], dims=(32, 0)), 16)
    pair = (call["q"], call["q"].new_empty(2, 4, 0))
    assert same_bits(checked(call), run(call, q=pair))


def test_an_expanded_table_and_query() -> None:
    """Beams over one prompt: every row of the table is the same memory."""
    call = arguments(make_batch([40], [1], num_heads=2), 16)
    lens = torch.full((3,), 40, dtype=torch.int32, device=DEVICE)
    wide = call | {"q": torch.cat([call["q"]] * 3), "seq_lens": lens, "cu_seqlens_q": None}
    expanded = wide | {
        "block_table": call["block_table"].expand(3, -1),
        "seq_lens": call["seq_lens"].expand(3),
        "q": call["q"].expand(3, -1, -1),
    }
    copied = wide | {"block_table": call["block_table"].repeat(3, 1)}
    assert same_bits(checked(copied), run(expanded))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("extra", [(2, 3, 0), (1, 2, 3)], ids=str)
def test_out_and_lse_as_views(extra: tuple[int, int, int], mode: dict[str, Any]) -> None:
    """Only the view is written; what lies between its rows and around it stays."""
    call = _call()
    out_base = torch.full(
        [size + 2 * more for size, more in zip((6, 5, 32), extra, strict=True)],
        -768.0, dtype=torch.float16, device=DEVICE,
    )  # fmt: skip
    lse_base = torch.full(
        [size + 2 * more for size, more in zip((6, 5), extra[:2], strict=True)], -768.0, device=DEVICE
    )
    out, lse = out_base, lse_base
    for axis, (size, more) in enumerate(zip((6, 5, 32), extra, strict=True)):
        out = out.narrow(axis, more, size)
        lse = lse.narrow(axis, more, size) if axis < 2 else lse
    run(call, out=out, lse=lse, **mode)
    check((out, lse), call)
    for base, view in ((out_base, out), (lse_base, lse)):
        view.fill_(-768.0)
        assert bool((base == -768).all()), "memory between or around the rows was written"


def test_out_with_heads_first() -> None:
    call = _call()
    out = torch.empty(5, 6, 32, dtype=torch.float16, device=DEVICE).transpose(0, 1)
    lse = torch.empty(5, 6, device=DEVICE).transpose(0, 1)
    plain = run(call, **SPLITS)
    assert same_bits(plain, run(call, out=out, lse=lse, **SPLITS))
    assert same_bits(plain, (out, lse))
