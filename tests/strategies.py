"""Hypothesis strategies for decode batches: lengths that visit holes, single tokens, page edges and primes."""

from __future__ import annotations

from batches import Batch, make_batch
from hypothesis import strategies as st

PAGE_SIZES = (1, 2, 3, 16, 32, 64, 128, 256, 480)

page_sizes = st.sampled_from(PAGE_SIZES)
seeds = st.integers(0, 2**20)


@st.composite
def lengths(draw: st.DrawFn, page_size: int = 16, most: int = 200) -> int:
    """A length: 0, 1, next to a multiple of the page size, a prime of the founding fault, or anything."""
    edges = [page_size * pages + step for pages in (1, 2, 3) for step in (-1, 0, 1)]
    special = [0, 1, 2, 127, 131, *(edge for edge in edges if edge <= 3 * most)]
    return draw(st.one_of(st.sampled_from(special), st.integers(0, most)))


@st.composite
def batches(
    draw: st.DrawFn,
    page_size: int = 16,
    max_q_len: int = 1,
    max_seqs: int = 4,
    most: int = 200,
    **fixed: object,
) -> Batch:
    """A random batch of 1 .. max_seqs sequences with 0 .. max_q_len query tokens each (exactly 1 when that is 1)."""
    seq_lens = draw(st.lists(lengths(page_size, most), min_size=1, max_size=max_seqs))
    q_len = st.just(1) if max_q_len == 1 else st.integers(0, max_q_len)
    q_lens = draw(st.lists(q_len, min_size=len(seq_lens), max_size=len(seq_lens)))
    options = {"num_heads": draw(st.sampled_from((1, 3, 16))), "seed": draw(seeds)} | fixed
    return make_batch(seq_lens, q_lens, **options)  # type: ignore[arg-type]


@st.composite
def cuts(draw: st.DrawFn, length: int, pieces: int) -> list[int]:
    """Where to cut ``length`` keys into ``pieces`` runs, empty ones included: pieces + 1 rising numbers."""
    inner = draw(st.lists(st.integers(0, length), min_size=pieces - 1, max_size=pieces - 1))
    return [0, *sorted(inner), length]
