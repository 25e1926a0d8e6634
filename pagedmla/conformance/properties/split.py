"""SPLIT: a result does not depend on how a row's keys are shared out and put together again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import seeds, specs
from pagedmla.conformance.subject import Subject

_MOST_SPLITS = 40
_USUAL_SPLITS = (2, 3, 8, 16, 32)
# KV tiles of kernels are 16 to 256 tokens: their edges, times a few splits, lie at multiples of 16
_TILE = 16
_FLAT_SPREADS = (0.0, 1e-3, 0.3)
_PEAKS_NATS = (3.0, 20.0, 100.0, 3e3, 1e5)

Example = tuple[BatchSpec, tuple[Any, ...]]
"""A batch, and ways of being called that all have to be right about it."""


def _ways(scope: Scope) -> st.SearchStrategy[tuple[Any, ...]]:
    """A way of being called; where one of them sets ``num_kv_splits``, also one split, and any number of splits."""
    counted = [options for options in scope.adapter.options if "num_kv_splits" in options]
    if not counted:
        return st.tuples(scope.options())
    base = st.sampled_from(counted)
    counts = st.one_of(st.sampled_from(_USUAL_SPLITS), st.integers(1, _MOST_SPLITS))
    return st.tuples(
        scope.options(),
        base.map(lambda options: {**options, "num_kv_splits": 1}),
        st.builds(lambda options, count: {**options, "num_kv_splits": count}, base, counts),
    )


@st.composite
def _dense_lengths(draw: st.DrawFn, scope: Scope) -> Example:
    """A run of neighbouring lengths, so that every length is met: from anywhere, or across the edge of a tile."""
    count = draw(st.integers(2, 6))
    most = scope.configuration.most_keys - count
    edges = st.integers(1, max(1, most // _TILE)).map(lambda tiles: max(0, tiles * _TILE - 2))
    first = draw(st.one_of(st.integers(0, most), edges))
    lens = tuple(range(first, first + count))
    spec = scope.configuration.spec(lens, seed=draw(seeds), layout_seed=draw(seeds))
    return spec, draw(_ways(scope))


@st.composite
def _few_keys(draw: st.DrawFn, scope: Scope) -> Example:
    """Sequences with fewer keys than there are splits, beside one that has plenty."""
    short = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    long = draw(st.lists(st.integers(0, scope.configuration.most_keys), max_size=1))
    spec = scope.configuration.spec((*short, *long), seed=draw(seeds), layout_seed=draw(seeds))
    return spec, draw(_ways(scope))


@st.composite
def _peaked(draw: st.DrawFn, scope: Scope) -> Example:
    """One key dominates, at any place.  Its score is a sum of squares, so that float32 knows even a huge one well."""
    spec = draw(specs(scope.configuration, peak=draw(st.integers(0, scope.configuration.most_keys))))
    # queries have about nats / (softmax_scale * head_dim_qk) in each number, which float16 has to hold, with room to spare
    most = 2e3 * spec.softmax_scale * spec.head_dim_qk if spec.dtype == "fp16" else math.inf
    nats = draw(st.sampled_from([nats for nats in _PEAKS_NATS if nats <= most]))
    return replace(spec, peak_nats=nats), draw(_ways(scope))


@st.composite
def _flat(draw: st.DrawFn, scope: Scope) -> Example:
    """All keys count alike: a part that is lost, or counted twice, shows in proportion."""
    spec = draw(specs(scope.configuration, spread=draw(st.sampled_from(_FLAT_SPREADS))))
    return spec, draw(_ways(scope))


def _is_right(subject: Subject, example: Example) -> None:
    spec, ways = example
    taken = [way for way in ways if subject.adapter.refuses(spec, way, subject.device) is None]
    if not taken:
        subject.require(spec, ways[0])
    for way in taken:
        subject.checked(spec, way)


PROPERTIES = (
    Property(
        "SPLIT",
        "dense-lengths",
        "every length, tile edges included, gives the values of the float64 oracle, lse too, however the keys are split",
        _dense_lengths,
        _is_right,
    ),
    Property(
        "SPLIT",
        "few-keys",
        "a split without keys has no weight: fewer keys than splits give the values of the float64 oracle",
        _few_keys,
        _is_right,
    ),
    Property(
        "SPLIT",
        "peaked-softmax",
        "one key that dominates, in whatever split it lies and by however much, gives the values of the float64 oracle",
        _peaked,
        _is_right,
    ),
    Property(
        "SPLIT",
        "flat-softmax",
        "keys that all count alike give the values of the float64 oracle, however they are split",
        _flat,
        _is_right,
    ),
)
