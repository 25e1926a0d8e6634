"""What the copy engine is given: rows of numbers that are the tensors' own, whatever their strides, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gluon_backend import RANK, ROPE, arguments, make_batch, problem_of
from torch import Tensor

import pagedmla
from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.dispatch import backend_for, workspace_bytes
from pagedmla.kernels import gluon, triton
from pagedmla.kernels.gluon import launch
from pagedmla.kernels.gluon.layouts import TILE
from pagedmla.kernels.gluon.many_heads import decode_many_heads
from pagedmla.kernels.gluon.tensors import Rows, cache_rows, query_bytes, query_rows, refuses_tensors
from pagedmla.kernels.policy import GLUON_DECODE_CONFIG
from pagedmla.kernels.split_kv.launch import make_step

H200 = KNOWN_TARGETS["sm_90"]
WIDTH = RANK + ROPE


def args_of(call: dict[str, Any], **changes: Any) -> DecodeArguments:
    """What the operators make of a call."""
    given = {name: value for name, value in call.items() if name not in ("q_scale", "kv_scale")} | changes
    q, q_pe = given.pop("q") if isinstance(given["q"], tuple) else (given.pop("q"), None)
    return DecodeArguments(q=q, q_pe=q_pe, **given)


def call_of(page_size: int = 64, **options: Any) -> dict[str, Any]:
    return arguments(make_batch([70, 0, 130], [2, 1, 3], num_heads=7), page_size, device="cpu", **options)


def matrix(rows: Rows) -> Tensor:
    """What the copy engine sees."""
    return rows.base.as_strided((rows.num_rows, rows.width), (rows.stride, 1), rows.base.storage_offset())


def wider(tensor: Tensor, *extra: int) -> Tensor:
    """The tensor as a slice from the start of a larger one of nan."""
    sizes = [size + more for size, more in zip(tensor.shape, extra, strict=True)]
    view = torch.full(sizes, torch.nan, dtype=tensor.dtype)
    for axis, size in enumerate(tensor.shape):
        view = view.narrow(axis, 0, size)
    return view.copy_(tensor)


def heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def moved(tensor: Tensor, numbers: int) -> Tensor:
    """The tensor in memory that begins ``numbers`` numbers past a multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype)
    start = -room.data_ptr() % 16 // tensor.element_size() + numbers
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


QUERIES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "packed": (lambda q: q, True),
    "wider rows": (lambda q: wider(q, 0, 0, 64), True),
    "heads apart": (lambda q: wider(q, 0, 2, 0), False),
    "rows of an odd width": (lambda q: wider(q, 0, 0, 3), False),
    "an odd address": (lambda q: moved(q, 1), False),
    "heads first": (heads_first, False),
    "expanded over tokens": (lambda q: q[:1].expand(len(q), -1, -1), False),
    "expanded over heads": (lambda q: q[:, :1].expand(-1, q.shape[1], -1), False),
    "one token of an odd stride": (lambda q: wider(q, 0, 1, 0)[:1], True),
    "one head": (lambda q: wider(q, 0, 1, 0)[:, :1], True),
    "one head, heads first": (lambda q: heads_first(q)[:, :1], True),
    "one row": (lambda q: wider(q, 0, 0, 3)[:1, :1], True),
}


@pytest.mark.parametrize("name", QUERIES)
def test_query_rows_are_token_after_token_and_copied_only_where_they_must(name: str) -> None:
    change, in_place = QUERIES[name]
    q = change(call_of()["q"])
    args = args_of(call_of(), q=q)
    storage = torch.full((query_bytes(*q.shape) + 33,), 0xA5, dtype=torch.uint8)
    for room in (None, storage[3:-30], storage[16:-17]):
        found = query_rows(args, room)
        assert torch.equal(matrix(found.latent), q.reshape(-1, WIDTH))
        assert found.rope is found.latent
        assert found.rope_column == RANK
        assert found.latent.base.data_ptr() % 16 == 0
        assert (found.latent.base is q) == in_place
        if room is not None and not in_place:
            inside = found.latent.base.data_ptr() - room.data_ptr()
            assert 0 <= inside < 16
    assert bool((storage[:3] == 0xA5).all() & (storage[-17:] == 0xA5).all()), (
        "bytes around the room were written"
    )


