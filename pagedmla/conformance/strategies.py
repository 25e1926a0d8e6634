"""Hypothesis strategies for batches: lengths that visit holes, single tokens, page edges and the founding primes."""

from __future__ import annotations

from hypothesis import strategies as st

from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.spec import BatchSpec

PAGE_SIZES = (1, 2, 3, 16, 32, 64, 128, 256, 480)

seeds = st.integers(0, 2**16)


def lengths(page_size: int, most: int, least: int = 0) -> st.SearchStrategy[int]:
    """Keys of a sequence: next to a multiple of the page size, 0, 1, 127, 131, or anything up to ``most``."""
    edges = [page_size * pages + step for pages in (1, 2, 3) for step in (-1, 0, 1)]
    special = sorted({n for n in (0, 1, 2, 127, 131, *edges) if least <= n <= most})
    anything = st.integers(least, most)
    return st.one_of(st.sampled_from(special), anything) if special else anything


@st.composite
def specs(
    draw: st.DrawFn,
    configuration: Configuration,
    *,
    max_seqs: int = 4,
    max_q_len: int = 1,
    even: bool = False,
    least: int = 0,
    **fixed: object,
) -> BatchSpec:
    """A random batch of 1 .. max_seqs sequences.

    Args:
        configuration: its fixed fields.
        max_seqs: most sequences.
        max_q_len: most query tokens of a sequence; with 1 every sequence has exactly one.
        even: all sequences have the same number of query tokens, at least 1.
        least: fewest keys of a sequence.
        fixed: fields of ``BatchSpec`` that are not drawn.
    """
    fields = {**configuration.fields, **fixed}
    page_size = fields.get("page_size", BatchSpec.page_size)
    keys = lengths(int(page_size), configuration.most_keys, least)  # type: ignore[call-overload]
    seq_lens = tuple(draw(st.lists(keys, min_size=1, max_size=max_seqs)))
    count = len(seq_lens)
    q_lens: tuple[int, ...] | None = None
    if max_q_len > 1:
        if even:
            q_lens = (draw(st.integers(1, max_q_len)),) * count
        else:
            q_lens = tuple(draw(st.lists(st.integers(0, max_q_len), min_size=count, max_size=count)))
    drawn: dict[str, object] = {"q_lens": q_lens, "seed": draw(seeds), "layout_seed": draw(seeds)}
    return configuration.spec(seq_lens, **{**drawn, **fixed})
