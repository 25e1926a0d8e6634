"""The batches that ``pagedmla bench`` decodes, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from pagedmla.contract.errors import InvalidArgument

KV_LORA_RANK, QK_ROPE_HEAD_DIM = 512, 64
"""The one pair of sizes that every peer takes: DeepSeek-V2's and V3's."""
HEAD_DIM_QK = KV_LORA_RANK + QK_ROPE_HEAD_DIM


@dataclass(frozen=True)
class DecodeShape:
    """One row of the table.

    Attributes:
        name: such as ``B64 S4096 H16``, with ``q2`` behind it for two query tokens a sequence and ``p1`` for pages of one.
        seq_lens: keys of each sequence in tokens, >= q_len, this step's tokens included: every query sees a key.
        num_heads: query heads.
        q_len: query tokens of each sequence.
        page_size: tokens a page; None: the run's.
    """

    name: str
    seq_lens: tuple[int, ...]
    num_heads: int
    q_len: int = 1
    page_size: int | None = None

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch."""
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return self.num_seqs * self.q_len

    def flops(self) -> int:
        """Operations of both products over the keys that each query row sees under the causal mask."""
        seen = sum(
            max(0, length - self.q_len + query + 1) for length in self.seq_lens for query in range(self.q_len)
        )
        return 2 * self.num_heads * seen * (HEAD_DIM_QK + KV_LORA_RANK)

    def bytes_moved(self, itemsize: int) -> int:
        """Bytes of every cached token, query and output, each moved once; ``itemsize`` in bytes, the same for all."""
        rows = self.num_tokens * self.num_heads
        return itemsize * (sum(self.seq_lens) * HEAD_DIM_QK + rows * (HEAD_DIM_QK + KV_LORA_RANK))


@dataclass(frozen=True)
class _Batch:
    """Lengths and query tokens, with the head counts at which they are decoded unless the caller names others."""

    label: str
    seq_lens: tuple[int, ...]
    heads: tuple[int, ...] = (16, 128)
    q_len: int = 1
    page_size: int | None = None


def exponential_lengths(num_seqs: int, mean: int, seed: int) -> tuple[int, ...]:
    """Lengths in tokens of a served batch: exponential around ``mean``, cut to 0.05 .. 4 times it, never under 16.

    The draw depends on the seed alone, so that figures of different days are of one batch.
    """
    generator = torch.Generator().manual_seed(seed)
    factors = torch.empty(num_seqs, dtype=torch.float32).exponential_(generator=generator).clamp(0.05, 4)
    return tuple(int(length) for length in (factors * mean).clamp(min=16).tolist())


def _even(
    num_seqs: int,
    length: int,
    q_len: int = 1,
    heads: tuple[int, ...] = (16, 128),
    page_size: int | None = None,
) -> _Batch:
    return _Batch(f"B{num_seqs} S{length}", (length,) * num_seqs, heads, q_len, page_size)


_EVEN = tuple(
    _even(num_seqs, length)
    for num_seqs, length in (
        (1, 4096),
        (1, 32768),
        (1, 131072),
        (16, 4096),
        (64, 4096),
        (128, 4096),
        (128, 8192),
        (256, 1024),
    )
)
_RAGGED = (
    _Batch("B64 S~exp4096", exponential_lengths(64, 4096, seed=1)),
    # one long sequence among short ones: the batch that a schedule without balance loses on
    _Batch("B4 S641,45118,1730,1696", (641, 45118, 1730, 1696), heads=(16,)),
)
_TWO_QUERIES = (_even(128, 4096, q_len=2, heads=(64,)),)

