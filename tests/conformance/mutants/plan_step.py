"""The plan step of the kernel in ``kernel.py``: what is taken, and who does which part of it; all on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from conformance.mutants.work import Item, Merge, Plan
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Options

MOST_HEADS = 128
MOST_SPLITS = 64
VECTOR = 8
"""Numbers that one load takes: a latent or a rotated part is a multiple of it."""

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
WIDE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Arguments:
    """A call in the contract's terms.

    Attributes:
        q_latent, q_rope: [T, H, rank] and [T, H, rope], any strides.
        cache: [num_pages, page_size, rank + rope], any strides.
        table: i32 [num_seqs, max_pages].
        lens: i32 [num_seqs].
        starts: i32 [num_seqs + 1], or None for an even batch.
        rank: latent numbers of a cached token, which are its value.
        softmax_scale, causal: as in ``pagedmla.decode``.
        kv_scale: of an fp8 cache, else None.
    """

    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    table: Tensor
    lens: Tensor
    starts: Tensor | None
    rank: int
    softmax_scale: float
    causal: bool
    kv_scale: float | None


class PlanStep:
    """Checks a call and plans its work.

    Args:
        arguments: tensors, which are kept.
        options: ``num_kv_splits`` (1 .. 64) or ``batch_invariant``; neither: as many splits as the machine has room for.

    Raises:
        ValueError: what the kernel cannot do.
    """

    ROWS, KEYS = 16, 32
    """A tile: rows (query tokens times heads) and keys."""
    CHUNK = 2 * KEYS
    """Keys of a split in the batch-invariant mode, and fewest of one otherwise."""
    UNITS = 8
    """Workgroups that run at once."""

    def __init__(self, arguments: Arguments, options: Options) -> None:
        self.args, self.options = arguments, options
        self.check()
        _, self.heads, self.rank = arguments.q_latent.shape
        _, self.page_size, self.width = arguments.cache.shape
        self.plan: Plan = self.make_plan()

    # --- what is taken

    def check(self) -> None:
        """Refuses before anything is launched."""
        a = self.args
        heads, rope, dtypes = a.q_latent.shape[1], a.q_rope.shape[2], (a.q_latent.dtype, a.cache.dtype)
        reason = self.refusal(heads, a.rank, rope, *dtypes) or self.bad_options(self.options) or self.misfit()
        if reason is not None:
            raise ValueError(reason)

    @staticmethod
    def refusal(heads: int, rank: int, rope: int, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """Why such a batch is not taken, or None."""
        if not 1 <= heads <= MOST_HEADS:
            return f"num_heads lies in 1 .. {MOST_HEADS}, not {heads}"
        if rank < VECTOR or rank % VECTOR or rope % VECTOR:
            return f"latent and rotated parts are multiples of {VECTOR}, not {rank} and {rope}"
        if q_dtype not in WIDE or kv_dtype not in (q_dtype, *FLOAT8):
            return f"no queries of {q_dtype} with a cache of {kv_dtype}"
        return None

    @staticmethod
    def bad_options(options: Options) -> str | None:
        """What is wrong with the options, or None."""
        unknown = set(options) - {"num_kv_splits", "batch_invariant"}
        if unknown:
            return f"no option {', '.join(sorted(unknown))}"
        splits = options.get("num_kv_splits")
        if splits is not None and not (isinstance(splits, int) and 1 <= splits <= MOST_SPLITS):
            return f"num_kv_splits lies in 1 .. {MOST_SPLITS}, not {splits}"
        if splits is not None and options.get("batch_invariant"):
            return "batch_invariant chooses the splits itself"
        return None

    def misfit(self) -> str | None:
        """Which argument does not fit the others, or None."""
        a, sequences = self.args, len(self.args.lens)
        indices = [a.table, a.lens] if a.starts is None else [a.table, a.lens, a.starts]
        fits = {
            "q": a.q_latent.shape[:2] == a.q_rope.shape[:2] and a.q_latent.shape[2] == a.rank,
            "kv_cache": a.cache.dim() == 3 and a.cache.shape[2] == a.rank + a.q_rope.shape[2],
            "block_table": a.table.dim() == 2 and len(a.table) == sequences,
            "cu_seqlens_q": a.starts is None or len(a.starts) == sequences + 1,
            "without cu_seqlens_q, q": a.starts is not None or len(a.q_latent) % max(1, sequences) == 0,
            "an index": all(index.dtype in (torch.int32, torch.int64) for index in indices),
            "softmax_scale": math.isfinite(a.softmax_scale),
            "kv_scale": (a.kv_scale is not None) == (a.cache.dtype in FLOAT8),
        }
        return next((f"{name} does not fit" for name, right in fits.items() if not right), None)

    # --- plan step: on the host

    def refresh(self) -> None:
        """Plans anew, after the tensors' content changed."""
        self.plan = self.make_plan()

    def make_plan(self) -> Plan:
        """Work items and merges for what the tensors hold now."""
        plan = Plan([self.length_of(n) for n in self.read_lens()], self.query_starts())
        counts = [
            (end - start) * self.heads for start, end in zip(plan.starts, plan.starts[1:], strict=False)
        ]
        row_tiles = sum(-(-rows // self.ROWS) for rows in counts)
        for sequence, (rows, length) in enumerate(zip(counts, plan.lengths, strict=True)):
            for first_row in self.row_tiles(rows):
                self.plan_tile(plan, sequence, first_row, self.cuts(length, row_tiles))
        owned = range(plan.starts[0], plan.starts[-1])
        plan.orphans = [token for token in range(self.args.q_latent.shape[0]) if token not in owned]
        return plan

    def plan_tile(self, plan: Plan, sequence: int, first_row: int, cuts: list[tuple[int, int]]) -> None:
        """Adds the work of one tile of rows; with one split there is nothing to merge."""
        if len(cuts) == 1:
            plan.items.append(Item(sequence, first_row, *cuts[0], slot=None))
            return
        slots = range(plan.slots, plan.slots + len(cuts))
        plan.slots = slots.stop
        plan.items += [Item(sequence, first_row, *cut, slot) for cut, slot in zip(cuts, slots, strict=True)]
        plan.merges.append(Merge(sequence, first_row, slots))

    def row_tiles(self, rows: int) -> range:
        """First rows of the tiles of a sequence."""
        return range(0, rows, self.ROWS)

    def read_lens(self) -> list[int]:
        """What the caller says of each sequence."""
        return self.args.lens.tolist()

    def length_of(self, seq_len: int) -> int:
        """Keys of a sequence: its full pages' and its last one's, as far as the table goes."""
        seq_len = min(max(seq_len, 0), self.args.table.shape[1] * self.page_size)
        pages = -(-seq_len // self.page_size)
        return (pages - 1) * self.page_size + self.last_page_len(seq_len) if pages else 0

    def last_page_len(self, seq_len: int) -> int:
        """Tokens in the last page of a sequence that is not empty: 1 .. page_size."""
        return (seq_len - 1) % self.page_size + 1

    def query_starts(self) -> list[int]:
        """First query token of each sequence, and the end; never falling, never past the queries."""
        tokens, sequences = self.args.q_latent.shape[0], len(self.args.lens)
        if self.args.starts is None:
            each = tokens // sequences if sequences else 0
            return [each * sequence for sequence in range(sequences + 1)]
        return self.args.starts.clamp(0, tokens).cummax(0).values.tolist()

    def cuts(self, length: int, row_tiles: int) -> list[tuple[int, int]]:
        """The key ranges of the splits of a sequence; trailing ones may be empty, and there is at least one."""
        if self.options.get("batch_invariant"):
            splits, size = max(1, -(-length // self.CHUNK)), self.CHUNK
        else:
            splits = self.splits(length, row_tiles)
            size = -(-length // (splits * self.KEYS)) * self.KEYS
        return [(min(length, i * size), min(length, (i + 1) * size)) for i in range(splits)]

    def splits(self, length: int, row_tiles: int) -> int:
        """How many splits, outside of the batch-invariant mode."""
        asked = self.options.get("num_kv_splits")
        if asked is not None:
            return int(asked)  # type: ignore[call-overload]
        return max(1, min(self.UNITS // max(1, row_tiles), -(-length // self.CHUNK)))
