"""PAGE: a result depends on the tokens, never on how they lie in pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import PAGE_SIZES, lengths, seeds, specs
from pagedmla.conformance.subject import Broken, Step, Subject, first_difference

_FOUNDING_LENGTHS = (127, 131)
"""Primes: with pages of one token, the lengths whose last page was once said to hold them whole."""
_LONG = (4097, 6500)
"""Past every tile, past 4096 tokens, and past the 32nd page of up to 128 tokens."""
_LONG_PAGE_SIZES = (16, 64, 128, 256, 480)
_CONSECUTIVE = 8


@st.composite
def _layouts(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, dict[str, Any], Any]:
    """A batch, another layout of it, and a way of being called."""
    spec = draw(specs(scope.configuration))
    other = {
        "layout_seed": draw(seeds),
        "spare_pages": draw(st.sampled_from((0, 1, 30))),
        "poison": draw(scope.poisons()),
    }
    return spec, other, draw(scope.options())


def _moving_pages_changes_no_bit(subject: Subject, example: tuple[BatchSpec, dict[str, Any], Any]) -> None:
    spec, other, options = example
    moved = replace(spec, **other)
    one = subject.checked(spec, options)
    two = subject.checked(moved, options)
    difference = first_difference(one, two)
    if difference:
        raise Broken(
            f"{difference}: the same tokens in other pages", Step(spec, options), Step(moved, options)
        )


@st.composite
def _page_sizes(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    if draw(st.sampled_from((False, False, False, True))):
        # one sequence alone: a fault that begins at some number of tokens or pages hides from short ones
        page_size = draw(st.sampled_from(_LONG_PAGE_SIZES))
        long = draw(st.integers(*_LONG))
        spec = scope.configuration.spec(
            (long,), page_size=page_size, seed=draw(seeds), layout_seed=draw(seeds)
        )
        return spec, draw(scope.options())
    page_size = draw(st.sampled_from(PAGE_SIZES))
    return draw(specs(scope.configuration, page_size=page_size)), draw(scope.options())


def _is_right(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    subject.checked(spec, options)


@st.composite
def _every_length(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    """Consecutive lengths from 1 to past three pages: whatever a page's remainder is, it is visited."""
    own = scope.configuration.spec((1,)).page_size
    # one token a page, where a length and a number of pages are most easily taken for each other
    page_size = draw(st.sampled_from((own, 1, *PAGE_SIZES)))
    most = max(_CONSECUTIVE, min(3 * page_size + 1, scope.configuration.most_keys))
    first = draw(st.one_of(st.sampled_from(_FOUNDING_LENGTHS), st.integers(1, most - _CONSECUTIVE + 1)))
    count = draw(st.integers(1, _CONSECUTIVE))
    spec = scope.configuration.spec(
        tuple(range(first, first + count)), page_size=page_size, seed=draw(seeds), layout_seed=draw(seeds)
    )
    return spec, draw(scope.options())


@st.composite
def _sizes_apart(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    """A pool much larger than the table is wide, or a table much wider than the pool has pages, or both exact."""
    spare: dict[str, Any] = {
        "spare_pages": draw(st.sampled_from((0, 1, 7, 200))),
        "spare_columns": draw(st.sampled_from((0, 1, 9, 70))),
        "poison": draw(scope.poisons()),
    }
    return draw(specs(scope.configuration, **spare)), draw(scope.options())


@st.composite
def _shared_pages(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    """Sequences that are the same one (ids alike), and perhaps another one behind them."""
    own = scope.configuration.spec((1,)).page_size
    length = draw(lengths(own, scope.configuration.most_keys, least=1))
    beams = draw(st.integers(2, 4))
    others = tuple(draw(st.lists(lengths(own, scope.configuration.most_keys), max_size=2)))
    ids = (0,) * beams + tuple(range(1, 1 + len(others)))
    seq_lens = (length,) * beams + others
    spec = scope.configuration.spec(seq_lens, ids=ids, seed=draw(seeds), layout_seed=draw(seeds))
    return spec, draw(scope.options())


def _sequences_may_share_pages(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    subject.require(spec, options)
    call = subject.build(spec)
    beams = (spec.ids or ()).count(0)
    # like beams over one prompt: every row of the table that has id 0 lists the same pages
    table = call.block_table.clone()
    table[1:beams] = table[0]
    result = subject.run(replace(call, block_table=table), options)
    subject.check(result, spec, options, note=f"rows 1 to {beams - 1} of block_table are copies of row 0")


PROPERTIES = (
    Property(
        "PAGE",
        "moved-pages",
        "the same tokens in other physical pages of a larger pool give the same bits",
        _layouts,
        _moving_pages_changes_no_bit,
    ),
    Property(
        "PAGE",
        "page-sizes",
        "every page size that is accepted gives the values of the float64 oracle, past 4096 tokens too",
        _page_sizes,
        _is_right,
    ),
    Property(
        "PAGE",
        "every-length",
        "whatever number of tokens the last page holds, the values are those of the float64 oracle",
        _every_length,
        _is_right,
    ),
    Property(
        "PAGE",
        "sizes-apart",
        "the pool's pages, the table's width and a sequence's pages are three numbers that need not agree",
        _sizes_apart,
        _is_right,
    ),
    Property(
        "PAGE",
        "shared-pages",
        "sequences whose table rows list the same pages are each right",
        _shared_pages,
        _sequences_may_share_pages,
    ),
)
