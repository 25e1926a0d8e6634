"""The few-heads launch on a CPU: which calls it takes, what the kernel is told, and values of a stand-in in plain torch.

The stand-in reads its arguments as the kernel does, so these values show that the launch says the right thing; that the kernel
does it, only a card can show.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_backend import (
    DEVICE,
    ON_HOPPER,
    RANK,
    ROPE,
    arguments,
    check,
    is_zero,
    make_batch,
    problem_of,
    rows_of,
)
from torch import Tensor

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.dispatch import backend_for
from pagedmla.kernels import gluon
from pagedmla.kernels.gluon import choice, launch
from pagedmla.kernels.gluon.few_heads import launch as few_heads
from pagedmla.kernels.gluon.few_heads.kernel import decode_few_heads
from pagedmla.kernels.gluon.layouts import TILE
from pagedmla.kernels.gluon.tensors import query_rows
from pagedmla.kernels.policy import GLUON_FEW_HEADS_CONFIG

H200 = KNOWN_TARGETS["sm_90"]
ROWS = 16
LN2 = 0.6931471805599453

on_cpu = pytest.mark.skipif(ON_HOPPER, reason="a card runs the kernel itself")


class StandIn:
    """A sequence after the other, in float32; keeps what it was launched with."""

    def __init__(self) -> None:
        self.seen: list[SimpleNamespace] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self._launch, grid[0])

    def _launch(
        self, programs: int, *given: Any, num_warps: int, launch_cooperative_grid: bool, **constants: Any
    ) -> None:
        assert num_warps == 4
        assert launch_cooperative_grid
        names = decode_few_heads.arg_names
        assert names[len(given) :] == list(constants)
        a = SimpleNamespace(**dict(zip(names, given, strict=False)), **constants)
        self.seen.append(a)
        # whatever the workspace held
        for part, size in ((a.partial_out, ROWS * RANK), (a.partial_lse, ROWS), (a.flags, programs)):
            assert part.numel() == 2 * programs * size
            assert part.data_ptr() % 16 == 0
            part.fill_(-1)
        assert a.flags.dtype == torch.int64
        begin = 0
        for sequence in range(a.num_seqs + 1):
            end = a.even_q_len * (sequence + 1)
            if a.RAGGED:
                end = int(a.cu_seqlens_q[sequence + 1]) if sequence < a.num_seqs else a.num_tokens
            if sequence < a.num_seqs or a.RAGGED:
                self._sequence(a, sequence, begin, end)
            begin = end

    @staticmethod
    def _sequence(a: Any, sequence: int, begin: int, end: int) -> None:
        rows = torch.arange(begin * a.NUM_HEADS, end * a.NUM_HEADS)
        kv_len = min(int(a.seq_lens[sequence]), a.capacity) if sequence < a.num_seqs else 0
        keys = torch.arange(kv_len)
        pages = a.block_table[sequence, keys // a.PAGE_SIZE].long() if kv_len else keys
        tokens = pages * a.rows_per_page + keys % a.PAGE_SIZE
        values = _columns(a.latent_desc, tokens, 0, RANK)
        s = _columns(a.q_desc, rows, 0, RANK) @ values.T
        s += (
            _columns(a.q_rope_desc, rows, a.q_rope_column, ROPE) @ _columns(a.rope_desc, tokens, RANK, ROPE).T
        )
        s *= a.scale_log2 * LN2
        token = rows // a.NUM_HEADS
        if a.CAUSAL:
            s[keys[None, :] >= (kv_len - (end - begin) + token - begin + 1)[:, None]] = -torch.inf
        if a.RAGGED:
            s[token < int(a.cu_seqlens_q[0])] = -torch.inf
        lse = torch.logsumexp(s, 1)
        out = torch.exp(s - torch.where(lse == -torch.inf, 0.0, lse)[:, None]) @ values
        a.out[token, rows % a.NUM_HEADS] = out.to(a.out.dtype)
        a.lse[token, rows % a.NUM_HEADS] = lse


def _columns(descriptor: Any, rows: Tensor, first: int, count: int) -> Tensor:
    """Some columns of some rows of a descriptor's matrix, as blocks of its width would bring them."""
    assert descriptor.block_shape[1] == count
    matrix = descriptor.base.as_strided(
        descriptor.shape, descriptor.strides, descriptor.base.storage_offset()
    )
    return matrix[rows, first : first + count].float()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = StandIn()
    monkeypatch.setattr(few_heads, "decode_few_heads", found)
    monkeypatch.setattr(launch, "Target", SimpleNamespace(detect=lambda device: H200))
    return found


