"""One batch in plain numbers: what a property draws, what ``builder.build`` makes tensors from, what a reproducer prints."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
"""Short names, as in the names of cases and of cache layouts."""


@dataclass(frozen=True)
class BatchSpec:
    """A batch, its layout in pages, and what lies around it.

    Attributes:
        seq_lens: keys of each sequence, in tokens, this step's included.
        q_lens: query tokens of each sequence; None: one each.
        num_heads: query heads.
        kv_lora_rank: latent numbers of a cached token, which are also its value.
        qk_rope_head_dim: rotated numbers of a cached token.
        page_size: tokens in a page.
        dtype: of queries, a key of ``DTYPES``.
        kv_dtype: of the cache; None: that of the queries.
        causal: query j of n sees keys 0 .. seq_len - n + j; otherwise every key.
        softmax_scale: multiplies the scores; far from 576 ** -0.5, so that a guess shows.
        spread: standard deviation of the scores, in nats.
        peak: key (counted modulo the length) that every query's scores are raised for, or None.
        peak_nats: by how much, in nats.
        seed: of the live numbers; a sequence's depend on (seed, its id) alone.
        ids: identity of each sequence, so that the same one can stand in two batches; None: 0, 1, 2, ...
        layout_seed: of the permutation of physical pages.
        poison: what fills the memory that nobody owns, see ``inputs.POISONS``.
        spare_pages: pages of the pool that no sequence has.
        spare_columns: columns of the table past the longest sequence's pages.
        rows_before, rows_after: query rows of no sequence, before and after the others; they need ``cu_seqlens_q``.
    """

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    num_heads: int = 16
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    page_size: int = 64
    dtype: str = "bf16"
    kv_dtype: str | None = None
    causal: bool = True
    softmax_scale: float = 0.13
    spread: float = 1.7
    peak: int | None = None
    peak_nats: float = 20.0
    seed: int = 0
    ids: tuple[int, ...] | None = None
    layout_seed: int = 0
    poison: str = "nan"
    spare_pages: int = 4
    spare_columns: int = 2
    rows_before: int = 0
    rows_after: int = 0

    @property
    def query_counts(self) -> tuple[int, ...]:
        """Query tokens of each sequence."""
        return (1,) * len(self.seq_lens) if self.q_lens is None else self.q_lens

    @property
    def ragged(self) -> bool:
        """Whether the batch needs ``cu_seqlens_q``: sequences differ in query tokens, or rows belong to nobody."""
        return len(set(self.query_counts)) > 1 or bool(self.rows_before or self.rows_after)

    @property
    def starts(self) -> tuple[int, ...]:
        """``cu_seqlens_q``: the first query row of each sequence, and the end."""
        return tuple(accumulate(self.query_counts, initial=self.rows_before))

    @property
    def q_dtype(self) -> torch.dtype:
        """dtype of the queries."""
        return DTYPES[self.dtype]

    @property
    def cache_dtype(self) -> torch.dtype:
        """dtype of the cache."""
        return DTYPES[self.kv_dtype or self.dtype]

    @property
    def head_dim_qk(self) -> int:
        """Numbers of a query row and of a cached token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def __str__(self) -> str:
        """The arguments of ``build`` that differ from its defaults, as Python."""
        given = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return ", ".join(f"{name}={value!r}" for name, value, default in given if value != default)
