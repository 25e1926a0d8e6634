"""A paged MLA decode in plain torch, written as a GPU kernel is: what the mutants are made from.

It shares nothing with the package's backends.  The plan step reads lengths on the host and makes work items; the run
step, here, walks each item's keys tile by tile, through the block table, with element offsets into the cache's storage,
keeps an online softmax in float32, and writes the result or, with several splits, a partial state that a merge stage
reduces.  Every decision is a method of its own, so that a fault is one small method that is overridden.
"""

from __future__ import annotations

import math

import torch
from conformance.mutants.plan_step import VECTOR, Arguments, PlanStep
from conformance.mutants.work import Item, Merge
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Options

LOG2_E = math.log2(math.e)


def storage_of(tensor: Tensor) -> Tensor:
    """All of the memory that ``tensor`` is a view of, as one row of numbers: what a pointer reaches."""
    numbers = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.as_strided((numbers,), (1,), 0)


class Kernel(PlanStep):
    """One call, prepared.

    Args:
        arguments, options: as in ``PlanStep``.
        out: [T, H, rank] of the queries' dtype, any strides, or None.
        lse: f32 [T, H], likewise.

    Raises:
        ValueError: what this kernel cannot do.
    """

    kind = ""
    """Kind of fault; a mutant sets it."""

    def __init__(
        self, arguments: Arguments, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> None:
        super().__init__(arguments, options)
        latent = arguments.q_latent
        self.out = torch.empty(latent.shape, dtype=latent.dtype) if out is None else out
        self.lse = torch.empty(latent.shape[:2], dtype=torch.float32) if lse is None else lse

    def run(self) -> tuple[Tensor, Tensor]:
        """Attends, merges, and fills the rows that nobody owns."""
        self.partial_out = torch.empty(self.plan.slots, self.ROWS, self.rank)
        self.partial_lse = torch.empty(self.plan.slots, self.ROWS)
        for token in self.plan.orphans:
            self.clear(token)
        for item in self.plan.items:
            self.attend(item)
        for merge in self.plan.merges:
            self.reduce(merge)
        return self.results()

    def results(self) -> tuple[Tensor, Tensor]:
        """What the caller gets."""
        return self.out, self.lse

    def clear(self, token: int) -> None:
        """Writes the result of a query token that sees no key."""
        self.out[token] = 0
        self.lse[token] = -math.inf

    def attend(self, item: Item) -> None:
        """One work item: an online softmax over its keys."""
        q = self.load_queries(item)
        limits = self.limits(item)
        top = torch.full((self.ROWS,), -math.inf)
        total = torch.zeros(self.ROWS)
        sums = torch.zeros(self.ROWS, self.rank)
        for first in range(item.first_key, item.end_key, self.KEYS):
            keys = torch.arange(first, first + self.KEYS)
            tile = self.load_keys(item, keys)
            scores = self.scores(q, tile)
            scores = torch.where(self.visible(item, keys, limits), scores, -math.inf)
            new_top = torch.maximum(top, scores.amax(1))
            pivot = finite(new_top)
            weights = torch.exp2(scores - pivot[:, None])
            old = torch.exp2(top - pivot)
            total = total * old + weights.sum(1)
            sums = self.accumulate(sums, old, weights, self.values_of(tile))
            top = new_top
        self.finish(item, *self.state(sums, top, total))

    def finish(self, item: Item, out: Tensor, lse: Tensor) -> None:
        """Stores the state of an item: as the result when it is the only split."""
        if item.slot is None:
            self.store(item.sequence, item.first_row, out, lse)
        else:
            self.partial_out[item.slot] = out
            self.partial_lse[item.slot] = lse

    def reduce(self, merge: Merge) -> None:
        """Merges the splits of a tile of rows, one after another: trailing empty ones change no bit."""
        slots = slice(merge.slots.start, merge.slots.stop)
        outs, lses = self.partial_out[slots], self.partial_lse[slots]
        top = lses.amax(0)
        weights = self.merge_weights(lses, top)
        total, sums = torch.zeros(self.ROWS), torch.zeros(self.ROWS, self.rank)
        for weight, out in zip(weights, outs, strict=True):
            total = total + weight
            sums = sums + weight[:, None] * out
        self.store(merge.sequence, merge.first_row, *self.state(sums, top, total))

    def merge_weights(self, lses: Tensor, top: Tensor) -> Tensor:
        """[splits, ROWS]: each split's weight; 0 for one without keys."""
        return torch.exp2(lses - finite(top))

    def state(self, sums: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """(out [ROWS, rank], lse [ROWS] in base 2) of sums of weights relative to ``top``; (0, -inf) without keys."""
        return sums / torch.where(total == 0, 1.0, total)[:, None], top + torch.log2(total)

    # --- arithmetic

    def scores(self, q: Tensor, tile: Tensor) -> Tensor:
        """[ROWS, KEYS]: scores in base 2."""
        return self.products(q, tile) * (self.softmax_scale() * self.key_scale() * LOG2_E)

    def softmax_scale(self) -> float:
        """What the caller said."""
        return self.args.softmax_scale

    def key_scale(self) -> float:
        """What stored keys are multiplied by."""
        return 1.0 if self.args.kv_scale is None else float(self.args.kv_scale)

    def value_scale(self) -> float:
        """What stored values are multiplied by: they are the keys."""
        return self.key_scale()

    def products(self, q: Tensor, tile: Tensor) -> Tensor:
        """[ROWS, KEYS]: inner products of queries and keys.

        In the batch-invariant mode each is summed alone, since a library's product may round by a row's place.
        """
        return (q[:, None] * tile[None]).sum(2) if self.options.get("batch_invariant") else q @ tile.T

    def values_of(self, tile: Tensor) -> Tensor:
        """[KEYS, rank]: the latent part of the keys."""
        return tile[:, : self.rank] * self.value_scale()

    def accumulate(self, sums: Tensor, old: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        """The weighted sum of values, in float32; what was there is rescaled by ``old``."""
        if self.options.get("batch_invariant"):
            return sums * old[:, None] + (weights[:, :, None] * values[None]).sum(1)
        return sums * old[:, None] + weights @ values

    # --- masks

    def rows_of(self, sequence: int, first_row: int) -> tuple[Tensor, Tensor, Tensor]:
        """(query token within the sequence, head, whether there is such a row) of a tile's rows, each [ROWS]."""
        rows = torch.arange(first_row, first_row + self.ROWS)
        return rows // self.heads, rows % self.heads, rows < self.query_tokens(sequence) * self.heads

    def query_tokens(self, sequence: int) -> int:
        """Query tokens of a sequence."""
        return self.plan.starts[sequence + 1] - self.plan.starts[sequence]

    def limits(self, item: Item) -> Tensor:
        """i64 [ROWS]: how many keys each row sees; 0 for rows past the sequence's."""
        query, _, live = self.rows_of(item.sequence, item.first_row)
        length = self.plan.lengths[item.sequence]
        seen = self.seen(query, length, self.query_tokens(item.sequence)) if self.args.causal else length
        return torch.where(live, seen, 0)

    def seen(self, query: Tensor, length: int, queries: int) -> Tensor:
        """Keys that query token number ``query`` of ``queries`` sees: the last one sees all of them."""
        return length - queries + query + 1

    def visible(self, item: Item, keys: Tensor, limits: Tensor) -> Tensor:
        """bool [ROWS, KEYS]."""
        return keys < torch.minimum(limits, torch.tensor(item.end_key))[:, None]

    # --- memory

    def load_queries(self, item: Item) -> Tensor:
        """f32 [ROWS, width]; rows past the sequence's are 0."""
        query, head, live = self.rows_of(item.sequence, item.first_row)
        token = torch.where(live, query + self.plan.starts[item.sequence], 0)
        parts = [self.gather_rows(part, token, head) for part in (self.args.q_latent, self.args.q_rope)]
        return torch.where(live[:, None], torch.cat(parts, 1), 0.0)

    def gather_rows(self, part: Tensor, token: Tensor, head: Tensor) -> Tensor:
        """f32 [ROWS, numbers]: rows of a part of the queries."""
        numbers = torch.arange(part.shape[2] // VECTOR * VECTOR)
        start = part.storage_offset() + self.query_offsets(part, token, head)
        return storage_of(part)[start[:, None] + numbers * part.stride(2)].float()

    def query_offsets(self, part: Tensor, token: Tensor, head: Tensor) -> Tensor:
        """i64 [ROWS]: where rows start, in numbers from the first one's."""
        return token * part.stride(0) + head * part.stride(1)

    def load_keys(self, item: Item, keys: Tensor) -> Tensor:
        """f32 [KEYS, width], as stored; what lies past the item's keys, or outside the pool, is 0 and not read."""
        live = keys < item.end_key
        pages, slots = self.pages_of(item, torch.where(live, keys, item.first_key))
        inside = live & (pages >= 0) & (pages < self.args.cache.shape[0])
        offsets = self.offsets(torch.where(inside, pages, 0), slots)
        return torch.where(inside[:, None], self.gather(offsets), 0.0)

    def pages_of(self, item: Item, keys: Tensor) -> tuple[Tensor, Tensor]:
        """(page id, token within the page) of keys, each i64 [KEYS]."""
        table = self.args.table
        cells = (
            table.storage_offset()
            + item.sequence * table.stride(0)
            + keys // self.page_size * table.stride(1)
        )
        return storage_of(table)[cells].long(), keys % self.page_size

    def offsets(self, pages: Tensor, slots: Tensor) -> Tensor:
        """i64 [KEYS]: where tokens start, in numbers from the first page's."""
        return pages * self.args.cache.stride(0) + slots * self.args.cache.stride(1)

    def gather(self, offsets: Tensor) -> Tensor:
        """f32 [KEYS, width]: tokens at ``offsets``."""
        cache = self.args.cache
        numbers = torch.arange(self.width // VECTOR * VECTOR)
        return self.decode(
            storage_of(cache)[self.cache_start() + offsets[:, None] + numbers * cache.stride(2)]
        )

    def cache_start(self) -> int:
        """Where the first page starts in the cache's storage, in numbers."""
        return self.args.cache.storage_offset()

    def decode(self, stored: Tensor) -> Tensor:
        """Stored numbers as float32, without their scale."""
        return stored.float()

    def store(self, sequence: int, first_row: int, out: Tensor, lse: Tensor) -> None:
        """Writes the rows of a tile that the sequence has; ``lse`` comes in base 2."""
        query, head, live = self.rows_of(sequence, first_row)
        token = query + self.plan.starts[sequence]
        self.store_out(token[live], head[live], out[live])
        self.store_lse(token[live], head[live], self.natural(lse[live]))

    def natural(self, lse: Tensor) -> Tensor:
        """From base 2 to the natural logarithm."""
        return lse / LOG2_E

    def store_out(self, token: Tensor, head: Tensor, rows: Tensor) -> None:
        """Writes rows of ``out``."""
        start = self.out.storage_offset() + self.out_offsets(token, head)
        places = start[:, None] + torch.arange(self.rank) * self.out.stride(2)
        storage_of(self.out)[places] = rows.to(self.out.dtype)

    def out_offsets(self, token: Tensor, head: Tensor) -> Tensor:
        """Where rows of ``out`` start, in numbers from the first one's."""
        return token * self.out.stride(0) + head * self.out.stride(1)

    def store_lse(self, token: Tensor, head: Tensor, rows: Tensor) -> None:
        """Writes numbers of ``lse``."""
        places = self.lse.storage_offset() + token * self.lse.stride(0) + head * self.lse.stride(1)
        storage_of(self.lse)[places] = rows


def finite(top: Tensor) -> Tensor:
    """``top``, or 0 where nothing was seen: -inf minus -inf would be nan."""
    return torch.where(top == -math.inf, 0.0, top)
