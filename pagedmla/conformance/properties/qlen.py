"""QLEN: several query tokens of a sequence in one call are as many calls of one token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pagedmla.conformance.builder import Batch, Call, draw_batch, lay_out
from pagedmla.conformance.changed_calls import check_changed
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import specs
from pagedmla.conformance.subject import Broken, Result, Step, Subject, first_difference

_MOST_QUERIES = 8
_INVARIANT = {"batch_invariant": True}
_APART = "every query token as a sequence of its own, of the keys that it sees"

Example = tuple[BatchSpec, Any]


def _several(scope: Scope, *, even: bool, max_seqs: int = 3) -> st.SearchStrategy[BatchSpec]:
    """Batches with up to 8 query tokens a sequence, at least one in all, also more than there are keys."""
    drawn = specs(scope.configuration, max_q_len=_most_queries(scope), even=even, max_seqs=max_seqs)
    return drawn.filter(lambda spec: sum(spec.query_counts) > 0)


def _most_queries(scope: Scope) -> int:
    """Fewer for many heads: the oracle works on every row."""
    return _MOST_QUERIES if scope.configuration.spec(()).num_heads <= 64 else 4


@st.composite
def _even(draw: st.DrawFn, scope: Scope) -> Example:
    spec = draw(_several(scope, even=True))
    return replace(spec, causal=draw(st.booleans())), draw(scope.options())


@st.composite
def _ragged(draw: st.DrawFn, scope: Scope) -> Example:
    spec = draw(_several(scope, even=False))
    around: dict[str, Any] = {"rows_before": draw(st.integers(0, 2)), "rows_after": draw(st.integers(0, 2))}
    return replace(spec, causal=draw(st.booleans()), **around), draw(scope.options())


def _is_right(subject: Subject, example: Example) -> None:
    spec, options = example
    subject.checked(spec, options)


@st.composite
def _unrolled(draw: st.DrawFn, scope: Scope) -> Example:
    return draw(_several(scope, even=draw(st.booleans()))), draw(scope.options())


@st.composite
def _unrolled_invariant(draw: st.DrawFn, scope: Scope) -> Example:
    return draw(_several(scope, even=draw(st.booleans()), max_seqs=2)), _INVARIANT


def one_by_one(spec: BatchSpec) -> Call:
    """The batch of ``spec`` with every query token as a sequence of its own, of the keys that it sees: S - n + j + 1."""
    batch = draw_batch(spec)
    queries, tokens = [], []
    for rows, keys in zip(batch.queries, batch.tokens, strict=True):
        for query in range(len(rows)):
            hidden = len(rows) - 1 - query if spec.causal else 0
            queries.append(rows[query : query + 1])
            tokens.append(keys[: max(0, len(keys) - hidden)])
    lens = tuple(len(keys) for keys in tokens)
    return lay_out(Batch(tuple(queries), tuple(tokens)), replace(spec, seq_lens=lens, q_lens=None, ids=None))


def _both(subject: Subject, example: Example) -> tuple[Result, Result]:
    """In one call, and token by token; both are right."""
    spec, options = example
    together = subject.checked(spec, options)
    return together, check_changed(
        subject, one_by_one(spec).to(subject.device), options, f"{_APART}; of build({spec})"
    )


def _one_call_is_many(subject: Subject, example: Example) -> None:
    _both(subject, example)


def _one_call_has_the_bits_of_many(subject: Subject, example: Example) -> None:
    spec, options = example
    difference = first_difference(*_both(subject, example))
    if difference:
        steps = Step(spec, options), Step(spec, options, _APART)
        raise Broken(f"{difference}: query tokens together and one by one, batch-invariant", *steps)


PROPERTIES = (
    Property(
        "QLEN",
        "even-queries",
        "as many query tokens for each sequence, causal or not, more than keys too, give the values of the float64 oracle",
        _even,
        _is_right,
    ),
    Property(
        "QLEN",
        "ragged-queries",
        "any number of query tokens for each sequence, none too, gives the values of the float64 oracle",
        _ragged,
        _is_right,
    ),
    Property(
        "QLEN",
        "unrolled-queries",
        "n query tokens in one call, and one by one at lengths S - n + 1 .. S, are the same values of the float64 oracle",
        _unrolled,
        _one_call_is_many,
    ),
    Property(
        "QLEN",
        "unrolled-bits",
        "in the batch-invariant mode n query tokens in one call have the same bits as one by one",
        _unrolled_invariant,
        _one_call_has_the_bits_of_many,
        needs=frozenset({"invariant"}),
    ),
)
