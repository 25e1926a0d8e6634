"""SHAPE: every head count and every latent dimension that is accepted is right, in all rows and all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import seeds, specs
from pagedmla.conformance.subject import Result, Subject

MOST_HEADS = 130
_EDGES = (1, 8, 12, 16, 17, 24, 32, 40, 64, 65, 96, 127, 128, 129)
"""Those that models have on some number of devices, and both sides of a tile's edges."""
DIMS = ((512, 64), (256, 64), (256, 32), (128, 32), (512, 0))
"""(kv_lora_rank, qk_rope_head_dim) of the model families."""
# an oracle in float64 with many heads is slow, and head counts need few keys to go wrong
_MOST_KEYS = 150

_heads = st.one_of(st.sampled_from(_EDGES), st.integers(1, MOST_HEADS))


@st.composite
def _batch(draw: st.DrawFn, scope: Scope, **fixed: object) -> BatchSpec:
    """Two sequences or three, so that a row that is taken for the first one's shows; one query token each, or a few."""
    keys = st.integers(1, min(_MOST_KEYS, scope.configuration.most_keys))
    seq_lens = tuple(draw(st.lists(keys, min_size=2, max_size=3)))
    q_len = draw(st.sampled_from((1, 1, 2)))
    drawn: dict[str, object] = {"seed": draw(seeds), "layout_seed": draw(seeds)}
    return scope.configuration.spec(seq_lens, q_lens=(q_len,) * len(seq_lens), **drawn, **fixed)


@st.composite
def _head_counts(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    return draw(_batch(scope, num_heads=draw(_heads))), draw(scope.options())


@st.composite
def _dims(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    rank, rope = draw(st.sampled_from(DIMS))
    heads = draw(st.one_of(st.just(scope.configuration.spec((1,)).num_heads), st.integers(1, 40)))
    return draw(_batch(scope, kv_lora_rank=rank, qk_rope_head_dim=rope, num_heads=heads)), draw(
        scope.options()
    )


def _is_right(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    subject.checked(spec, options)


@st.composite
def _cuts(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, tuple[int, ...], Any]:
    """A batch, and the heads before which it is cut, as tensor parallelism cuts it."""
    spec = draw(specs(scope.configuration, max_seqs=2, least=1, num_heads=draw(st.integers(2, MOST_HEADS))))
    cuts = draw(st.sets(st.integers(1, spec.num_heads - 1), min_size=1, max_size=3))
    return spec, tuple(sorted(cuts)), draw(scope.options())


def _heads_do_not_know_each_other(subject: Subject, example: tuple[BatchSpec, tuple[int, ...], Any]) -> None:
    spec, cuts, options = example
    subject.checked(spec, options)
    call = subject.build(spec)
    results = []
    for start, stop in zip((0, *cuts), (*cuts, spec.num_heads), strict=True):
        part = replace(spec, num_heads=stop - start)
        results.append(subject.run(replace(call, q=call.q[:, start:stop].contiguous(), spec=part), options))
    lses = [result.lse for result in results if result.lse is not None]
    whole = Result(torch.cat([result.out for result in results], 1), torch.cat(lses, 1) if lses else None)
    note = f"heads cut before {', '.join(str(cut) for cut in cuts)}, and every range of them run alone"
    subject.check(whole, spec, options, note)


PROPERTIES = (
    Property(
        "SHAPE",
        "head-counts",
        f"every head count from 1 to {MOST_HEADS} that is accepted gives the values of the float64 oracle in every head",
        _head_counts,
        _is_right,
    ),
    Property(
        "SHAPE",
        "dimensions",
        "every pair of latent and rotated dimensions that is accepted gives the values of the float64 oracle",
        _dims,
        _is_right,
    ),
    Property(
        "SHAPE",
        "head-ranges",
        "ranges of heads that are run alone and all heads together are both right",
        _cuts,
        _heads_do_not_know_each_other,
        share=0.5,
    ),
)
