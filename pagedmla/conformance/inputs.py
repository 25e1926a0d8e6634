"""Inputs that show faults: whatever must not be read is poisoned, whatever must be followed is permuted.

Live numbers depend on the case and the seed alone; the poison is drawn apart, so two kinds of poison around
the same live numbers must give the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from pagedmla.conformance.cases import Case
from pagedmla.contract.problem import DecodeProblem

POISONS = ("nan", "inf", "finite")
"""What fills memory that nobody owns: nan (the nan code in fp8); both infinities (the largest codes in fp8,
which has none); other ordinary data, which only the equality of bits can show."""

GUARD_ROWS = 2
"""Rows before and after ``out`` and ``lse`` in their storage that a kernel must leave alone."""
GUARD_VALUE = -768.0  # exact in every output dtype

# rows of q before the first sequence and past the last one, in ragged cases: what graph padding looks like
_PAD_BEFORE, _PAD_AFTER = 1, 2
# scores with a spread of this many nats: neither flat nor one-hot
_SCORE_SPREAD = 1.7
# a prime, so that no row, page or tile of a kernel meets the pattern in step
_TILE = 8191
# off the powers of two, and large enough that values meet several exponents of an fp8 format
Q_SCALE, KV_SCALE = 0.0523, 0.0371


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call.

    Attributes:
        q: [T, H, head_dim_qk]; rows of no sequence, and rows that see no key, hold poison.
        kv_cache: [num_pages, page_size, head_dim_qk]; everything but the owned tokens holds poison.
        block_table: i32 [num_seqs, max_pages]; cells past a sequence's end hold -1, huge ids, poisoned pages.
        seq_lens: i32 [num_seqs].
        cu_seqlens_q: i32 [num_seqs + 1], or None for an even batch.
        q_scale: for fp8 queries: a float, or f32 of one element.
        kv_scale: for fp8 caches, likewise.
        out_storage: [T + 2 GUARD_ROWS, H, kv_lora_rank], guard rows around a nan-filled view.
        lse_storage: f32 [T + 2 GUARD_ROWS, H], likewise.
    """

    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    q_scale: float | Tensor | None
    kv_scale: float | Tensor | None
    out_storage: Tensor
    lse_storage: Tensor

    @property
    def out(self) -> Tensor:
        """The view that the kernel writes, [T, H, kv_lora_rank]."""
        return self.out_storage[GUARD_ROWS:-GUARD_ROWS]

    @property
    def lse(self) -> Tensor:
        """The view that the kernel writes, f32 [T, H]."""
        return self.lse_storage[GUARD_ROWS:-GUARD_ROWS]

    def guards_intact(self) -> bool:
        """Whether the rows around ``out`` and ``lse`` are as they were."""
        storages = (self.out_storage, self.lse_storage)
        bands = [band for storage in storages for band in (storage[:GUARD_ROWS], storage[-GUARD_ROWS:])]
        return all(bool((band == GUARD_VALUE).all()) for band in bands)

    def semantics(self, problem: DecodeProblem) -> dict[str, object]:
        """The keyword arguments that decide values, which the oracle takes too."""
        return {
            "softmax_scale": problem.softmax_scale,
            "cu_seqlens_q": self.cu_seqlens_q,
            "causal": problem.causal,
            "kv_lora_rank": problem.kv_lora_rank,
            "q_scale": self.q_scale,
            "kv_scale": self.kv_scale,
        }


def build_inputs(case: Case, device: torch.device | str, seed: int, poison: str = "nan") -> Inputs:
    """Builds the tensors of ``case``.

    Args:
        case: what to build.
        device: where the tensors shall live.
        seed: of the live numbers and the page permutation.
        poison: one of ``POISONS``, what fills the rest.
    """
    problem = case.problem
    live = torch.Generator().manual_seed(seed)
    rest = torch.Generator().manual_seed(seed + 1_000_003)
    table, num_pages = _block_table(case, live)
    kv_cache = _cache(case, table, num_pages, live, rest, poison)
    q, cu_seqlens_q = _queries(case, live, rest, poison)
    rows = q.shape[0] + 2 * GUARD_ROWS
    out_storage = torch.full(
        (rows, problem.num_heads, problem.kv_lora_rank), GUARD_VALUE, dtype=problem.out_dtype
    )
    lse_storage = torch.full((rows, problem.num_heads), GUARD_VALUE, dtype=torch.float32)
    for storage in (out_storage, lse_storage):
        storage[GUARD_ROWS:-GUARD_ROWS] = math.nan
    inputs = Inputs(
        q=q,
        kv_cache=kv_cache,
        block_table=_fill_unused_cells(table, num_pages),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32),
        cu_seqlens_q=cu_seqlens_q,
        q_scale=Q_SCALE if problem.q_dtype.itemsize == 1 else None,
        # a float or a tensor: both are in the contract, so both are run
        kv_scale=torch.tensor([KV_SCALE], dtype=torch.float32) if problem.layout.scaled else None,
        out_storage=out_storage,
        lse_storage=lse_storage,
    )
    return _to(inputs, torch.device(device))


