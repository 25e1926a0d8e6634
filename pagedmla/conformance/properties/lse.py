"""LSE: the logarithm is right by value, and results of pieces of the keys merge into one pass by it."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from pagedmla.conformance.merging import check_merged
from pagedmla.conformance.properties.mem import nan_outputs
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import lengths, seeds, specs
from pagedmla.conformance.subject import Broken, Refused, Result, Step, Subject, blind_rows, first_difference

_MOST_PIECES = 5
# so many query tokens and heads the oracle works out in no time
_MOST_SQUARE = 16

Example = tuple[BatchSpec, Any]


def _require_lse(subject: Subject, spec: BatchSpec, options: Any) -> None:
    subject.require(spec, options)
    if subject.conventions(spec, options).lse_base is None:
        raise Refused("returns no lse")


@st.composite
def _square(draw: st.DrawFn, scope: Scope) -> Example:
    """As many query tokens as heads, the model's own where they are few: sizes do not tell which axis is which."""
    heads = scope.configuration.spec(()).num_heads
    tokens = draw(st.integers(2, _MOST_SQUARE))
    if heads <= _MOST_SQUARE and draw(st.booleans()):
        tokens = heads
    q_len = draw(st.sampled_from([count for count in (1, 2, 3, 4) if tokens % count == 0]))
    keys = lengths(scope.configuration.spec(()).page_size, min(scope.configuration.most_keys, 150))
    count = tokens // q_len
    lens = tuple(draw(st.lists(keys, min_size=count, max_size=count)))
    fields = {"num_heads": tokens, "q_lens": (q_len,) * count}
    return scope.configuration.spec(lens, **fields, seed=draw(seeds)), draw(scope.options())


@st.composite
def _anything(draw: st.DrawFn, scope: Scope) -> Example:
    drawn = specs(scope.configuration, max_q_len=3, even=draw(st.booleans()))
    return draw(drawn.filter(lambda spec: sum(spec.query_counts) > 0)), draw(scope.options())


def _value_is_right(subject: Subject, example: Example) -> None:
    spec, options = example
    _require_lse(subject, spec, options)
    subject.checked(spec, options)


def _given_lse_is_written(subject: Subject, example: Example) -> None:
    spec, options = example
    _require_lse(subject, spec, options)
    call = subject.build(spec)
    own = subject.run(call, options)
    live = ~blind_rows(spec).to(subject.device)
    for with_lse in (False, True):
        note = "out and lse given, full of nan" if with_lse else "out given, full of nan, and no lse"
        out, lse = nan_outputs(subject, spec, options)
        lse = lse if with_lse else None
        subject.check(subject.run(call, options, out, lse), spec, options, note)
        # what was given is looked at, and not only what came back
        difference = first_difference(Result(own.out[live], None), Result(out[live], None))
        if difference:
            detail = f"{difference}: nothing given, and {note}; rows that see a key"
            raise Broken(detail, Step(spec, options), Step(spec, options, note))
        if lse is not None:
            subject.check(subject.normalise(out, lse, spec, options), spec, options, note)


@st.composite
def _cuts(
    draw: st.DrawFn, scope: Scope
) -> tuple[BatchSpec, tuple[tuple[int, ...], ...], tuple[int, ...], Any]:
    """A batch, where the keys of each sequence are cut, the order that pieces are attended to in, and options."""
    causal = draw(st.booleans())
    # a query that hides keys cannot be cut: the piece would not know which
    max_q_len = 1 if causal else draw(st.integers(1, 3))
    spec = draw(specs(scope.configuration, max_q_len=max_q_len, even=True, causal=causal, max_seqs=3))
    count = draw(st.integers(1, _MOST_PIECES))
    cuts = tuple(
        tuple(sorted(draw(st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1))))
        for length in spec.seq_lens
    )
    return spec, cuts, tuple(draw(st.permutations(range(count)))), draw(scope.options())


def _pieces_merge_into_one_pass(
    subject: Subject, example: tuple[BatchSpec, tuple[tuple[int, ...], ...], tuple[int, ...], Any]
) -> None:
    spec, cuts, order, options = example
    edges = [(0, *inner, length) for inner, length in zip(cuts, spec.seq_lens, strict=True)]
    pieces = [[torch.arange(edge[piece], edge[piece + 1]) for edge in edges] for piece in range(len(order))]
    check_merged(subject, spec, options, pieces, f"keys cut at {cuts}", order)


PROPERTIES = (
    Property(
        "LSE",
        "lse-values",
        "lse is [query tokens, heads], in the base that is declared, and right by value, also for as many tokens as heads",
        _square,
        _value_is_right,
    ),
    Property(
        "LSE",
        "lse-given",
        "a given out and lse are written in full, and out has the same bits with an lse, without one, and with nothing given",
        _anything,
        _given_lse_is_written,
        needs=frozenset({"out"}),
    ),
    Property(
        "LSE",
        "cut-keys",
        "keys cut anywhere, pieces without keys included, attended to apart in any order and merged by lse are one pass",
        _cuts,
        _pieces_merge_into_one_pass,
    ),
)
