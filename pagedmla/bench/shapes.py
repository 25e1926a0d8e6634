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
        name: such as ``B64 S4096 H16``, with ``q2`` behind it for two query tokens a sequence.
        seq_lens: keys of each sequence in tokens, >= q_len, this step's tokens included: every query sees a key.
        num_heads: query heads.
        q_len: query tokens of each sequence.
    """

    name: str
    seq_lens: tuple[int, ...]
    num_heads: int
    q_len: int = 1

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


def exponential_lengths(num_seqs: int, mean: int, seed: int) -> tuple[int, ...]:
    """Lengths in tokens of a served batch: exponential around ``mean``, cut to 0.05 .. 4 times it, never under 16.

    The draw depends on the seed alone, so that figures of different days are of one batch.
    """
    generator = torch.Generator().manual_seed(seed)
    factors = torch.empty(num_seqs, dtype=torch.float32).exponential_(generator=generator).clamp(0.05, 4)
    return tuple(int(length) for length in (factors * mean).clamp(min=16).tolist())


def _even(num_seqs: int, length: int, q_len: int = 1, heads: tuple[int, ...] = (16, 128)) -> _Batch:
    return _Batch(f"B{num_seqs} S{length}", (length,) * num_seqs, heads, q_len)


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
_TWO_QUERIES = (_even(128, 4096, q_len=2, heads=(16, 64)),)
_SETS: dict[str, tuple[_Batch, ...]] = {
    "std": (*_EVEN, *_RAGGED, *_TWO_QUERIES),
    "even": _EVEN,
    "ragged": _RAGGED,
    "mtp": _TWO_QUERIES,
    "small": (_even(1, 1024), _even(4, 1024), _even(1, 4096)),
    "tiny": (
        _Batch("B3 S1,64,131", (1, 64, 131), heads=(4,)),
        _Batch("B2 S65", (65, 65), heads=(4,), q_len=2),
    ),
}
SHAPE_SETS = tuple(_SETS)
"""std is the next three together; small is for a quick look or a CPU, tiny for tests."""


def named_shapes(
    sets: Sequence[str], heads: Sequence[int] | None = None, name_filter: str = ""
) -> tuple[DecodeShape, ...]:
    """The shapes of ``sets``, fewest heads first within a set, each once.

    Args:
        sets: names out of ``SHAPE_SETS``.
        heads: head counts for every batch; left out: each batch's own.
        name_filter: only shapes whose name contains it.

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
    return tuple(shape for shape in found.values() if name_filter in shape.name)


def _shape(batch: _Batch, num_heads: int) -> DecodeShape:
    suffix = "" if batch.q_len == 1 else f" q{batch.q_len}"
    return DecodeShape(f"{batch.label} H{num_heads}{suffix}", batch.seq_lens, num_heads, batch.q_len)
