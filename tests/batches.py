"""Logical batches (rows of queries, rows of tokens) and the many ways of laying them out in pages.

A property test takes ONE logical batch, calls the decode with two layouts of it and compares: what a kernel may depend on
is the batch, never the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import pagedmla
from pagedmla.conformance import numerics
from pagedmla.conformance.builder import GARBAGE_CELLS
from pagedmla.conformance.inputs import KV_SCALE, Q_SCALE, poison_tensor, store


@dataclass(frozen=True)
class Batch:
    """A batch without its pages.

    Attributes:
        queries: of each sequence, [q_len, H, head_dim_qk].
        tokens: of each sequence, [length, head_dim_qk] in the cache's dtype.
        softmax_scale, kv_lora_rank, causal, q_scale, kv_scale: as for ``pagedmla.decode``.
    """

    queries: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]
    softmax_scale: float
    kv_lora_rank: int
    causal: bool = True
    q_scale: float | Tensor | None = None
    kv_scale: float | Tensor | None = None

    @property
    def seq_lens(self) -> list[int]:
        """Keys of each sequence."""
        return [tokens.shape[0] for tokens in self.tokens]

    @property
    def q_lens(self) -> list[int]:
        """Query tokens of each sequence."""
        return [queries.shape[0] for queries in self.queries]

    def rows(self, sequence: int) -> slice:
        """The rows of the packed result that belong to ``sequence``."""
        starts = list(accumulate(self.q_lens, initial=0))
        return slice(starts[sequence], starts[sequence + 1])

    def take(self, sequences: Sequence[int]) -> Batch:
        """The batch of these sequences, in this order."""
        return replace(
            self,
            queries=tuple(self.queries[sequence] for sequence in sequences),
            tokens=tuple(self.tokens[sequence] for sequence in sequences),
        )


def make_batch(
    seq_lens: Sequence[int],
    q_lens: Sequence[int] | None = None,
    *,
    num_heads: int = 4,
    dims: tuple[int, int] = (32, 8),
    q_dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    causal: bool = True,
    spread: float = 1.7,
    seed: int = 0,
) -> Batch:
    """A random batch; ``spread`` is the standard deviation of its scores, in nats."""
    generator = torch.Generator().manual_seed(seed)
    kv_dtype = kv_dtype or q_dtype
    head_dim, softmax_scale = sum(dims), 0.13

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    size = spread / (softmax_scale * head_dim**0.5)
    q_lens = [1] * len(seq_lens) if q_lens is None else q_lens
    return Batch(
        queries=tuple(store(size * normal(n, num_heads, head_dim), q_dtype, Q_SCALE) for n in q_lens),
        tokens=tuple(store(normal(n, head_dim), kv_dtype, KV_SCALE) for n in seq_lens),
        softmax_scale=softmax_scale,
        kv_lora_rank=dims[0],
        causal=causal,
        q_scale=Q_SCALE if q_dtype.itemsize == 1 else None,
        kv_scale=KV_SCALE if kv_dtype.itemsize == 1 else None,
    )


def arguments(
    batch: Batch,
    page_size: int = 16,
    *,
    layout_seed: int = 0,
    poison: str = "nan",
    spare_pages: int = 4,
    spare_columns: int = 2,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Lays ``batch`` out in permuted pages with poison around them; returns the keyword arguments of a decode on ``device``."""
    generator = torch.Generator().manual_seed(layout_seed)
    counts = [-(-length // page_size) for length in batch.seq_lens]
    num_pages = sum(counts) + spare_pages
    head_dim = batch.tokens[0].shape[1]
    cache = poison_tensor((num_pages, page_size, head_dim), batch.tokens[0].dtype, poison, generator)
    table = torch.empty(len(counts), max(counts) + spare_columns, dtype=torch.int32)
    table.view(-1)[:] = torch.tensor(GARBAGE_CELLS, dtype=torch.int32).repeat(table.numel())[: table.numel()]
    pages = iter(torch.randperm(num_pages, generator=generator).tolist())
    for sequence, tokens in enumerate(batch.tokens):
        for column, chunk in enumerate(tokens.split(page_size) if len(tokens) else ()):
            page = next(pages)
            table[sequence, column] = page
            cache[page, : len(chunk)] = chunk
    call: dict[str, Any] = {
        "q": torch.cat(batch.queries),
        "kv_cache": cache,
        "block_table": table,
        "seq_lens": torch.tensor(batch.seq_lens, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor(list(accumulate(batch.q_lens, initial=0)), dtype=torch.int32),
        "softmax_scale": batch.softmax_scale,
        "causal": batch.causal,
        "kv_lora_rank": batch.kv_lora_rank,
        "q_scale": batch.q_scale,
        "kv_scale": batch.kv_scale,
    }
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}


def decode(
    batch: Batch, page_size: int = 16, *, layout: dict[str, Any] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Runs one layout of ``batch``, by the torch backend unless told; ``options`` go to ``pagedmla.decode``."""
    call = arguments(batch, page_size, **(layout or {}))
    return run(call, **options)


def run(call: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """``pagedmla.decode`` with keyword arguments, some of them replaced; the torch backend unless another is named."""
    positional = ("q", "kv_cache", "block_table", "seq_lens")
    merged = {"backend": "torch"} | call | options
    tensors = [merged.pop(name) for name in positional]
    return pagedmla.decode(*tensors, **merged)


def expect(
    call: dict[str, Any], out_dtype: torch.dtype | None = None, p_dtype: torch.dtype = torch.float32
) -> numerics.Expected:
    """The oracle's result for a call, with the bound for softmax weights that are rounded to ``p_dtype``."""
    first = call["q"][0] if isinstance(call["q"], tuple) else call["q"]
    if out_dtype is None:
        out_dtype = torch.bfloat16 if first.dtype.itemsize == 1 else first.dtype
    return numerics.expect(**call, out_dtype=out_dtype, p_dtype=p_dtype)


def check(result: tuple[Tensor, Tensor], call: dict[str, Any], p_dtype: torch.dtype = torch.float32) -> None:
    """Asserts that a result is within the derived bound of the oracle."""
    comparison = numerics.compare(*result, expect(call, p_dtype=p_dtype))
    assert comparison.passed, comparison.detail


def same_bits(one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> bool:
    """Whether results are equal bit for bit, minus zero and nan included."""
    return all(
        a.shape == b.shape and a.dtype == b.dtype and bool((_bits(a) == _bits(b)).all())
        for a, b in zip(one, two, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.dtype.itemsize])
