"""The tensors of a shape, and the float64 answer for a few of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pagedmla.bench.shapes import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM, DecodeShape
from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.target import Target

SOFTMAX_SCALE = (128 + 64) ** -0.5
"""DeepSeek-V3's head size before absorption; standard normal data then gives scores a spread of sqrt(576 / 192) = 1.7 nats."""


READ_PAGE = 64
"""Tokens a page of what the page reader reads."""


@dataclass(frozen=True)
class DecodeBatch:
    """One shape on one device: random numbers in pages that are permuted over a pool of just these pages.

    Attributes:
        shape: what it was made from.
        page_size: tokens a page.
        q: [num_tokens, num_heads, 576].
        kv_cache: [num_pages, page_size, 576] of q's dtype; finite everywhere, since peers read past a sequence's end.
        block_table: i32 [num_seqs, max_pages]; 0 past a sequence's end, which every peer may dereference.
        seq_lens: i32 [num_seqs].
    """

    shape: DecodeShape
    page_size: int
    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor

    @property
    def device(self) -> torch.device:
        """Where everything lives."""
        return self.q.device

    @cached_property
    def target(self) -> Target:
        """The device as the support table sees it."""
        return Target.detect(self.device)

    @property
    def q_by_sequence(self) -> Tensor:
        """[num_seqs, q_len, num_heads, 576], a view."""
        return self.q.view(self.shape.num_seqs, self.shape.q_len, self.shape.num_heads, HEAD_DIM_QK)

    @property
    def num_pages_of(self) -> tuple[int, ...]:
        """Pages of each sequence."""
        return tuple(-(-length // self.page_size) for length in self.shape.seq_lens)

    def live_pages(self) -> Tensor:
        """i32 [pages of all sequences], the physical pages in the order in which a decode meets them."""
        return torch.cat([self.block_table[index, :count] for index, count in enumerate(self.num_pages_of)])

    def read_pages(self) -> tuple[Tensor, Tensor]:
        """The batch's bytes as the page reader takes them: a pool [n, 64, 576] and i32, the pages of it to read.

        Pages of 64 tokens are read in the batch's own order.  A pool of other pages is read as if it had pages of 64, permuted:
        the same bytes, short of a rest of less than 64 tokens, in pieces that nobody reads faster.
        """
        if self.page_size == READ_PAGE:
            return self.kv_cache, self.live_pages()
        whole = self.kv_cache.flatten(0, 1)
        count = whole.shape[0] // READ_PAGE
        pool = whole[: count * READ_PAGE].view(count, READ_PAGE, HEAD_DIM_QK)
        generator = torch.Generator(self.device).manual_seed(0)
        return pool, torch.randperm(count, generator=generator, device=self.device).to(torch.int32)

    def starts(self, counts: Sequence[int]) -> Tensor:
        """i32 [num_seqs + 1]: where each sequence's share of ``counts`` begins."""
        return torch.tensor([0, *counts], device=self.device).cumsum(0).to(torch.int32)

    def problem(self, schedule: str | None = None) -> DecodeProblem:
        """The static half of its decode call."""
        return problem_of(self.shape, self.page_size, self.q.dtype, schedule)

    def bounds(self) -> BatchBounds:
        """Capacities that just fit it."""
        return BatchBounds(self.shape.num_seqs, self.block_table.shape[1], self.shape.num_tokens)


def problem_of(
    shape: DecodeShape, page_size: int, dtype: torch.dtype, schedule: str | None = None
) -> DecodeProblem:
    """The static half of a decode of ``shape``, queries and cache both of ``dtype``.

    ``page_size`` in tokens, for a shape that names none.
    """
    return DecodeProblem(
        num_heads=shape.num_heads,
        softmax_scale=SOFTMAX_SCALE,
        kv_lora_rank=KV_LORA_RANK,
        qk_rope_head_dim=QK_ROPE_HEAD_DIM,
        page_size=shape.page_size or page_size,
        q_dtype=dtype,
        kv_layout=layout_of_dtype(dtype).name,
        max_q_len=shape.q_len,
        schedule=schedule,
    )


def build_batch(
    shape: DecodeShape, page_size: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> DecodeBatch:
    """Fills the tensors of ``shape`` with standard normal numbers.

    Args:
        shape: lengths, heads, query tokens.
        page_size: tokens a page, for a shape that names none.
        dtype: of queries and cache; 2 or 4 bytes.
        device: where to.
        seed: of the numbers and of the permutation.
    """
    page_size = shape.page_size or page_size
    generator = torch.Generator(device).manual_seed(seed)
    counts = [-(-length // page_size) for length in shape.seq_lens]
    pages = torch.randperm(sum(counts), generator=generator, device=device).to(torch.int32)
    block_table = torch.zeros(shape.num_seqs, max(counts), dtype=torch.int32, device=device)
    for index, own in enumerate(pages.split(counts)):
        block_table[index, : own.numel()] = own
    sizes = {"q": (shape.num_tokens, shape.num_heads), "kv_cache": (sum(counts), page_size)}
    drawn = {
        name: torch.empty(*size, HEAD_DIM_QK, dtype=dtype, device=device).normal_(generator=generator)
        for name, size in sizes.items()
    }
    return DecodeBatch(
        shape=shape,
        page_size=page_size,
        q=drawn["q"],
        kv_cache=drawn["kv_cache"],
        block_table=block_table,
        seq_lens=torch.tensor(shape.seq_lens, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class ExpectedSequence:
    """The float64 answer for one whole sequence.

    Attributes:
        sequence: its index.
        out: f64 [q_len, num_heads, 512].
        lse: f64 [q_len, num_heads], natural logarithm.
    """

    sequence: int
    out: Tensor
    lse: Tensor


def expected_sequences(batch: DecodeBatch) -> tuple[ExpectedSequence, ...]:
    """The answers for the first, the last, the shortest and the longest sequence, made on the batch's device.

    Apart from ``pagedmla.reference``, which works on the CPU: a row of 131,072 keys and 128 heads would take it minutes.
    tests/bench holds the two against each other.
    """
    lengths = batch.shape.seq_lens
    chosen = {0, len(lengths) - 1, lengths.index(min(lengths)), lengths.index(max(lengths))}
    return tuple(_expected_sequence(batch, index) for index in sorted(chosen))


def _expected_sequence(batch: DecodeBatch, index: int) -> ExpectedSequence:
    length, q_len = batch.shape.seq_lens[index], batch.shape.q_len
    pages = batch.block_table[index, : batch.num_pages_of[index]].long()
    keys = batch.kv_cache[pages].flatten(0, 1)[:length].double()
    scores = SOFTMAX_SCALE * (batch.q_by_sequence[index].double() @ keys.T)
    # query j of n sees keys 0 .. length - n + j
    last_seen = torch.arange(length - q_len, length, device=batch.device)
    hidden = torch.arange(length, device=batch.device) > last_seen[:, None]
    scores.masked_fill_(hidden[:, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    seen = lse != float("-inf")
    weights = torch.where(seen[..., None], torch.exp(scores - lse[..., None]), 0.0)
    return ExpectedSequence(index, weights @ keys[:, :KV_LORA_RANK], lse)
