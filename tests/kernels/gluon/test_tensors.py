"""What the copy engine is given: rows of numbers that are the tensors' own, whatever their strides, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gluon_backend import RANK, ROPE, args_of, arguments, heads_first, make_batch, problem_of
from torch import Tensor

import pagedmla
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.dispatch import backend_for, workspace_bytes
from pagedmla.kernels import gluon, triton
from pagedmla.kernels.gluon import launch
from pagedmla.kernels.gluon.choice import Choice, few_heads, many_heads
from pagedmla.kernels.gluon.tensors import (
    Rows,
    cache_rows,
    is_in_place,
    matrix_of,
    query_bytes,
    query_parts,
    refuses_tensors,
)

H200 = KNOWN_TARGETS["sm_90"]
WIDTH = RANK + ROPE


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


def moved(tensor: Tensor, numbers: int) -> Tensor:
    """The tensor in memory that begins ``numbers`` numbers past a multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 16, dtype=tensor.dtype)
    start = -room.data_ptr() % 16 // tensor.element_size() + numbers
    return room[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


FEW, MANY = few_heads(132), many_heads(1, 132)
both_kernels = pytest.mark.parametrize("choice", [FEW, MANY], ids=lambda choice: choice.kernel)

# and whether the kernel for few rows, and that for many, read them where they lie
QUERIES: dict[str, tuple[Callable[[Tensor], Tensor], bool, bool]] = {
    "packed": (lambda q: q, True, True),
    "wider rows": (lambda q: wider(q, 0, 0, 64), True, True),
    "heads apart": (lambda q: wider(q, 0, 2, 0), True, False),
    "rows of an odd width": (lambda q: wider(q, 0, 0, 3), False, False),
    "an odd address": (lambda q: moved(q, 1), False, False),
    "heads first": (heads_first, True, False),
    "expanded over tokens": (lambda q: q[:1].expand(len(q), -1, -1), True, False),
    "expanded over heads": (lambda q: q[:, :1].expand(-1, q.shape[1], -1), True, False),
    "one token of an odd stride": (lambda q: wider(q, 0, 1, 0)[:1], True, True),
    "one head": (lambda q: wider(q, 0, 1, 0)[:, :1], True, True),
    "one head, heads first": (lambda q: heads_first(q)[:, :1], True, True),
    "one row": (lambda q: wider(q, 0, 0, 3)[:1, :1], True, True),
}


@both_kernels
@pytest.mark.parametrize("name", QUERIES)
def test_queries_are_read_where_they_lie_and_copied_only_where_they_must(name: str, choice: Choice) -> None:
    change, few, many = QUERIES[name]
    in_place = few if choice is FEW else many
    q = change(call_of()["q"])
    args = args_of(call_of(), q=q)
    storage = torch.full((query_bytes(*q.shape) + 33,), 0xA5, dtype=torch.uint8)
    assert is_in_place(args, choice) == in_place
    for room in (None, storage[3:-30], storage[16:-17]):
        found = query_parts(args, choice, room)
        assert torch.equal(found.latent, q)
        assert found.rope is found.latent
        assert found.rope_column == RANK
        assert found.latent.data_ptr() % 16 == 0
        assert (found.latent is q) == in_place
        if choice is MANY:
            assert torch.equal(matrix(matrix_of(found.latent)), q.reshape(-1, WIDTH))
        if room is not None and not in_place:
            inside = found.latent.data_ptr() - room.data_ptr()
            assert 0 <= inside < 16
    assert bool((storage[:3] == 0xA5).all() & (storage[-17:] == 0xA5).all()), (
        "bytes around the room were written"
    )


@both_kernels
def test_a_pair_is_read_or_copied_each_by_itself(choice: Choice) -> None:
    q = call_of()["q"]
    latent, rope = q[..., :RANK], q[..., RANK:]
    room = torch.zeros(query_bytes(*q.shape), dtype=torch.uint8)
    apart = choice is MANY
    for pair, copied in (
        ((latent.contiguous(), rope.contiguous()), (False, False)),
        # the parts of packed rows are rows at even distances
        ((latent, rope), (False, False)),
        ((heads_first(latent), rope.contiguous()), (apart, False)),
        ((latent.contiguous(), wider(rope, 0, 0, 3)), (False, True)),
        ((heads_first(latent), heads_first(rope)), (apart, apart)),
    ):
        for memory in (None, room):
            found = query_parts(args_of(call_of(), q=pair), choice, memory)
            assert torch.equal(found.latent, latent)
            assert torch.equal(found.rope, rope)
            assert found.rope_column == 0
            assert tuple(a is not b for a, b in zip(found, pair, strict=False)) == copied


def test_queries_that_were_not_copied_are_no_matrix() -> None:
    with pytest.raises(ValueError, match="rows at even distances wanted"):
        matrix_of(heads_first(call_of()["q"]))


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


@pytest.mark.parametrize("page_size", [1, 48, 64, 192])
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


@pytest.mark.parametrize(
    ("page_size", "extra", "got"),
    [(16, 8, None), (1, 8, None), (64, 8, None), (16, 4, "1160 bytes"), (1, 3, "1158 bytes")],
)
def test_tokens_lie_at_multiples_of_16_bytes_whoever_copies_them(
    page_size: int, extra: int, got: str | None
) -> None:
    call = arguments(make_batch([70, 0, 130], [2, 1, 3], num_heads=5), page_size, device="cpu")
    args = args_of(call, kv_cache=wider(call["kv_cache"], 0, 0, extra), max_q_len=3)
    assert backend_for(args, args.problem(), H200, None) == ("triton" if got else "gluon")
    refusal = refuses_tensors(args)
    assert (refusal is None) == (got is None)
    if refusal is not None:
        assert (refusal.code, refusal.argument, refusal.got[:10]) == ("alignment", "kv_cache", got)


def test_a_pool_without_pages_is_nothing_to_refuse() -> None:
    call = call_of()
    assert refuses_tensors(args_of(call, kv_cache=call["kv_cache"][:0])) is None


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
    q = wider(call["q"], 0, 0, 3)
    for choice in (FEW, MANY):
        needed = choice.layout.num_bytes + query_bytes(6, 7, WIDTH)
        for size, fits in ((needed, True), (needed - 1, False)):
            given = args_of(call, q=q, workspace=torch.zeros(size, dtype=torch.uint8))
            if fits:
                room = launch._query_room(given, choice)
                assert room is not None
                assert torch.equal(query_parts(given, choice, room).latent, call["q"])
            else:
                with pytest.raises(InvalidArgument) as caught:
                    launch._query_room(given, choice)
                assert caught.value.argument == "workspace"
                assert str(needed) in caught.value.wanted
        in_place = args_of(call, workspace=torch.zeros(1, dtype=torch.uint8))
        assert launch._query_room(in_place, choice) is None


def test_rows_without_any_key_are_written_without_a_launch() -> None:
    call = arguments(make_batch([0, 0], num_heads=20), 64, device="cpu")
    for change in ({"kv_cache": call["kv_cache"][:0]}, {"block_table": call["block_table"][:, :0]}):
        args = args_of(call | change)
        out, lse = torch.full((2, 20, RANK), torch.nan, dtype=torch.bfloat16), torch.full((2, 20), torch.nan)
        gluon.decode(args, args.problem(), out, lse)
        assert bool((out == 0).all() & (lse == -torch.inf).all())
