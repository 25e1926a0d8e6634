"""Builds the tensors of a batch: permuted pages, and poison wherever a kernel must not look.

A property lays ONE logical batch out in several ways and compares: a result may depend on the batch, never on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagedmla.conformance.inputs import KV_SCALE, Q_SCALE, poison_tensor, store
from pagedmla.conformance.spec import BatchSpec

GARBAGE_CELLS = (-1, 2**31 - 1, 0, -(2**31), 1)
"""What engines leave in cells past a sequence's end: padding, garbage, and pages that are somebody else's."""


@dataclass(frozen=True)
class Call:
    """The tensors of one decode call, in the contract's terms.

    Attributes:
        q: [T, H, head_dim_qk].
        kv_cache: [num_pages, page_size, head_dim_qk].
        block_table: i32 [num_seqs, max_pages].
        seq_lens: i32 [num_seqs].
        cu_seqlens_q: i32 [num_seqs + 1], or None for an even batch.
        softmax_scale, causal, kv_lora_rank: as in ``pagedmla.decode``.
        q_scale, kv_scale: floats for fp8 tensors, None for others.
        spec: what it was built from.
    """

    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    softmax_scale: float
    causal: bool
    kv_lora_rank: int
    q_scale: float | None
    kv_scale: float | None
    spec: BatchSpec

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.kv_cache.shape[1]

    @property
    def q_latent(self) -> Tensor:
        """The queries' latent part, a view: [T, H, kv_lora_rank]."""
        return self.q[..., : self.kv_lora_rank]

    @property
    def q_rope(self) -> Tensor:
        """The queries' rotated part, a view: [T, H, qk_rope_head_dim]."""
        return self.q[..., self.kv_lora_rank :]

    def csr(self) -> tuple[Tensor, Tensor, Tensor]:
        """(kv_indptr i32 [num_seqs + 1], kv_indices i32 [pages], kv_last_page_len i32 [num_seqs]) of the block table.

        An empty sequence has no pages; its last page is said to hold 0 tokens.
        """
        lens = self.seq_lens.tolist()
        counts = [-(-length // self.page_size) for length in lens]
        pages = [self.block_table[row, :count] for row, count in enumerate(counts)]
        device = self.seq_lens.device
        starts = torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)
        last = [
            length - (count - 1) * self.page_size if count else 0
            for length, count in zip(lens, counts, strict=True)
        ]
        indices = torch.cat(pages) if pages else torch.empty(0, dtype=torch.int32, device=device)
        return starts, indices, torch.tensor(last, dtype=torch.int32, device=device)

    def semantics(self) -> dict[str, object]:
        """What decides the values, as keyword arguments of ``pagedmla.decode`` and of the oracle."""
        names = ("softmax_scale", "cu_seqlens_q", "causal", "kv_lora_rank", "q_scale", "kv_scale")
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device | str) -> Call:
        """The same call on ``device``."""
        return replace(
            self,
            q=self.q.to(device),
            kv_cache=self.kv_cache.to(device),
            block_table=self.block_table.to(device),
            seq_lens=self.seq_lens.to(device),
            cu_seqlens_q=None if self.cu_seqlens_q is None else self.cu_seqlens_q.to(device),
        )


@dataclass(frozen=True)
class Batch:
    """A batch without its pages.

    Attributes:
        queries: of each sequence, [q_len, H, head_dim_qk].
        tokens: of each sequence, [length, head_dim_qk] in the cache's dtype.
    """

    queries: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]


def build(seq_lens: Sequence[int], *, device: torch.device | str = "cpu", **fields_of_spec: object) -> Call:
    """The call that ``BatchSpec(seq_lens, **fields_of_spec)`` describes, on ``device``."""
    spec = BatchSpec(tuple(seq_lens), **fields_of_spec)  # type: ignore[arg-type]
    return build_spec(spec, device)


def build_spec(spec: BatchSpec, device: torch.device | str = "cpu") -> Call:
    """The call that ``spec`` describes, on ``device``."""
    return lay_out(draw_batch(spec), spec, device)


def draw_batch(spec: BatchSpec) -> Batch:
    """The live numbers: independent normal ones, of which the scores have the wanted spread and peak."""
    size = spec.spread / (spec.softmax_scale * math.sqrt(spec.head_dim_qk))
    ids = range(len(spec.seq_lens)) if spec.ids is None else spec.ids
    queries, tokens = [], []
    for identity, length, q_len in zip(ids, spec.seq_lens, spec.query_counts, strict=True):
        # a large odd factor keeps (seed, id) pairs apart; queries have a stream of their own, so that neither
        # depends on how many the other has
        base = spec.seed * 1_000_003 + 2 * identity
        keys = _normal(base, length, spec.head_dim_qk)
        rows = size * _normal(base + 1, q_len, spec.num_heads, spec.head_dim_qk)
        if spec.peak is not None and length:
            rows = rows + _towards(keys[spec.peak % length], spec)
        queries.append(store(rows, spec.q_dtype, Q_SCALE))
        tokens.append(store(keys, spec.cache_dtype, KV_SCALE))
    return Batch(tuple(queries), tuple(tokens))


def lay_out(batch: Batch, spec: BatchSpec, device: torch.device | str = "cpu") -> Call:
    """Puts ``batch`` into permuted pages, with poison around it.

    Rows that see no key hold poison too: nothing of them may matter.
    """
    generator = torch.Generator().manual_seed(spec.layout_seed)
    poison = torch.Generator().manual_seed(spec.layout_seed + 1_000_003)
    counts = [-(-length // spec.page_size) for length in spec.seq_lens]
    num_pages = max(1, sum(counts) + spec.spare_pages)
    cache = poison_tensor(
        (num_pages, spec.page_size, spec.head_dim_qk), spec.cache_dtype, spec.poison, poison
    )
    table = torch.empty(len(counts), max(counts, default=0) + spec.spare_columns, dtype=torch.int32)
    garbage = torch.tensor(GARBAGE_CELLS, dtype=torch.int32)
    table.view(-1)[:] = garbage.repeat(table.numel())[: table.numel()]
    pages = iter(torch.randperm(num_pages, generator=generator).tolist())
    for sequence, tokens in enumerate(batch.tokens):
        for column, chunk in enumerate(tokens.split(spec.page_size) if len(tokens) else ()):
            page = next(pages)
            table[sequence, column] = page
            cache[page, : len(chunk)] = chunk
    starts = spec.starts
    shape = (starts[-1] + spec.rows_after, spec.num_heads, spec.head_dim_qk)
    q = poison_tensor(shape, spec.q_dtype, spec.poison, poison)
    for start, rows, length in zip(starts[:-1], batch.queries, spec.seq_lens, strict=True):
        blind = max(0, len(rows) - length) if spec.causal or length == 0 else 0
        q[start + blind : start + len(rows)] = rows[blind:]
    call = Call(
        q=q,
        kv_cache=cache,
        block_table=table,
        seq_lens=torch.tensor(spec.seq_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32) if spec.ragged else None,
        softmax_scale=spec.softmax_scale,
        causal=spec.causal,
        kv_lora_rank=spec.kv_lora_rank,
        q_scale=Q_SCALE if spec.q_dtype.itemsize == 1 else None,
        kv_scale=KV_SCALE if spec.cache_dtype.itemsize == 1 else None,
        spec=spec,
    )
    return call.to(device)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def _towards(key: Tensor, spec: BatchSpec) -> Tensor:
    """What is added to a query so that its score of ``key`` rises by ``peak_nats``."""
    return key * (spec.peak_nats / (spec.softmax_scale * key.square().sum()))