def args_of(call: dict[str, Any], **changes: Any) -> DecodeArguments:
    given = {name: value for name, value in call.items() if name not in ("q_scale", "kv_scale")} | changes
    q, q_pe = given.pop("q") if isinstance(given["q"], tuple) else (given.pop("q"), None)
    return DecodeArguments(q=q, q_pe=q_pe, **given)


def make_call(
    lens: list[int], q_lens: list[int] | None = None, num_heads: int = 16, page_size: int = 64
) -> dict[str, Any]:
    batch = make_batch(lens, q_lens, num_heads=num_heads, q_dtype=torch.float16)
    return arguments(batch, page_size, device="cpu")


def run(call: dict[str, Any], **changes: Any) -> tuple[Tensor, Tensor]:
    args = args_of(call, **changes)
    out = torch.full((args.num_tokens, args.num_heads, RANK), torch.nan, dtype=args.q.dtype)
    lse = torch.full((args.num_tokens, args.num_heads), torch.nan)
    gluon.decode(args, args.problem(), out, lse)
    return out, lse


@on_cpu
@pytest.mark.parametrize(("num_heads", "page_size"), [(16, 64), (1, 192), (5, 128)])
def test_one_query_token(num_heads: int, page_size: int, stand_in: StandIn) -> None:
    call = make_call([300, 0, 1, 129, 64], None, num_heads, page_size) | {"cu_seqlens_q": None}
    check(run(call), call)
    (a,) = stand_in.seen
    assert (a.RAGGED, a.CAUSAL, a.ONE_ROW_TILE, a.even_q_len, a.SCAN) == (False, False, True, 1, 32)
    assert (num_heads, page_size, ROWS, 40) == (a.NUM_HEADS, a.PAGE_SIZE, a.ROWS, a.LOADER_REGISTERS)
    assert a.capacity == call["block_table"].shape[1] * page_size
    assert a.flags.numel() == 2 * 132 * 132


@on_cpu
def test_ragged_queries_with_padding_around_them(stand_in: StandIn) -> None:
    call = make_call([200, 3, 0, 70], [2, 1, 1, 3], 4)
    padding = torch.full_like(call["q"][:2], torch.nan)
    padded = call | {"q": torch.cat([padding, call["q"], padding]), "cu_seqlens_q": call["cu_seqlens_q"] + 2}
    result = run(padded)
    check(result, padded)
    assert is_zero(rows_of(result, [0, 1, 9, 10]))
    (a,) = stand_in.seen
    assert (a.RAGGED, a.CAUSAL, a.ONE_ROW_TILE, a.even_q_len) == (True, True, False, 0)
    assert a.cu_seqlens_q is padded["cu_seqlens_q"]


@on_cpu
@pytest.mark.parametrize("causal", [True, False])
def test_several_query_tokens(causal: bool, stand_in: StandIn) -> None:
    batch = make_batch([150, 3, 64], [3] * 3, num_heads=5, q_dtype=torch.float16, causal=causal)
    call = arguments(batch, device="cpu") | {"cu_seqlens_q": None}
    check(run(call), call)
    assert (stand_in.seen[0].CAUSAL, stand_in.seen[0].even_q_len) == (causal, 3)


@on_cpu
@pytest.mark.parametrize(("num_seqs", "scan"), [(31, 32), (32, 256), (33, 256)])
def test_the_scan_is_short_where_it_holds_all_sequences_and_the_padding(
    num_seqs: int, scan: int, stand_in: StandIn
) -> None:
    call = make_call([1] * num_seqs, None, 1) | {"cu_seqlens_q": None}
    check(run(call), call)
    assert scan == stand_in.seen[0].SCAN


