"""The launch on a CPU: plan and merge interpreted in the kernel's tiles, and a stand-in for the kernel in plain torch.

The stand-in reads its arguments as the kernel does: descriptors, segments, places.  So these values show that the launch says
the right thing; that the kernel does it, only a card can show.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_backend import (
    DEVICE,
    MODES,
    ON_HOPPER,
    PAIR,
    RANK,
    ROPE,
    SPLITS,
    arguments,
    check,
    is_zero,
    make_batch,
    problem_of,
    rows_of,
)
from torch import Tensor

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.target import KNOWN_TARGETS
from pagedmla.kernels import gluon
from pagedmla.kernels.gluon import launch
from pagedmla.kernels.gluon.many_heads import decode_many_heads

pytestmark = pytest.mark.skipif(
    ON_HOPPER, reason="the plan is interpreted on a CPU; a card runs the kernel itself"
)

ROWS, HALF = 64, 256
SMALL = replace(KNOWN_TARGETS["sm_90"], compute_units=3)


class StandIn:
    """A program after the other, a segment after the other, in float32."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self._launch, grid[0])

    def _launch(self, programs: int, *given: Any, num_warps: int, **constants: Any) -> None:
        assert num_warps == 4
        a = SimpleNamespace(**dict(zip(decode_many_heads.arg_names, given, strict=False)), **constants)
        shares = a.shares.view(-1, 2).tolist()
        assert len(shares) == programs
        for first, end in shares:
            for segment in a.segments.view(-1, 8)[first:end].tolist():
                self._segment(a, *segment)

    @staticmethod
    def _segment(
        a: Any,
        sequence: int,
        row_tile: int,
        begin: int,
        end: int,
        slot: int,
        pieces: int,
        q_begin: int,
        q_len: int,
    ) -> None:
        in_tile = torch.arange(ROWS)
        rows = row_tile * ROWS + in_tile
        in_tile, rows = in_tile[rows < q_len * a.NUM_HEADS], rows[rows < q_len * a.NUM_HEADS]
        kv_len = min(max(int(a.seq_lens[sequence]), 0), a.capacity) if sequence < a.num_seqs else 0
        keys = torch.arange(begin * PAIR, max(begin * PAIR, min(end * PAIR, kv_len)))
        pages = a.block_table[sequence, keys // a.PAGE_SIZE].long() if len(keys) else keys
        tokens = pages * a.rows_per_page + keys % a.PAGE_SIZE
        q_rows = q_begin * a.NUM_HEADS + rows
        values = _columns(a.latent_desc, tokens, 0, RANK)
        s = _columns(a.q_desc, q_rows, 0, RANK) @ values.T
        s += (
            _columns(a.q_rope_desc, q_rows, a.q_rope_column, ROPE)
            @ _columns(a.rope_desc, tokens, RANK, ROPE).T
        )
        s *= a.scale_log2
        token = q_begin + rows // a.NUM_HEADS
        if a.CAUSAL:
            # a broken key breaks the rows that see it, and no others: 0 * nan is nan
            s[~s.isfinite()], values[~values.isfinite()] = torch.nan, 0.0
            s[keys[None, :] >= (kv_len - q_len + rows // a.NUM_HEADS + 1)[:, None]] = -torch.inf
        if a.RAGGED:
            s[token < int(a.cu_seqlens_q[0])] = -torch.inf
        lse2 = torch.logsumexp(s * 0.6931471805599453, 1) / 0.6931471805599453
        out = torch.exp2(s - torch.where(lse2 == -torch.inf, 0.0, lse2)[:, None]) @ values
        if pieces == 1:
            a.out[token, rows % a.NUM_HEADS] = out.to(a.out.dtype)
            a.lse[token, rows % a.NUM_HEADS] = lse2 * 0.6931471805599453
        else:
            a.partial_out.view(-1, ROWS, RANK)[slot, in_tile] = out if len(keys) else torch.nan
            a.partial_lse.view(-1, ROWS)[slot, in_tile] = lse2


def _columns(descriptor: Any, rows: Tensor, first: int, count: int) -> Tensor:
    """Some columns of some rows of a descriptor's matrix, as blocks of its width would bring them."""
    assert count % descriptor.block_shape[1] == 0
    base = descriptor.base
    matrix = base.as_strided(descriptor.shape, descriptor.strides, base.storage_offset())
    return matrix[rows, first : first + count].float()


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "decode_many_heads", StandIn())
    # three workers: shares cross the borders of sequences, and row tiles are cut
    monkeypatch.setattr(launch, "Target", SimpleNamespace(detect=lambda device: SMALL))


def make_call(
    lens: list[int], q_lens: list[int], num_heads: int, page_size: int = 64, **layout: Any
) -> dict[str, Any]:
    """fp16: the interpreter truncates to bf16."""
    return arguments(
        make_batch(lens, q_lens, num_heads=num_heads, q_dtype=torch.float16), page_size, **layout
    )


def run(call: dict[str, Any], out: Tensor | None = None, lse: Tensor | None = None, **options: Any) -> Any:
    given = {name: value for name, value in (call | options).items() if name not in ("q_scale", "kv_scale")}
    q = given.pop("q")
    q, q_pe = q if isinstance(q, tuple) else (q, None)
    args = DecodeArguments(q=q, q_pe=q_pe, **given)
    if out is None:
        out = torch.full((*q.shape[:2], RANK), torch.nan, dtype=q.dtype)
    if lse is None:
        lse = torch.full(q.shape[:2], torch.nan)
    gluon.decode(args, args.problem(), out, lse)
    return out, lse


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("num_heads", [20, 96])
def test_ragged_queries_and_empty_sequences(num_heads: int, mode: dict[str, Any]) -> None:
    call = make_call([300, 0, 1, 129, 64], [2, 1, 3, 0, 4], num_heads)
    check(run(call, **mode), call)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_one_query_token_and_pages_of_three_blocks(mode: dict[str, Any]) -> None:
    call = make_call([700, 191, 192, 193], [1] * 4, 17, 192)
    check(run(call | {"cu_seqlens_q": None}, **mode), call)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_rows_before_the_first_query_and_after_the_last_are_nobodys(mode: dict[str, Any]) -> None:
    call = make_call([200, 3], [2, 1], 40)
    padding = torch.full_like(call["q"][:2], torch.nan)
    padded = call | {"q": torch.cat([padding, call["q"], padding]), "cu_seqlens_q": call["cu_seqlens_q"] + 2}
    result = run(padded, **mode)
    check(result, padded)
    for rows in (slice(0, 2), slice(5, None)):
        assert is_zero(rows_of(result, rows))


def test_queries_that_must_be_copied_into_a_workspace_of_the_exact_size() -> None:
    call = make_call([300, 0, 140], [2, 2, 2], 24)
    problem, bounds = problem_of(call, 2)
    size = gluon.workspace_size(problem, bounds, SMALL)
    for q in (
        call["q"].transpose(0, 1).contiguous().transpose(0, 1),
        tuple(
            part.transpose(0, 1).contiguous().transpose(0, 1) for part in call["q"].split([RANK, ROPE], -1)
        ),
        call["q"].split([RANK, ROPE], -1),
    ):
        for start in (64, 65):
            storage = torch.full((size + 130,), 0xA5, dtype=torch.uint8, device=DEVICE)
            workspace = storage[start : start + size].fill_(0xFF)
            check(run(call | {"q": q}, workspace=workspace, max_q_len=2), call)
            assert bool((storage[:start] == 0xA5).all() & (storage[start + size :] == 0xA5).all())


def test_strided_outputs_and_a_layer_of_a_pool() -> None:
    call = make_call([300, 5], [1, 2], 20)
    call["kv_cache"] = torch.stack([torch.full_like(call["kv_cache"], torch.nan), call["kv_cache"]], 1)[:, 1]
    out = torch.full((20, 3, RANK + 8), -768.0, dtype=torch.float16).transpose(0, 1)
    lse = torch.full((20, 3), -768.0).t()
    check(run(call, out=out[..., :RANK], lse=lse, **SPLITS), call)
    assert bool((out[..., RANK:] == -768).all())


def test_the_stand_in_can_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of the cache too far from page to page: the check says so, and where."""
    call = make_call([300, 5], [1, 2], 20)
    right = launch.cache_rows
    monkeypatch.setattr(launch, "cache_rows", lambda cache: (right(cache)[0], 65))
    with pytest.raises(AssertionError, match=r"sequence 0 \(1 queries, 300 keys\): wrong in the left half"):
        check(run(call), call)