def test_a_pair_has_a_matrix_for_each_part() -> None:
    q = call_of()["q"]
    latent, rope = q[..., :RANK], q[..., RANK:]
    room = torch.zeros(query_bytes(*q.shape), dtype=torch.uint8)
    for pair, copied in (
        ((latent.contiguous(), rope.contiguous()), (False, False)),
        # the parts of packed rows are rows at even distances
        ((latent, rope), (False, False)),
        ((heads_first(latent), rope.contiguous()), (True, False)),
        ((latent.contiguous(), wider(rope, 0, 0, 3)), (False, True)),
        ((heads_first(latent), heads_first(rope)), (True, True)),
    ):
        for memory in (None, room):
            found = query_rows(args_of(call_of(), q=pair), memory)
            assert torch.equal(matrix(found.latent), latent.reshape(-1, RANK))
            assert torch.equal(matrix(found.rope), rope.reshape(-1, ROPE))
            assert found.rope_column == 0
            bases = (found.latent.base, found.rope.base)
            assert tuple(base is not part for base, part in zip(bases, pair, strict=True)) == copied


CACHES: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda cache: cache,
    "slots apart": lambda cache: wider(cache, 0, 3, 0),
    "wider tokens": lambda cache: wider(cache, 0, 0, 64),
    "a pool's slice": lambda cache: torch.cat([cache, cache])[len(cache) :],
    "one layer of three, by page": lambda cache: torch.stack([cache] * 3, 1)[:, 1],
    "one layer of three, by slot": lambda cache: torch.stack([cache] * 3, 2)[:, :, 2],
    "one page": lambda cache: wider(cache, 0, 0, 0)[:1],
    "one page, odd stride": lambda cache: cache.as_strided((1, *cache.shape[1:]), (999, WIDTH, 1)),
}