@on_cpu
def test_queries_that_must_be_copied_into_a_workspace_of_any_address(stand_in: StandIn) -> None:
    call = make_call([300, 0, 140], [3, 3, 3], 5)
    size = gluon.workspace_size(*problem_of(call, 3), H200)
    heads_first = call["q"].transpose(0, 1).contiguous().transpose(0, 1)
    parts = tuple(
        part.transpose(0, 1).contiguous().transpose(0, 1) for part in call["q"].split([RANK, ROPE], -1)
    )
    for q in (heads_first, parts, call["q"].split([RANK, ROPE], -1)):
        for start in (64, 65, 72):
            storage = torch.full((size + 130,), 0xA5, dtype=torch.uint8)
            workspace = storage[start : start + size].fill_(0xFF)
            check(run(call, q=q, workspace=workspace, max_q_len=3), call)
            assert bool((storage[:start] == 0xA5).all() & (storage[start + size :] == 0xA5).all())
    assert len(stand_in.seen) == 9


@on_cpu
def test_the_stand_in_can_be_wrong(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call([300, 5], None, 8)
    right = few_heads.cache_rows
    monkeypatch.setattr(few_heads, "cache_rows", lambda cache: (right(cache)[0], 65))
    with pytest.raises(AssertionError, match="sequence 0"):
        check(run(call), call)
    assert len(stand_in.seen) == 1


@pytest.mark.parametrize(
    ("num_heads", "q_lens", "options", "rows"),
    [
        (16, None, {}, 16),
        (16, None, {"schedule": "persistent"}, 16),
        (8, [2, 2, 2], {}, 16),
        (5, [3, 3, 3], {}, 16),
        (16, [1, 0, 1], {}, 16),
        (16, [1, 1, 1], {"max_q_len": 1}, 16),
        # the average says few, the promise says many; and the other way round
        (8, [2, 1, 0], {"max_q_len": 5}, None),
        (8, [3, 3, 3], {"max_q_len": 2}, 16),
        (17, None, {}, None),
        (16, [2, 2, 2], {}, None),
        (8, [2, 2, 2], {"schedule": "split"}, None),
        (8, [2, 2, 2], {"num_kv_splits": 1}, None),
    ],
    ids=str,
)  # fmt: skip
def test_which_calls_have_few_rows(
    num_heads: int, q_lens: list[int] | None, options: dict[str, Any], rows: int | None
) -> None:
    assert GLUON_FEW_HEADS_CONFIG.block_rows == (ROWS,)
    args = args_of(make_call([70, 0, 130], q_lens, num_heads), **options)
    assert choice.few_heads_rows(args, args.problem(), 132) == rows


@pytest.mark.parametrize("pair", [False, True])
def test_the_kernel_gets_each_argument_in_its_place(pair: bool) -> None:
    call = arguments(make_batch([70, 0, 130], [2, 1, 3], num_heads=7), device="cpu", poison="finite")
    if pair:
        call["q"] = tuple(part.contiguous() for part in call["q"].split([RANK, ROPE], -1))
    args = args_of(call)
    layout = few_heads.layout_of(132, ROWS)
    parts = layout.carve(None, torch.device("cpu"))
    out, lse = torch.empty(6, 7, RANK, dtype=torch.bfloat16), torch.empty(7, 6).t()
    problem = args.problem()
    given = few_heads.decode_arguments(args, problem, layout, parts, query_rows(args, None), out, lse)
    constants = few_heads.decode_constants(args, problem, ROWS)
    names = decode_few_heads.arg_names
    assert names[len(given) :] == list(constants)
    found = dict(zip(names, given, strict=False))
    widths, pages = ((RANK, ROPE) if pair else (576, 576)), call["kv_cache"].shape[0]
    for name, shape, block in (
        ("q_desc", [42, widths[0]], [ROWS, RANK]),
        ("q_rope_desc", [42, widths[1]], [ROWS, ROPE]),
        ("latent_desc", [pages * 64, 576], [64, RANK]),
        ("rope_desc", [pages * 64, 576], [64, ROPE]),
    ):
        descriptor = found[name]
        assert (descriptor.shape, descriptor.strides) == (shape, [shape[1], 1]), name
        assert (descriptor.block_shape, descriptor.layout) == (block, TILE), name
    assert found["q_rope_column"] == (0 if pair else RANK)
    assert (found["rows_per_page"], found["num_pages"]) == (64, pages)
    assert (found["num_seqs"], found["num_tokens"], found["even_q_len"]) == (3, 6, 0)
    assert found["capacity"] == 64 * call["block_table"].shape[1]
    assert (found["out_token_stride"], found["out_head_stride"]) == (7 * RANK, RANK)
    assert (found["lse_token_stride"], found["lse_head_stride"]) == (1, 6)
    assert found["block_table_stride"] == call["block_table"].shape[1]
    for name in ("block_table", "seq_lens", "cu_seqlens_q"):
        assert found[name] is call[name]
    for name in ("partial_out", "partial_lse", "flags"):
        assert found[name] is getattr(parts, name)
    # all that the launch is handed is the call's or begins in its workspace, so it can be repeated
    assert [part for part, _ in parts.views] == [parts.flags, parts.partial_lse, parts.partial_out]


def test_a_program_for_each_compute_unit_and_no_more_than_it_has_flags_for() -> None:
    assert few_heads.layout_of(132, ROWS).programs == 132
    assert few_heads.layout_of(300, ROWS).programs == 256
    layout = few_heads.layout_of(3, ROWS)
    assert layout.num_bytes == 6 * (3 * 8 + ROWS * 4 + ROWS * RANK * 4) + 16


def test_a_workspace_that_is_too_small_or_cannot_hold_flags_is_refused() -> None:
    layout = few_heads.layout_of(3, ROWS)
    size = layout.num_bytes
    layout.carve(torch.zeros(size, dtype=torch.uint8), torch.device("cpu"))
    with pytest.raises(InvalidArgument, match=f"at least {size} bytes"):
        layout.carve(torch.zeros(size - 1, dtype=torch.uint8), torch.device("cpu"))
    odd = torch.frombuffer(bytearray(size + 64), dtype=torch.uint8)
    odd = torch.frombuffer(bytearray(size + 64), dtype=torch.uint8, offset=-odd.data_ptr() % 8 + 4)
    assert odd.untyped_storage().data_ptr() % 8 == 4
    with pytest.raises(InvalidArgument, match="multiple of 8 bytes"):
        layout.carve(odd, torch.device("cpu"))


def wide(call: dict[str, Any], columns: int) -> dict[str, Any]:
    """The call with a table of so many columns, all of them the same memory."""
    return call | {"block_table": call["block_table"][:, :1].expand(-1, columns)}


def test_tables_that_name_more_tiles_than_the_kernel_counts_go_to_triton_or_are_refused() -> None:
    call = make_call([70, 0, 130], None, 16) | {"cu_seqlens_q": None}
    units = torch.get_num_threads()
    # 3 row tiles, and one more for each program
    fits = 2**22 * units // (3 + units) - 1
    assert backend_for(args_of(wide(call, fits)), args_of(call).problem(), H200, None) == "gluon"
    large = args_of(wide(call, 2 * fits))
    assert backend_for(large, large.problem(), H200, None) == "triton"
    with pytest.raises(Unsupported) as caught:
        backend_for(large, large.problem(), H200, "gluon")
    (refusal,) = caught.value.refusals
    assert (refusal.backend, refusal.code, refusal.argument) == ("gluon", "num_tiles", "block_table")
    # with more rows than 16 in some sequence, the kernel for many rows takes it
    ragged = args_of(wide(make_call([70, 0, 130], [1, 0, 1], 16), 2**30))
    assert choice.few_heads_rows(ragged, ragged.problem(), 132) is None
    assert gluon.refuses_tensors(ragged) is None


def test_a_workspace_is_large_enough_for_either_kernel() -> None:
    call = make_call([70, 0, 130], [1, 2, 1], 8)
    problem, bounds = problem_of(call, 2)
    size = gluon.workspace_size(problem, bounds, H200)
    assert size >= few_heads.layout_of(132, ROWS).num_bytes + call["q"].numel() * 2
    assert DEVICE.type == "cuda" or size >= 2 * 132 * 64 * RANK * 4
