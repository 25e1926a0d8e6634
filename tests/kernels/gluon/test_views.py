"""VIEW: the same numbers give the same bits however they lie; what the copy engine cannot take is copied, refused or left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import same_bits
from gluon_backend import (
    DEVICE,
    arguments,
    check,
    checked,
    heads_first,
    make_batch,
    needs_hopper,
    problem_of,
    run,
)
from torch import Tensor

import pagedmla
from pagedmla import DecodePlan
from pagedmla.contract.errors import Unsupported

pytestmark = needs_hopper


def _padded(tensor: Tensor, *extra: int) -> Tensor:
    """The tensor as a slice of a larger one of 0xFF: extra rows, columns, ... and an offset on every axis."""
    bits = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    sizes = [size + 2 * more for size, more in zip(tensor.shape, extra, strict=True)]
    view = torch.full(sizes, -1, dtype=bits, device=DEVICE).view(tensor.dtype)
    for axis, more in enumerate(extra):
        view = view.narrow(axis, more, tensor.shape[axis])
    return view.copy_(tensor)


def _every_other(tensor: Tensor) -> Tensor:
    wide = torch.full((2 * tensor.shape[0], *tensor.shape[1:]), -1, dtype=tensor.dtype, device=DEVICE)
    wide[::2] = tensor
    return wide[::2]


def _layer(cache: Tensor, axis: int) -> Tensor:
    """One layer of three that lie side by side along ``axis``; the others are nan."""
    nan = torch.full_like(cache, torch.nan)
    return torch.stack([nan, cache, nan], axis).select(axis, 1)


VIEWS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "q heads apart": lambda call: {"q": _padded(call["q"], 1, 2, 0)},
    "q wider rows": lambda call: {"q": _padded(call["q"], 1, 0, 8)},
    "q odd slice": lambda call: {"q": _padded(call["q"], 0, 1, 3)},
    "q heads first": lambda call: {"q": heads_first(call["q"])},
    "cache slots apart": lambda call: {"kv_cache": _padded(call["kv_cache"], 0, 3, 0)},
    "cache wider tokens": lambda call: {"kv_cache": _padded(call["kv_cache"], 1, 1, 8)},
    "cache offset": lambda call: {"kv_cache": _padded(call["kv_cache"], 2, 0, 0)},
    "layers by page": lambda call: {"kv_cache": _layer(call["kv_cache"], 1)},
    "layers by slot": lambda call: {"kv_cache": _layer(call["kv_cache"], 2)},
    "table columns": lambda call: {"block_table": _padded(call["block_table"], 0, 3)},
    "table rows": lambda call: {"block_table": _every_other(call["block_table"])},
    "table transposed": lambda call: {"block_table": call["block_table"].T.contiguous().T},
    "lens strided": lambda call: {"seq_lens": _every_other(call["seq_lens"])},
    "starts strided": lambda call: {"cu_seqlens_q": _every_other(call["cu_seqlens_q"])},
}


# one of each kernel's
both_kernels = pytest.mark.parametrize("num_heads", [5, 20])


def _call(num_heads: int, longest: int = 700) -> dict[str, Any]:
    return arguments(make_batch([133, 0, longest], [1, 2, 3], num_heads=num_heads, spread=0.7))


@both_kernels
@pytest.mark.parametrize("longest", [700, 9000])
@pytest.mark.parametrize("name", VIEWS)
def test_same_bits(name: str, longest: int, num_heads: int) -> None:
    """Twice: the second time straight to the driver."""
    call = _call(num_heads, longest)
    change = VIEWS[name](call)
    for key, value in change.items():
        assert same_bits((value,), (call[key],))
        assert value.stride() != call[key].stride() or value.storage_offset()
    plain = run(call)
    check(plain, call)
    for _ in range(2):
        assert same_bits(plain, run(call | change))


@both_kernels
def test_a_pair_of_queries_with_strides_of_their_own(num_heads: int) -> None:
    call = _call(num_heads)
    latent, rope = call["q"][..., :512], call["q"][..., 512:]
    plain = run(call)
    for pair in (
        (latent, rope),
        (latent.contiguous(), rope.contiguous()),
        (heads_first(latent), _padded(rope, 1, 2, 5)),
    ):
        assert same_bits(plain, run(call, q=pair))


@both_kernels
def test_an_expanded_table_and_query(num_heads: int) -> None:
    """Beams over one prompt: every row of the table is the same memory."""
    call = arguments(make_batch([140], [1], num_heads=num_heads))
    lens = torch.full((3,), 140, dtype=torch.int32, device=DEVICE)
    wide = call | {"q": torch.cat([call["q"]] * 3), "seq_lens": lens, "cu_seqlens_q": None}
    expanded = wide | {
        "block_table": call["block_table"].expand(3, -1),
        "seq_lens": call["seq_lens"].expand(3),
        "q": call["q"].expand(3, -1, -1),
    }
    copied = wide | {"block_table": call["block_table"].repeat(3, 1)}
    assert same_bits(checked(copied), run(expanded))


@pytest.mark.parametrize("extra", [(2, 3, 0), (1, 2, 8), (1, 2, 3)], ids=str)
@both_kernels
@pytest.mark.parametrize("longest", [700, 9000])
def test_out_and_lse_as_views(extra: tuple[int, int, int], longest: int, num_heads: int) -> None:
    """Only the view is written; what lies between its rows and around it stays."""
    call = _call(num_heads, longest)
    out_base = torch.full(
        [size + 2 * more for size, more in zip((6, num_heads, 512), extra, strict=True)],
        -768.0, dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    lse_base = torch.full(
        [size + 2 * more for size, more in zip((6, num_heads), extra[:2], strict=True)], -768.0, device=DEVICE
    )
    out, lse = out_base, lse_base
    for axis, (size, more) in enumerate(zip((6, num_heads, 512), extra, strict=True)):
        out = out.narrow(axis, more, size)
        lse = lse.narrow(axis, more, size) if axis < 2 else lse
    run(call, out=out, lse=lse)
    check((out, lse), call)
    for base, view in ((out_base, out), (lse_base, lse)):
        view.fill_(-768.0)
        assert bool((base == -768).all()), "memory between or around the rows was written"


@both_kernels
def test_out_with_heads_first(num_heads: int) -> None:
    call = _call(num_heads)
    out = torch.empty(num_heads, 6, 512, dtype=torch.bfloat16, device=DEVICE).transpose(0, 1)
    lse = torch.empty(num_heads, 6, device=DEVICE).transpose(0, 1)
    plain = run(call)
    assert same_bits(plain, run(call, out=out, lse=lse))
    assert same_bits(plain, (out, lse))


@both_kernels
def test_a_cache_that_the_copy_engine_cannot_read_goes_to_triton_or_is_refused(num_heads: int) -> None:
    call = _call(num_heads)
    odd = call | {"kv_cache": _padded(call["kv_cache"], 1, 1, 1)}
    check(run(odd, backend=None), odd)
    assert same_bits(run(odd, backend=None), run(odd, backend="triton"))
    with pytest.raises(Unsupported) as caught:
        run(odd)
    assert caught.value.argument == "kv_cache"


@both_kernels
def test_a_plan_takes_either_cache_in_the_same_workspace(num_heads: int) -> None:
    """Made before the cache is seen, without a backend's name: what is odd goes to the next best, and fits."""
    call = _call(num_heads) | {"cu_seqlens_q": None}
    problem, bounds = problem_of(call, 2)
    plan = DecodePlan(problem, bounds, DEVICE)
    assert plan.backend == "gluon"
    plan.update(call["block_table"], call["seq_lens"])
    for cache in (call["kv_cache"], _padded(call["kv_cache"], 1, 1, 1)):
        plan.workspace.fill_(0xFF)
        result = plan.run(call["q"], cache)
        check(result, call)
    with pytest.raises(Unsupported):
        DecodePlan(problem, bounds, DEVICE, backend="gluon").run(call["q"], cache)


