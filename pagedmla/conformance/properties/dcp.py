"""DCP: keys that are sharded over ranks, attended to rank by rank and merged, are one pass."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from pagedmla.conformance.merging import check_merged
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import specs
from pagedmla.conformance.subject import Subject

_MOST_RANKS = 8
_INTERLEAVES = (1, 2, 3, 16, 64)

Example = tuple[BatchSpec, int, int | None, Any]
"""A batch of one query token each, the number of ranks, tokens in a row on one rank (None: one run for each), options."""


@st.composite
def _shards(draw: st.DrawFn, scope: Scope) -> Example:
    spec = draw(specs(scope.configuration, max_seqs=3))
    return _with_ranks(draw, scope, spec, 1)


@st.composite
def _idle_ranks(draw: st.DrawFn, scope: Scope) -> Example:
    """Every sequence leaves a rank without a token, a short one most of them."""
    lens = tuple(draw(st.lists(st.integers(0, _MOST_RANKS - 1), min_size=1, max_size=3)))
    spec = scope.configuration.spec(lens, seed=draw(st.integers(0, 2**16)))
    return _with_ranks(draw, scope, spec, max(2, max(lens) + 1))


def _with_ranks(draw: st.DrawFn, scope: Scope, spec: BatchSpec, least: int) -> Example:
    ranks = draw(st.integers(least, _MOST_RANKS))
    return spec, ranks, draw(st.sampled_from((None, *_INTERLEAVES))), draw(scope.options())


def _owned(length: int, rank: int, ranks: int, interleave: int | None) -> torch.Tensor:
    """i64: positions of a sequence's tokens on ``rank``: every run of ``interleave`` tokens goes to the next rank in turn."""
    positions = torch.arange(length)
    run = max(1, -(-length // ranks)) if interleave is None else interleave
    return positions[positions // run % ranks == rank]


def _ranks_merge_into_one_pass(subject: Subject, example: Example) -> None:
    spec, ranks, interleave, options = example
    pieces = [[_owned(length, rank, ranks, interleave) for length in spec.seq_lens] for rank in range(ranks)]
    how = "in one run each" if interleave is None else f"{interleave} tokens at a time"
    check_merged(subject, spec, options, pieces, f"keys on {ranks} ranks, {how}")


PROPERTIES = (
    Property(
        "DCP",
        "sharded-keys",
        "keys shared out over 1 to 8 ranks in runs, token by token or interleaved, and merged by lse are one pass",
        _shards,
        _ranks_merge_into_one_pass,
    ),
    Property(
        "DCP",
        "idle-ranks",
        "ranks that hold no token of a sequence, or none at all, add nothing to the merge",
        _idle_ranks,
        _ranks_merge_into_one_pass,
    ),
)