QUERY_LENGTHS = (1, 2, 3, 4)
HEAD_COUNTS = (1, 2, 4, 8, 12, 16, 17, 20, 24, 28, 32, 33, 40, 48, 49, 56, 64, 65, 72, 80, 96, 112, 128)
"""Tight behind multiples of 16, where a tile of rows is full, and close enough elsewhere that work alone makes no step of 1.3
once it is arithmetic that counts."""
_QUERIES = tuple(_even(128, 4096, q_len, heads=(16,)) for q_len in QUERY_LENGTHS)
_PAGES = tuple(
    _even(num_seqs, 4096, heads=heads, page_size=page_size)
    for num_seqs, heads in ((64, (16, 128)), (128, (16,)))
    for page_size in (None, 1)
)
_HEADS = (_even(64, 4096, heads=HEAD_COUNTS),)
_LONG = (_even(128, 16384, heads=(128,)),)
_SETS: dict[str, tuple[_Batch, ...]] = {
    "std": (*_EVEN, *_RAGGED, *_TWO_QUERIES),
    "even": _EVEN,
    "ragged": _RAGGED,
    "mtp": _TWO_QUERIES,
    "extra": (*_LONG, *_PAGES, *_QUERIES, *_HEADS),
    "long": _LONG,
    "pages": _PAGES,
    "queries": _QUERIES,
    "heads": _HEADS,
    "small": (_even(1, 1024), _even(4, 1024), _even(1, 4096)),
    "tiny": (
        _Batch("B3 S1,64,131", (1, 64, 131), heads=(4,)),
        _Batch("B2 S65", (65, 65), heads=(4,), q_len=2),
    ),
}
SHAPE_SETS = tuple(_SETS)
"""std is the next three together, extra the four behind it; small is for a quick look or a CPU, tiny for tests."""


def named_shapes(
    sets: Sequence[str], heads: Sequence[int] | None = None, parts: Sequence[str] = ()
) -> tuple[DecodeShape, ...]:
    """The shapes of ``sets``, fewest heads first within a set, each once.

    Args:
        sets: names out of ``SHAPE_SETS``.
        heads: head counts for every batch; left out: each batch's own.
        parts: only the shape that one of these names, and where none has the name, the shapes whose name contains it.

    Raises:
        InvalidArgument: no set has this name, or a head count is not positive.
    """
    for name in sets:
        if name not in _SETS:
            raise InvalidArgument("shapes", "shapes", "some of " + ", ".join(SHAPE_SETS), repr(name))
    for count in heads or ():
        if count < 1:
            raise InvalidArgument("heads", "heads", "whole numbers >= 1", str(count))
    found: dict[str, DecodeShape] = {}
    for name in sets:
        counts = sorted(set(heads or (count for batch in _SETS[name] for count in batch.heads)))
        for count, batch in product(counts, _SETS[name]):
            if heads or count in batch.heads:
                shape = _shape(batch, count)
                found.setdefault(shape.name, shape)
    if not parts:
        return tuple(found.values())
    wanted = {name for part in parts for name in ([part] if part in found else found) if part in name}
    return tuple(shape for name, shape in found.items() if name in wanted)


def find_shapes(
    base: str, heads: Sequence[int] | None = None, parts: Sequence[str] = ()
) -> tuple[DecodeShape, ...]:
    """The shapes that a user means who named no set: those of ``base``, and with ``parts`` what these find.

    Each part is the name of a set, or it is looked for in ``base`` and, where nothing is found, in ``extra``.
    """
    if not parts:
        return named_shapes([base], heads)
    found: dict[str, DecodeShape] = {}
    for part in parts:
        if part in _SETS:
            shapes = named_shapes([part], heads)
        else:
            shapes = named_shapes([base], heads, [part]) or named_shapes(["extra"], heads, [part])
        found |= {shape.name: shape for shape in shapes}
    return tuple(found.values())


def _shape(batch: _Batch, num_heads: int) -> DecodeShape:
    suffix = "" if batch.q_len == 1 else f" q{batch.q_len}"
    if batch.page_size is not None:
        suffix += f" p{batch.page_size}"
    name = f"{batch.label} H{num_heads}{suffix}"
    return DecodeShape(name, batch.seq_lens, num_heads, batch.q_len, batch.page_size)
