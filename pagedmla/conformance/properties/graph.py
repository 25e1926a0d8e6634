"""GRAPH: a call that is prepared once is right at every later step, whatever its tensors hold by then.

On CUDA the prepared call is captured in a graph, and each step replays it.  Elsewhere it is run again: a plan, a split count or
an address that was kept from the first step shows there too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Prepared
from pagedmla.conformance.builder import Call
from pagedmla.conformance.properties.mem import nan_outputs
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import seeds
from pagedmla.conformance.subject import (
    Broken,
    Step,
    Subject,
    raised_errors_are_broken,
    unwritten_memory_is_nan,
)

_MOST_SEQS, _MOST_STEPS = 4, 8
_WARM_UPS = 2
# what a sequence of a bucket may grow to, in tokens, if its pages are not larger
_MOST_CAPACITY = 256

Raw = tuple[Tensor, Tensor | None]
Walk = tuple[tuple[BatchSpec, ...], bool, Any]
"""Batches whose tensors all have the same shapes, whether out and lse are given, and a way of being called."""


@st.composite
def _steps(
    draw: st.DrawFn,
    scope: Scope,
    kinds: tuple[str, ...],
    q_lens: tuple[tuple[int, ...], ...] | None = None,
    count: int | None = None,
    rows: int = 0,
) -> Walk:
    """Steps in one bucket: fixed numbers of sequences, query rows, table columns and pages.

    Args:
        kinds: of each step's lengths: "live" short ones, "full" ones at capacity, "dead" ones, "any".
        q_lens: query tokens of each sequence at each step; None: the same number for all, drawn once.
        count: sequences; None: drawn.
        rows: query rows in all, where ``q_lens`` is given; those that no sequence has come last.
    """
    count = draw(st.integers(1, _MOST_SEQS)) if count is None else count
    page_size = scope.configuration.spec(()).page_size
    width = draw(st.integers(1, max(1, min(_MOST_CAPACITY, scope.configuration.most_keys) // page_size)))
    pool = count * width + draw(st.integers(0, 3))
    even = (draw(st.sampled_from((1, 1, 2))),) * count
    lengths = {
        "live": st.integers(1, min(3, width * page_size)),
        "full": st.just(width * page_size),
        "dead": st.just(0),
        "any": _lengths(page_size, width * page_size),
    }
    specs = []
    for step, kind in enumerate(kinds):
        lens = tuple(draw(st.lists(lengths[kind], min_size=count, max_size=count)))
        mine = even if q_lens is None else q_lens[step]
        after = 0 if q_lens is None else rows - sum(mine)
        pages = [-(-length // page_size) for length in lens]
        room = {"spare_pages": pool - sum(pages), "spare_columns": width - max(pages), "rows_after": after}
        drawn = {"seed": draw(seeds), "layout_seed": draw(seeds)}
        specs.append(scope.configuration.spec(lens, q_lens=mine, **room, **drawn))
    given = "out" in scope.adapter.features and draw(st.booleans())
    return tuple(specs), given, draw(scope.options())


def _lengths(page_size: int, capacity: int) -> st.SearchStrategy[int]:
    edges = {0, 1, page_size, page_size + 1, capacity - 1, capacity}
    return st.one_of(st.sampled_from(sorted(n for n in edges if n <= capacity)), st.integers(0, capacity))


@st.composite
def _walks(draw: st.DrawFn, scope: Scope) -> Walk:
    return draw(_steps(scope, ("any",) * draw(st.integers(3, _MOST_STEPS))))


@st.composite
def _growth(draw: st.DrawFn, scope: Scope) -> Walk:
    """Captured with short live sequences, or with none; then full, dead and mixed, in any order."""
    first = draw(st.sampled_from(("live", "live", "dead")))
    return draw(_steps(scope, (first, *draw(st.permutations(("full", "dead", "any"))), "any")))


@st.composite
def _ragged_walks(draw: st.DrawFn, scope: Scope) -> Walk:
    """Query tokens move between sequences, and to rows of nobody; the first step has the most that one sequence ever has."""
    steps, count, most = draw(st.integers(3, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    counts = st.lists(st.integers(0, most), min_size=count, max_size=count)
    drawn = [tuple(draw(counts)) for _ in range(steps)]
    drawn[0] = (most, *drawn[0][1:])
    # a row more than all could have, so that every step is a ragged one
    return draw(_steps(scope, ("any",) * steps, tuple(drawn), count, count * most + 1))


def _every_step_is_right(subject: Subject, example: Walk) -> None:
    specs, given, options = example
    for spec in specs:
        subject.require(spec, options)
    call = subject.build(specs[0])
    out, lse = nan_outputs(subject, specs[0], options) if given else (None, None)
    done = [Step(specs[0], options, "prepared")]
    try:
        with raised_errors_are_broken(done[0]):
            run, refresh = _prepared(subject, call, options, out, lse)
        for number, spec in enumerate(specs):
            if number:
                done.append(Step(spec, options, f"the same tensors at step {number}"))
                _overwrite(call, subject.build(spec))
            for tensor in (out, lse):
                if tensor is not None:
                    tensor.fill_(math.nan)
            with raised_errors_are_broken(done[-1]):
                if number:
                    refresh()
                raw = run()
            subject.check(subject.normalise(*raw, spec, options), spec, options)
    except Broken as broken:
        raise Broken(f"{broken.detail}: {done[-1].note}", *done) from broken


def _overwrite(call: Call, step: Call) -> None:
    """What an engine does: the next step's content in the same memory."""
    for name in ("q", "kv_cache", "block_table", "seq_lens", "cu_seqlens_q"):
        tensor = getattr(call, name)
        if tensor is not None:
            tensor.copy_(getattr(step, name))


def _prepared(
    subject: Subject, call: Call, options: Any, out: Tensor | None, lse: Tensor | None
) -> tuple[Callable[[], Raw], Callable[[], None]]:
    """(what runs a step, what refreshes metadata before it)."""
    with unwritten_memory_is_nan():
        prepared = subject.adapter.prepare(call, options, out, lse)
    if subject.device.type == "cuda":
        return _captured(prepared, subject.device), prepared.refresh

    def again() -> Raw:
        with unwritten_memory_is_nan():
            return prepared.run()

    return again, prepared.refresh


def _captured(prepared: Prepared, device: torch.device) -> Callable[[], Raw]:
    """``prepared.run`` as a graph.  Its outputs are those of the capture, full of nan before each replay."""
    with torch.cuda.device(device):
        # what a first call compiles, loads and allocates may not happen inside of a capture
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                prepared.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            raw = prepared.run()

    def replay() -> Raw:
        for tensor in raw:
            if tensor is not None:
                tensor.fill_(math.nan)
        with torch.cuda.device(device):
            graph.replay()
        return raw

    return replay


def _walk(name: str, promise: str, examples: Callable[[Scope], st.SearchStrategy[Any]]) -> Property:
    needs = frozenset({"graph"})
    # every example is several steps
    return Property("GRAPH", name, promise, examples, _every_step_is_right, needs=needs, share=0.5)


PROPERTIES = (
    _walk(
        "replayed-walk",
        "a call that was captured once is right at every step, with new queries, keys, pages and lengths in the same tensors",
        _walks,
    ),
    _walk(
        "replayed-growth",
        "a call that was captured with short sequences, or none, is right with full ones, and with dead ones after that",
        _growth,
    ),
    _walk(
        "replayed-ragged",
        "a call that was captured once is right when query tokens move between sequences, and to padding rows",
        _ragged_walks,
    ),
)
