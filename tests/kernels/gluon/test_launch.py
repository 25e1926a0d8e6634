"""The launch on a CPU: what either kernel is told, and values of a stand-in for it in plain torch.

The stand-in reads its arguments as the kernels do, so these values show that the launch says the right thing; that the kernels
do it, only a card can show.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import same_bits
from gluon_backend import (
    ON_HOPPER,
    RANK,
    ROPE,
    args_of,
    arguments,
    check,
    heads_first,
    is_zero,
    make_batch,
    problem_of,
    rows_of,
)
from torch import Tensor

from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.kernels import gluon
from pagedmla.kernels.gluon import launch
from pagedmla.kernels.gluon.choice import Choice, choose, few_heads, many_heads
from pagedmla.kernels.gluon.layouts import TILE
from pagedmla.kernels.gluon.tensors import query_parts

from .launch_stand_in import KERNELS, StandIn

H200 = KNOWN_TARGETS["sm_90"]
on_cpu = pytest.mark.skipif(ON_HOPPER, reason="a card runs the kernels themselves")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What the stand-ins were launched with."""
    found: list[SimpleNamespace] = []
    for kernel in KERNELS:
        monkeypatch.setattr(launch, f"decode_{kernel}", StandIn(kernel, found))
    monkeypatch.setattr(launch, "Target", SimpleNamespace(detect=lambda device: H200))
    return found


def make_call(
    lens: list[int], q_lens: list[int] | None = None, num_heads: int = 16, page_size: int = 64, **options: Any
) -> dict[str, Any]:
    batch = make_batch(lens, q_lens, num_heads=num_heads, q_dtype=torch.float16, **options)
    return arguments(batch, page_size, device="cpu")


def run(
    call: dict[str, Any], out: Tensor | None = None, lse: Tensor | None = None, **changes: Any
) -> tuple[Tensor, Tensor]:
    args = args_of(call, **changes)
    if out is None:
        out = torch.full((args.num_tokens, args.num_heads, RANK), torch.nan, dtype=args.q.dtype)
    if lse is None:
        lse = torch.full((args.num_tokens, args.num_heads), torch.nan)
    gluon.decode(args, args.problem(), out, lse)
    return out, lse


@on_cpu
@pytest.mark.parametrize(
    ("num_heads", "page_size", "kernel", "lanes"),
    [
        (16, 64, "few_heads", 1),
        (1, 192, "few_heads", 1),
        (5, 128, "few_heads", 1),
        (12, 1, "few_heads", 1),
        (16, 48, "few_heads", 1),
        (17, 64, "many_heads", 1),
        (64, 192, "many_heads", 1),
        (65, 64, "many_heads", 2),
        (130, 128, "many_heads", 3),
    ],
)
def test_one_query_token(
    num_heads: int, page_size: int, kernel: str, lanes: int, seen: list[SimpleNamespace]
) -> None:
    call = make_call([300, 0, 1, 129, 64], None, num_heads, page_size) | {"cu_seqlens_q": None}
    check(run(call), call)
    (a,) = seen
    assert (a.kernel, a.programs) == (kernel, 132)
    assert (a.RAGGED, a.CAUSAL, a.ONE_ROW_TILE, a.even_q_len, a.SCAN) == (False, False, True, 1, 32)
    assert (num_heads, page_size) == (a.NUM_HEADS, a.PAGE_SIZE)
    assert (40 if kernel == "many_heads" else 120) == a.LOADER_REGISTERS
    assert a.capacity == call["block_table"].shape[1] * page_size
    if kernel == "many_heads":
        assert (lanes, 216) == (a.LANES, a.COMPUTE_REGISTERS)
    else:
        assert a.ROWS == 16


@on_cpu
@pytest.mark.parametrize("num_heads", [4, 40])
def test_ragged_queries_with_padding_around_them(num_heads: int, seen: list[SimpleNamespace]) -> None:
    call = make_call([200, 3, 0, 70], [2, 1, 1, 3], num_heads)
    padding = torch.full_like(call["q"][:2], torch.nan)
    padded = call | {"q": torch.cat([padding, call["q"], padding]), "cu_seqlens_q": call["cu_seqlens_q"] + 2}
    result = run(padded)
    check(result, padded)
    assert is_zero(rows_of(result, [0, 1, 9, 10]))
    (a,) = seen
    assert (a.RAGGED, a.CAUSAL, a.ONE_ROW_TILE, a.even_q_len) == (True, True, False, 0)
    assert a.cu_seqlens_q is padded["cu_seqlens_q"]


