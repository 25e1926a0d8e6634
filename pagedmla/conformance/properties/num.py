"""NUM: float32 inside, large scores, the same bits again, and batch invariance where it is promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.conformance.builder import Batch, Call, draw_batch, lay_out
from pagedmla.conformance.changed_calls import check_changed
from pagedmla.conformance.inputs import KV_SCALE, Q_SCALE, store
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import lengths, seeds, specs
from pagedmla.conformance.subject import Broken, Result, Step, Subject, first_difference

_INVARIANT = {"batch_invariant": True}
# what all scores of a batch have in common, in nats: float16 ends at 65504
_SHIFTS = (30.0, 300.0, 3e3, 7e4, 3e5)
_MOST_SUMMED = 1500

Shifted = tuple[BatchSpec, float, Any]
Neighbours = tuple[BatchSpec, BatchSpec]


@st.composite
def _two_batches(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, BatchSpec, Any]:
    even = draw(st.booleans())
    spec, other = draw(_several(scope, even, 4)), draw(_several(scope, even, 4))
    return spec, other, draw(scope.options())


def _several(scope: Scope, even: bool, max_seqs: int) -> st.SearchStrategy[BatchSpec]:
    """Batches with up to 3 query tokens a sequence, and at least one in all."""
    drawn = specs(scope.configuration, max_q_len=3, even=even, max_seqs=max_seqs)
    return drawn.filter(lambda spec: sum(spec.query_counts) > 0)


def _again_has_the_same_bits(subject: Subject, example: tuple[BatchSpec, BatchSpec, Any]) -> None:
    spec, other, options = example
    first = subject.checked(spec, options)
    kept = Result(first.out.clone(), None if first.lse is None else first.lse.clone())
    subject.checked(other, options)
    # twice, so that what alternates between calls shows as well
    for _ in range(2):
        difference = first_difference(kept, subject.run(subject.build(spec), options))
        if difference:
            detail = f"{difference}: the same batch again, after another one"
            raise Broken(detail, Step(spec, options), Step(other, options), Step(spec, options))


@st.composite
def _neighbours(draw: st.DrawFn, scope: Scope) -> Neighbours:
    """Some sequences, and the same ones among others, in another order, with query rows of nobody around."""
    even = draw(st.booleans())
    alone, others = draw(_several(scope, even, 2)), draw(_several(scope, even, 3))
    lens, counts = alone.seq_lens + others.seq_lens, alone.query_counts + others.query_counts
    order = tuple(draw(st.permutations(range(len(lens)))))
    before, after = 0, 0
    if even:
        counts = alone.query_counts[:1] * len(lens)
    else:
        before, after = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    together = replace(
        alone,
        seq_lens=tuple(lens[place] for place in order),
        q_lens=tuple(counts[place] for place in order),
        ids=order,
        layout_seed=draw(seeds),
        rows_before=before,
        rows_after=after,
    )
    return alone, together


def _rows_are_their_own(subject: Subject, example: Neighbours) -> None:
    alone, together = example
    apart, among = subject.checked(alone, _INVARIANT), subject.checked(together, _INVARIANT)
    for place, identity in enumerate(together.ids or ()):
        if identity < len(alone.seq_lens):
            one, two = (
                result.rows(slice(spec.starts[index], spec.starts[index + 1]))
                for result, spec, index in ((apart, alone, identity), (among, together, place))
            )
            difference = first_difference(one, two)
            if difference:
                steps = Step(alone, _INVARIANT), Step(together, _INVARIANT)
                detail = (
                    f"{difference}: rows of sequence {identity} alone, and of the same one at place {place}"
                )
                raise Broken(detail, *steps)


@st.composite
def _shifted(draw: st.DrawFn, scope: Scope) -> Shifted:
    """Scores that have a large number in common, of either sign.

    A larger spread would not do: it leaves scores near 0 that are sums of huge terms, whose logarithm no float32 kernel knows.
    """
    spec = draw(specs(scope.configuration, spread=draw(st.sampled_from((0.0, 0.1, 1.7)))))
    return spec, draw(st.sampled_from(_SHIFTS)) * draw(st.sampled_from((-1, 1))), draw(scope.options())


def _shift(spec: BatchSpec, nats: float) -> Call:
    """The last number of every key is large, and that of every query too, so that all scores move by about ``nats``."""
    batch = draw_batch(spec)
    # fp8 ends early: there the query has to be the large one
    common = 16.0 if spec.cache_dtype.itemsize == 1 else 256.0
    key = store(torch.tensor(common), spec.cache_dtype, KV_SCALE)
    largest = torch.finfo(spec.q_dtype).max
    large = torch.tensor(nats / (spec.softmax_scale * common)).clamp(-largest, largest)
    query = store(large, spec.q_dtype, Q_SCALE)
    for tensors, number in ((batch.queries, query), (batch.tokens, key)):
        for tensor in tensors:
            tensor[..., -1] = number
    return lay_out(batch, spec)


def _large_scores_are_right(subject: Subject, example: Shifted) -> None:
    spec, nats, options = example
    note = f"all scores are about {nats:g}, by the last number of each query and key"
    check_changed(subject, _shift(spec, nats).to(subject.device), options, note)


@st.composite
def _long(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    """A long sequence, mostly: what is lost in a sum grows with its terms."""
    most = min(4 * scope.configuration.most_keys, _MOST_SUMMED)
    lens = (draw(st.integers(most // 2, most)), draw(lengths(1, 40)))
    return scope.configuration.spec(lens, spread=1e-3, seed=draw(seeds)), draw(scope.options())


def _long_sums_are_right(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    batch = draw_batch(spec)
    tokens = tuple(_around_one(keys, spec) for keys in batch.tokens)
    call = lay_out(Batch(batch.queries, tokens), spec).to(subject.device)
    check_changed(
        subject, call, options, "key numbers are 1 + a quarter of what build gives, so that sums grow"
    )


def _around_one(keys: Tensor, spec: BatchSpec) -> Tensor:
    scale = KV_SCALE if spec.cache_dtype.itemsize == 1 else 1.0
    return store(1 + 0.25 * scale * keys.float(), spec.cache_dtype, KV_SCALE)


PROPERTIES = (
    Property(
        "NUM",
        "same-bits-again",
        "the same batch gives the same bits again, also after another batch",
        _two_batches,
        _again_has_the_same_bits,
    ),
    Property(
        "NUM",
        "batch-invariance",
        "in the batch-invariant mode a row's bits depend on no neighbour, no order and no padding row",
        _neighbours,
        _rows_are_their_own,
        needs=frozenset({"invariant"}),
    ),
    Property(
        "NUM",
        "large-scores",
        "scores past 65504, above and below zero, stay within the derived bound of the float64 oracle",
        _shifted,
        _large_scores_are_right,
    ),
    Property(
        "NUM",
        "long-sums",
        "sums over many keys that count alike stay within the derived bound, which has them in float32",
        _long,
        _long_sums_are_right,
        share=0.5,
    ),
)