def poison_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, poison: str, generator: torch.Generator
) -> Tensor:
    """A CPU tensor of ``dtype`` full of what must never be read.

    Args:
        shape: of the result.
        dtype: floating point, fp8 included.
        poison: one of ``POISONS``.
        generator: for ``finite``.
    """
    size = math.prod(shape)
    tile = _poison_tile(min(size, _TILE), dtype, poison, generator)
    return tile.repeat(-(-size // max(1, len(tile))))[:size].reshape(shape)


def _poison_tile(size: int, dtype: torch.dtype, poison: str, generator: torch.Generator) -> Tensor:
    if poison == "finite":
        return store(5 * torch.randn(size, generator=generator, dtype=torch.float32), dtype, 0.05)
    negative = torch.rand(size, generator=generator, dtype=torch.float32) < 0.5
    if dtype.itemsize > 1:
        value = math.nan if poison == "nan" else math.inf
        return torch.where(negative, -value, value).to(dtype)
    nan_code, largest_code = (0x80, 0x7F) if dtype == torch.float8_e4m3fnuz else (0x7F, 0x7E)
    code = nan_code if poison == "nan" else largest_code
    return torch.where(negative, code | 0x80, code).to(torch.uint8).view(dtype)


def store(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Rounds ``values`` to ``dtype``; an fp8 one is divided by ``scale`` and clamped to its range first."""
    if dtype.itemsize > 1:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return (values / scale).clamp(-largest, largest).to(dtype)


def _block_table(case: Case, generator: torch.Generator) -> tuple[Tensor, int]:
    """i32 [num_seqs, max_pages + 3] with permuted pages and -1 elsewhere, and the pool's number of pages."""
    page_size = case.problem.page_size
    counts = [-(-length // page_size) for length in case.seq_lens]
    num_pages = 2 * sum(counts) + 5
    pages = torch.randperm(num_pages, generator=generator)
    table = torch.full((len(counts), max(counts, default=0) + 3), -1, dtype=torch.int32)
    for sequence, (count, stop) in enumerate(zip(counts, accumulate(counts), strict=True)):
        table[sequence, :count] = pages[stop - count : stop].to(torch.int32)
    return table, num_pages


def _fill_unused_cells(table: Tensor, num_pages: int) -> Tensor:
    """Replaces the -1 of every cell that no sequence owns by what engines leave there."""
    garbage = torch.tensor([-1, 2**31 - 1, num_pages, 0, -(2**31)], dtype=torch.int32)
    cells = torch.arange(table.numel()).reshape(table.shape) % len(garbage)
    return torch.where(table < 0, garbage[cells], table)


def _cache(
    case: Case, table: Tensor, num_pages: int, live: torch.Generator, rest: torch.Generator, poison: str
) -> Tensor:
    problem = case.problem
    dtype, page_size = problem.layout.dtype, problem.page_size
    cache = poison_tensor((num_pages, page_size, problem.head_dim_qk), dtype, poison, rest)
    for sequence, length in enumerate(case.seq_lens):
        values = torch.randn(length, problem.head_dim_qk, generator=live, dtype=torch.float32)
        rows = store(values, dtype, KV_SCALE)
        for start in range(0, length, page_size):
            chunk = rows[start : start + page_size]
            cache[int(table[sequence, start // page_size]), : chunk.shape[0]] = chunk
    return cache


def _queries(
    case: Case, live: torch.Generator, rest: torch.Generator, poison: str
) -> tuple[Tensor, Tensor | None]:
    problem = case.problem
    before, after = (_PAD_BEFORE, _PAD_AFTER) if case.ragged else (0, 0)
    starts = list(accumulate(case.q_lens, initial=before))
    shape = (starts[-1] + after, problem.num_heads, problem.head_dim_qk)
    q = poison_tensor(shape, problem.q_dtype, poison, rest)
    spread = _SCORE_SPREAD / (problem.softmax_scale * math.sqrt(problem.head_dim_qk))
    for start, stop, length in zip(starts, starts[1:], case.seq_lens, strict=False):
        values = spread * torch.randn(stop - start, *shape[1:], generator=live, dtype=torch.float32)
        blind = max(0, stop - start - length) if problem.causal or length == 0 else 0
        q[start + blind : stop] = store(values[blind:], problem.q_dtype, Q_SCALE)
    return q, torch.tensor(starts, dtype=torch.int32) if case.ragged else None


def _to(inputs: Inputs, device: torch.device) -> Inputs:
    moved = {name: value.to(device) for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    return replace(inputs, **moved)