@on_cpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_heads", "one_row_tile"), [(5, True), (20, True), (128, False)])
def test_several_query_tokens(
    num_heads: int, one_row_tile: bool, causal: bool, seen: list[SimpleNamespace]
) -> None:
    """128 heads and three tokens are six row tiles, in two groups of three lanes."""
    call = make_call([150, 3, 64], [3] * 3, num_heads, causal=causal) | {"cu_seqlens_q": None}
    check(run(call), call)
    (a,) = seen
    assert (a.CAUSAL, a.even_q_len, a.ONE_ROW_TILE) == (causal, 3, one_row_tile)


@on_cpu
@pytest.mark.parametrize("num_heads", [1, 17])
@pytest.mark.parametrize(("num_seqs", "scan"), [(31, 32), (32, 256), (33, 256)])
def test_the_scan_is_short_where_it_holds_all_sequences_and_the_padding(
    num_seqs: int, scan: int, num_heads: int, seen: list[SimpleNamespace]
) -> None:
    call = make_call([1] * num_seqs, None, num_heads) | {"cu_seqlens_q": None}
    check(run(call), call)
    assert scan == seen[0].SCAN


@on_cpu
@pytest.mark.parametrize("num_heads", [5, 24])
def test_queries_that_must_be_copied_into_a_workspace_of_any_address(
    num_heads: int, seen: list[SimpleNamespace]
) -> None:
    call = make_call([300, 0, 140], [3, 3, 3], num_heads)
    size = gluon.workspace_size(*problem_of(call, 3), H200)
    parts = call["q"].split([RANK, ROPE], -1)
    for q in (heads_first(call["q"]), tuple(map(heads_first, parts)), parts):
        for start in (64, 65, 72):
            storage = torch.full((size + 130,), 0xA5, dtype=torch.uint8)
            workspace = storage[start : start + size].fill_(0xFF)
            check(run(call, q=q, workspace=workspace, max_q_len=3), call)
            assert bool((storage[:start] == 0xA5).all() & (storage[start + size :] == 0xA5).all())
    assert len(seen) == 9


@on_cpu
@pytest.mark.parametrize("num_heads", [5, 20])
def test_strided_outputs_and_a_layer_of_a_pool(num_heads: int, seen: list[SimpleNamespace]) -> None:
    call = make_call([300, 5], [1, 2], num_heads)
    call["kv_cache"] = torch.stack([torch.full_like(call["kv_cache"], torch.nan), call["kv_cache"]], 1)[:, 1]
    out = torch.full((num_heads, 3, RANK + 8), -768.0, dtype=torch.float16).transpose(0, 1)
    lse = torch.full((num_heads, 3), -768.0).t()
    check(run(call, out=out[..., :RANK], lse=lse), call)
    assert bool((out[..., RANK:] == -768).all())
    assert len(seen) == 1


