"""EMPTY: rows without keys, padded rows and batches without rows: what the conventions say, and no neighbour notices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from pagedmla.conformance.builder import GARBAGE_CELLS
from pagedmla.conformance.properties.arch import run_or_refuse
from pagedmla.conformance.properties.mem import nan_outputs
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import lengths, seeds
from pagedmla.conformance.subject import Broken, Step, Subject, first_difference

_HOLES = (0, 0, 0, 1)
"""Keys of a padding row: engines pad with 0, or with 1."""


@st.composite
def _holed(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, tuple[int, ...]]:
    """A batch, and which of its sequences are holes, at any position; some rows have more queries than keys."""
    page_size = scope.configuration.spec((1,)).page_size
    lens = draw(st.lists(lengths(page_size, scope.configuration.most_keys, least=1), min_size=1, max_size=3))
    live = [True] * len(lens)
    for length in draw(st.lists(st.sampled_from(_HOLES), min_size=1, max_size=3)):
        place = draw(st.integers(0, len(lens)))
        lens.insert(place, length)
        live.insert(place, False)
    spec = scope.configuration.spec(tuple(lens), seed=draw(seeds), layout_seed=draw(seeds))
    # more queries than a tile has rows; few where there are many heads, or the oracle takes seconds
    q_len = draw(st.sampled_from((1, 1, 2, 5, 20 if spec.num_heads <= 16 else 3)))
    if q_len > 1:
        spec = replace(spec, q_lens=(q_len,) * len(lens))
        if draw(st.booleans()):
            counts = st.integers(0, q_len)
            spec = replace(
                spec,
                q_lens=tuple(draw(counts) for _ in lens),
                rows_before=draw(st.integers(0, 2)),
                rows_after=draw(st.integers(0, 3)),
            )
    return spec, tuple(place for place, alive in enumerate(live) if not alive)


@st.composite
def _two_contents(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, tuple[int, ...], int, str, Any]:
    """A holed batch, its holes, another cell for their table rows, another poison, options."""
    spec, holes = draw(_holed(scope))
    cell, poison = draw(st.sampled_from(GARBAGE_CELLS)), draw(scope.poisons())
    return spec, holes, cell, poison, draw(scope.options())


def _holes_are_inert(subject: Subject, example: tuple[BatchSpec, tuple[int, ...], int, str, Any]) -> None:
    spec, holes, cell, poison, options = example
    one = subject.checked(spec, options)
    # a padding row of one key gets other queries and another token, a hole other garbage
    ids = tuple(1000 + place if place in holes else place for place in range(len(spec.seq_lens)))
    other = replace(spec, ids=ids, poison=poison)
    call = subject.build(other)
    table = call.block_table.clone()
    for place in holes:
        table[place, 0 if spec.seq_lens[place] == 0 else 1 :] = cell
    two = subject.run(replace(call, block_table=table), options)
    note = f"cells that the padding rows do not own are {cell}"
    subject.check(two, other, options, note)
    starts = spec.starts
    rows = [
        row
        for place in range(len(spec.seq_lens))
        if place not in holes
        for row in range(starts[place], starts[place + 1])
    ]
    live = torch.tensor(rows, dtype=torch.int64, device=subject.device)
    difference = first_difference(one.rows(live), two.rows(live))
    if difference:
        detail = f"{difference}, rows of live sequences alone: only what padding rows hold is another"
        raise Broken(detail, Step(spec, options), Step(other, options, note))


@st.composite
def _stale(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    return draw(_holed(scope))[0], draw(scope.options())


def _stale_outputs_are_overwritten(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    subject.require(spec, options)
    out, lse = nan_outputs(subject, spec, options)
    subject.run(subject.build(spec), options, out, lse)
    # what was given is judged, not what came back
    note = "out and lse given, full of nan"
    subject.check(subject.normalise(out, lse, spec, options), spec, options, note)


@st.composite
def _all_dead(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    """Nothing but sequences without keys, over a table and a pool as small as they get."""
    count, q_len = draw(st.integers(1, 5)), draw(st.sampled_from((1, 1, 3)))
    # a table of no columns is a corner of its own: it is asked of those who answer for odd values
    narrow = (0,) if "bounded" in scope.adapter.features else ()
    spec = scope.configuration.spec(
        (0,) * count,
        q_lens=(q_len,) * count,
        spare_pages=draw(st.sampled_from((0, 1, 4))),
        spare_columns=draw(st.sampled_from((*narrow, 1, 3))),
        poison=draw(scope.poisons()),
    )
    return spec, draw(scope.options())


def _dead_batches_are_right(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    subject.checked(spec, options)


@st.composite
def _no_rows(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, Any]:
    """No sequences, or sequences without queries, and perhaps rows of nobody."""
    seq_lens = tuple(draw(st.lists(st.integers(0, 70), max_size=3)))
    spec = scope.configuration.spec(seq_lens, q_lens=(0,) * len(seq_lens), seed=draw(seeds))
    return replace(spec, rows_after=draw(st.sampled_from((0, 0, 2)))), draw(scope.options())


def _no_rows_in_no_rows_out(subject: Subject, example: tuple[BatchSpec, Any]) -> None:
    spec, options = example
    subject.require(spec, options)
    result = run_or_refuse(subject, subject.build(spec), options)
    subject.check(result, spec, options)


PROPERTIES = (
    Property(
        "EMPTY",
        "inert-holes",
        "what padding rows of 0 or 1 keys and their table rows hold changes no bit of a live row, wherever they stand",
        _two_contents,
        _holes_are_inert,
    ),
    Property(
        "EMPTY",
        "stale-outputs",
        "out and lse that hold nan are written in every row, those without keys too",
        _stale,
        _stale_outputs_are_overwritten,
        needs=frozenset({"out"}),
    ),
    Property(
        "EMPTY",
        "all-dead",
        "a batch in which nobody has a key gives rows without keys, as the conventions say",
        _all_dead,
        _dead_batches_are_right,
        share=0.5,
    ),
    Property(
        "EMPTY",
        "no-rows",
        "a batch without sequences or without queries gives an empty result, or is refused",
        _no_rows,
        _no_rows_in_no_rows_out,
        share=0.5,
    ),
)