@both_kernels
def test_another_stream_and_another_current_device(num_heads: int) -> None:
    """All launches go to the current stream, the copy of the query included: what it writes just before is what they read."""
    call = _call(num_heads)
    call["q"] = heads_first(call["q"])
    expected = checked(call)
    late = {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}
    late["q"] = heads_first(torch.full_like(call["q"], torch.nan))
    late["seq_lens"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late["q"].copy_(call["q"])
        late["seq_lens"].copy_(call["seq_lens"])
        result = run(late)
    stream.synchronize()
    assert same_bits(expected, result)
    if torch.cuda.device_count() > 1:
        there = {name: v.to("cuda:1") if isinstance(v, Tensor) else v for name, v in call.items()}
        with torch.cuda.device(0):
            check(pagedmla.decode(there.pop("q"), there.pop("kv_cache"), there.pop("block_table"),
                                  there.pop("seq_lens"), backend="gluon", **there), call)  # fmt: skip


def _page_of_one_token(cache: Tensor, kind: str) -> Tensor:
    """The same numbers [num_pages, 1, 576], with another stride where a page has no second token."""
    if kind == "layers by slot":
        return _layer(cache, 2)
    return cache.as_strided(cache.shape, (576, len(cache) * 576, 1))


@pytest.mark.parametrize("kind", ["layers by slot", "as transposed"])
@pytest.mark.parametrize("longest", [700, 9000])
def test_tokens_that_are_copied_one_by_one_lie_where_the_pages_say(kind: str, longest: int) -> None:
    call = arguments(make_batch([133, 0, longest], num_heads=16, spread=0.7), 1) | {"cu_seqlens_q": None}
    plain = checked(call)
    other = call | {"kv_cache": _page_of_one_token(call["kv_cache"], kind)}
    assert same_bits(plain, run(other))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tokens_lie_at_multiples_of_16_bytes_and_of_no_more(page_size: int) -> None:
    call = arguments(make_batch([133, 0, 700], num_heads=16), page_size) | {"cu_seqlens_q": None}
    cache = torch.cat([call["kv_cache"], torch.full_like(call["kv_cache"][..., :8], torch.nan)], -1)
    assert same_bits(checked(call), run(call | {"kv_cache": cache[..., :576]}))