@on_cpu
@pytest.mark.parametrize("num_heads", [8, 20])
def test_the_stand_in_can_be_wrong(
    num_heads: int, seen: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of the cache too far from page to page: the check says so, and where."""
    call = make_call([300, 5], None, num_heads)
    right = launch.cache_rows
    monkeypatch.setattr(launch, "cache_rows", lambda cache: (right(cache)[0], 65))
    with pytest.raises(AssertionError, match=r"sequence 0 \(1 queries, 300 keys\): wrong in the left half"):
        check(run(call), call)
    assert len(seen) == 1


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("choice", [few_heads(132), many_heads(3, 132)], ids=lambda choice: choice.kernel)
def test_the_kernel_gets_each_argument_in_its_place(choice: Choice, pair: bool) -> None:
    """Whichever kernel is chosen for other numbers of query tokens, too."""
    call = arguments(make_batch([70, 0, 130], [2, 1, 3], num_heads=7), device="cpu", poison="finite")
    if pair:
        call["q"] = tuple(part.contiguous() for part in call["q"].split([RANK, ROPE], -1))
    args = args_of(call)
    problem, parts = args.problem(), choice.layout.carve(None, torch.device("cpu"))
    out, lse = torch.empty(6, 7, RANK, dtype=torch.bfloat16), torch.empty(7, 6).t()
    queries = query_parts(args, choice, None)
    given = launch.decode_arguments(args, problem, choice, parts, queries, out, lse)
    constants = launch.decode_constants(args, problem, choice)
    names = launch.kernel_of(choice).arg_names
    assert names[len(given) :] == list(constants)
    found = dict(zip(names, given, strict=False)) | constants
    widths, pages = ((RANK, ROPE) if pair else (576, 576)), call["kv_cache"].shape[0]
    if choice.kernel == "few_heads":
        assert found["q"] is args.q
        assert found["q_rope"] is (args.q_pe if pair else args.q)
        chunks = [found[f"{name}_{of}_chunks"] for name in ("q", "q_rope") for of in ("token", "head")]
        assert chunks == [7 * widths[0] // 8, widths[0] // 8, 7 * widths[1] // 8, widths[1] // 8]
    else:
        for name, shape, block in (
            ("q_desc", [42, widths[0]], [64, 256]),
            ("q_rope_desc", [42, widths[1]], [64, ROPE]),
            ("latent_desc", [pages * 64, 576], [64, 256]),
            ("rope_desc", [pages * 64, 576], [64, ROPE]),
        ):
            descriptor = found[name]
            assert (descriptor.shape, descriptor.strides) == (shape, [shape[1], 1]), name
            assert (descriptor.block_shape, descriptor.layout) == (block, TILE), name
    assert found["q_rope_column"] == (0 if pair else RANK)
    assert (found["rows_per_page"], found["num_pages"], found["token_chunks"]) == (64, pages, 72)
    assert (found["num_seqs"], found["num_tokens"], found["even_q_len"]) == (3, 6, 0)
    assert found["capacity"] == 64 * call["block_table"].shape[1]
    assert (found["out_token_stride"], found["out_head_stride"]) == (7 * RANK, RANK)
    assert (found["lse_token_stride"], found["lse_head_stride"]) == (1, 6)
    assert found["block_table_stride"] == call["block_table"].shape[1]
    for name in ("block_table", "seq_lens", "cu_seqlens_q", "kv_cache"):
        assert found[name] is call[name]
    for name in ("partial_out", "partial_lse", "flags"):
        assert found[name] is getattr(parts, name)
    # all that the launch is handed is the call's or begins in its workspace, so it can be repeated
    assert [part for part, _ in parts.views] == [parts.flags, parts.partial_lse, parts.partial_out]
    expected = {
        "RAGGED": True,
        "CAUSAL": True,
        "NUM_HEADS": 7,
        "PAGE_SIZE": 64,
        "SCAN": 32,
        "ONE_ROW_TILE": False,
    }
    own = {"LOADER_REGISTERS": 120, "ROWS": 16}
    if choice.kernel == "many_heads":
        own = {"LOADER_REGISTERS": 40, "LANES": 3, "COMPUTE_REGISTERS": 216}
    assert constants == expected | own


@pytest.mark.parametrize("layout", ["packed", "token after token", "layers by slot"])
def test_a_token_of_a_page_of_one_is_where_the_next_page_says(layout: str) -> None:
    """A page's only token has no stride: torch lets it say anything."""
    call = make_call([70, 0, 130], None, 16, 1) | {"cu_seqlens_q": None}
    cache = call["kv_cache"]
    count = len(cache)
    if layout == "token after token":
        # as a transposed [1, tokens, 576] leaves it
        cache = cache.as_strided(cache.shape, (576, count * 576, 1))
    if layout == "layers by slot":
        cache = torch.stack([torch.full_like(cache, torch.nan), cache], 2)[:, :, 1]
    args = args_of(call, kv_cache=cache)
    assert gluon.refuses_tensors(args) is None
    choice = choose(args, 132)
    parts = choice.layout.carve(None, torch.device("cpu"))
    out, lse = torch.empty(3, 16, RANK, dtype=torch.float16), torch.empty(3, 16)
    queries = query_parts(args, choice, None)
    given = launch.decode_arguments(args, args.problem(), choice, parts, queries, out, lse)
    found = dict(zip(KERNELS["few_heads"].arg_names, given, strict=False))
    assert found["token_chunks"] == (144 if layout == "layers by slot" else 72)
    assert (found["rows_per_page"], found["num_pages"]) == (1, count)
    rows = cache.as_strided((count, 576), (8 * found["token_chunks"], 1), cache.storage_offset())
    assert same_bits((rows,), (call["kv_cache"][:, 0],))
