"""A stand-in for either kernel in plain torch, which reads its arguments as the kernels do."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from gluon_backend import RANK, ROPE
from torch import Tensor

from pagedmla.kernels.gluon.few_heads.kernel import decode_few_heads
from pagedmla.kernels.gluon.many_heads.kernel import decode_many_heads

LN2 = 0.6931471805599453
KERNELS = {"few_heads": decode_few_heads, "many_heads": decode_many_heads}
# of the states in a workspace
SHAPES = {"few_heads": (16, 512), "many_heads": (64, 256)}


class StandIn:
    """A sequence after the other, in float32; keeps what it was launched with in ``seen``."""

    def __init__(self, kernel: str, seen: list[SimpleNamespace]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self._launch, grid[0])

    def _launch(
        self, programs: int, *given: Any, num_warps: int, launch_cooperative_grid: bool, **constants: Any
    ) -> None:
        assert num_warps == 4
        assert launch_cooperative_grid
        names = KERNELS[self.kernel].arg_names
        assert names[len(given) :] == list(constants)
        a = SimpleNamespace(**dict(zip(names, given, strict=False)), **constants)
        a.kernel, a.programs = self.kernel, programs
        self.seen.append(a)
        self._spoil(a, programs)
        begin = 0
        for sequence in range(a.num_seqs + 1):
            end = a.even_q_len * (sequence + 1)
            if a.RAGGED:
                end = int(a.cu_seqlens_q[sequence + 1]) if sequence < a.num_seqs else a.num_tokens
            if sequence < a.num_seqs or a.RAGGED:
                self._sequence(a, sequence, begin, end)
            begin = end

    @staticmethod
    def _spoil(a: Any, programs: int) -> None:
        """Writes all that a launch may of its workspace: two slots of a row tile for each program, and flags."""
        rows, columns = SHAPES[a.kernel]
        lanes = 1 if a.kernel == "few_heads" else a.LANES
        assert programs % lanes == 0
        numbers = 2 * programs * rows
        # of the many-heads kernel each of two warpgroups has a half of the values, and slots of its own
        halves = RANK // columns
        flags = 2 * halves * programs * (programs // lanes)
        sizes = ((a.partial_out, numbers * RANK), (a.partial_lse, halves * numbers), (a.flags, flags))
        for part, size in sizes:
            assert part.numel() == size
            assert part.data_ptr() % 16 == 0
            part.fill_(-1)
        assert a.flags.dtype == torch.int64

    @staticmethod
    def _sequence(a: Any, sequence: int, begin: int, end: int) -> None:
        rows = torch.arange(begin * a.NUM_HEADS, end * a.NUM_HEADS)
        kv_len = min(int(a.seq_lens[sequence]), a.capacity) if sequence < a.num_seqs else 0
        keys = torch.arange(kv_len)
        pages = a.block_table[sequence, keys // a.PAGE_SIZE].long() if kv_len else keys
        tokens = pages * a.rows_per_page + keys % a.PAGE_SIZE
        if a.kernel == "few_heads":
            latent, rope = (
                _rows(a.q, 0, a.q_token_chunks, a.q_head_chunks, RANK, a, rows),
                _rows(a.q_rope, a.q_rope_column, a.q_rope_token_chunks, a.q_rope_head_chunks, ROPE, a, rows),
            )
            cache = a.kv_cache.as_strided(
                (int(tokens.max()) + 1 if kv_len else 0, RANK + ROPE),
                (8 * a.token_chunks, 1),
                a.kv_cache.storage_offset(),
            )
            values, k_rope = cache[tokens].float().split([RANK, ROPE], 1)
        else:
            latent, rope = (
                _columns(a.q_desc, rows, 0, RANK),
                _columns(a.q_rope_desc, rows, a.q_rope_column, ROPE),
            )
            values, k_rope = (
                _columns(a.latent_desc, tokens, 0, RANK),
                _columns(a.rope_desc, tokens, RANK, ROPE),
            )
        s = latent @ values.T + rope @ k_rope.T
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


def _rows(
    q: Tensor, column: int, token_chunks: int, head_chunks: int, count: int, a: Any, rows: Tensor
) -> Tensor:
    """Some columns of query rows that threads find by the strides of tokens and heads, in 16 bytes."""
    sizes = (a.num_tokens, a.NUM_HEADS, count)
    found = q.as_strided(sizes, (8 * token_chunks, 8 * head_chunks, 1), q.storage_offset() + column)
    return found[rows // a.NUM_HEADS, rows % a.NUM_HEADS].float()


def _columns(descriptor: Any, rows: Tensor, first: int, count: int) -> Tensor:
    """Some columns of some rows of a descriptor's matrix, as blocks of its width would bring them."""
    assert count % descriptor.block_shape[1] == 0
    matrix = descriptor.base.as_strided(
        descriptor.shape, descriptor.strides, descriptor.base.storage_offset()
    )
    return matrix[rows, first : first + count].float()