@pytest.mark.parametrize("page_size", [64, 192])
@pytest.mark.parametrize("name", CACHES)
def test_cache_rows_find_every_token_of_every_page(name: str, page_size: int) -> None:
    cache = CACHES[name](call_of(page_size, poison="finite")["kv_cache"])
    assert refuses_tensors(args_of(call_of(page_size), kv_cache=cache)) is None
    rows, rows_per_page = cache_rows(cache)
    flat = matrix(rows)
    for page in range(len(cache)):
        first = page * rows_per_page
        assert first + page_size <= len(flat)
        assert torch.equal(flat[first : first + page_size], cache[page])
    # and no further than the last page's end
    assert len(flat) == (len(cache) - 1) * rows_per_page + page_size


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "an odd address": (lambda cache: moved(cache, 1), "alignment", "address 0x"),
    "tokens of an odd width": (lambda cache: wider(cache, 0, 0, 2), "alignment", "1156 bytes"),
    "expanded over slots": (lambda cache: cache[:, :1].expand(-1, 64, -1), "strides", "(36864, 0, 1)"),
    "pages an odd distance apart": (
        lambda cache: torch.zeros(10**6, dtype=cache.dtype).as_strided(cache.shape, (64 * WIDTH + 8, WIDTH, 1)),
        "strides",
        "(36872, 576, 1)",
    ),
    "more rows than an i32": (
        lambda cache: torch.empty(2**26, 64, WIDTH, dtype=cache.dtype, device="meta"),
        "num_rows",
        str(2**32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_cache_that_cannot_be_viewed_goes_to_triton_or_is_refused_by_name(name: str) -> None:
    change, code, got = REFUSED[name]
    call = call_of()
    args = args_of(call, kv_cache=change(call["kv_cache"]), max_q_len=3)
    problem = args.problem()
    assert backend_for(args_of(call), problem, H200, None) == "gluon"
    assert backend_for(args, problem, H200, None) == "triton"
    with pytest.raises(Unsupported) as caught:
        backend_for(args, problem, H200, "gluon")
    (refusal,) = caught.value.refusals
    assert (refusal.backend, refusal.code, refusal.argument) == ("gluon", code, "kv_cache")
    assert got in refusal.got
    assert backend_for(args, problem, H200, "triton") == "triton"


def test_a_pool_without_pages_is_nothing_to_refuse() -> None:
    call = call_of()
    assert refuses_tensors(args_of(call, kv_cache=call["kv_cache"][:0])) is None


@pytest.mark.parametrize("pair", [False, True])
def test_the_kernel_gets_each_argument_in_its_place(pair: bool) -> None:
    call = call_of(poison="finite")
    if pair:
        call["q"] = (call["q"][..., :RANK].contiguous(), call["q"][..., RANK:].contiguous())
    args = args_of(call)
    step = make_step(args, args.problem(), H200, GLUON_DECODE_CONFIG)
    parts = step.layout.carve(None, torch.device("cpu"))
    out, lse = torch.empty(6, 7, RANK, dtype=torch.bfloat16), torch.empty(7, 6).t()
    given = launch.decode_arguments(step, parts, query_rows(args, None), out, lse)
    constants = launch.decode_constants(step.problem, step.ragged, step.causal)
    names = decode_many_heads.arg_names
    assert len(given) + len(constants) == len(names)
    assert names[len(given) :] == list(constants)
    found = dict(zip(names, given, strict=False)) | constants
    widths = (RANK, ROPE) if pair else (WIDTH, WIDTH)
    pages = call["kv_cache"].shape[0]
    for name, shape, columns in (
        ("q_desc", [42, widths[0]], 256),
        ("q_rope_desc", [42, widths[1]], 64),
        ("latent_desc", [pages * 64, WIDTH], 256),
        ("rope_desc", [pages * 64, WIDTH], 64),
    ):
        descriptor = found[name]
        assert (descriptor.shape, descriptor.strides) == (shape, [shape[1], 1]), name
        assert (descriptor.block_shape, descriptor.layout) == ([64, columns], TILE), name
    assert found["q_rope_column"] == (0 if pair else RANK)
    assert (found["rows_per_page"], found["num_pages"]) == (64, pages)
    assert (found["num_seqs"], found["capacity"]) == (3, 64 * call["block_table"].shape[1])
    assert (found["out_token_stride"], found["out_head_stride"]) == (7 * RANK, RANK)
    assert (found["lse_token_stride"], found["lse_head_stride"]) == (1, 6)
    assert found["block_table_stride"] == call["block_table"].shape[1]
    assert found["cu_seqlens_q"] is call["cu_seqlens_q"]
    assert constants == {"RAGGED": True, "CAUSAL": True, "NUM_HEADS": 7, "PAGE_SIZE": 64}


def test_a_workspace_holds_a_copy_of_the_query_and_whatever_the_next_backend_needs() -> None:
    call = call_of()
    problem, bounds = problem_of(call, 3)
    own = gluon.workspace_size(problem, bounds, H200)
    assert own == workspace_bytes(problem, bounds, H200, "gluon")
    assert own >= query_bytes(6, 7, WIDTH) + 64 * 512 * 4
    whole = workspace_bytes(problem, bounds, H200, None)
    assert whole == max(own, triton.workspace_size(problem, bounds, H200))


def test_a_ragged_call_that_hides_its_longest_query_has_a_workspace_too() -> None:
    """Sixteen heads with one query token each have few rows; a ragged call of them that does not say so may not."""
    problem = pagedmla.DecodeProblem(16, 0.07)
    bounds = pagedmla.BatchBounds(32, 4)
    assert workspace_bytes(problem, bounds, H200, None) >= gluon.workspace_size(problem, bounds, H200)


def test_a_workspace_without_room_for_the_query_is_refused() -> None:
    call = call_of()
    args = args_of(call, q=heads_first(call["q"]))
    step = make_step(args, args.problem(), H200, GLUON_DECODE_CONFIG)
    needed = step.layout.num_bytes + query_bytes(6, 7, WIDTH)
    for size, fits in ((needed, True), (needed - 1, False)):
        workspace = torch.zeros(size, dtype=torch.uint8)
        given = args_of(call, q=heads_first(call["q"]), workspace=workspace)
        if fits:
            room = launch._query_room(given, step.layout.num_bytes)
            assert room is not None
            assert torch.equal(matrix(query_rows(given, room).latent), call["q"].reshape(-1, WIDTH))
        else:
            with pytest.raises(InvalidArgument) as caught:
                launch._query_room(given, step.layout.num_bytes)
            assert caught.value.argument == "workspace"
            assert str(needed) in caught.value.wanted
    in_place = args_of(call, workspace=torch.zeros(1, dtype=torch.uint8))
    assert launch._query_room(in_place, step.layout.num_bytes) is None


def test_rows_without_any_key_are_written_without_a_launch() -> None:
    call = arguments(make_batch([0, 0], num_heads=20), 64, device="cpu")
    for change in ({"kv_cache": call["kv_cache"][:0]}, {"block_table": call["block_table"][:, :0]}):
        args = args_of(call | change)
        out, lse = torch.full((2, 20, RANK), torch.nan, dtype=torch.bfloat16), torch.full((2, 20), torch.nan)
        gluon.decode(args, args.problem(), out, lse)
        assert bool((out == 0).all() & (lse == -torch.inf).all())
