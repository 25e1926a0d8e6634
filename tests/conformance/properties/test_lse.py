"""The LSE properties hold for a right decode and honour declared conventions; the bound of a merge is one, and is met."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conformance.properties.questions import (
    Answering,
    Decoded,
    each,
    each_configuration,
    each_fault,
    expect_broken,
    expect_kept,
    right,
    verdict,
)
from torch import Tensor

from pagedmla.conformance.adapters.adapter import Conventions, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.builder import Call
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.merging import merge, merged_bound, merged_difference
from pagedmla.conformance.numerics import LSE_ABSOLUTE, LSE_RELATIVE, Expected
from pagedmla.conformance.properties.lse import PROPERTIES
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.subject import Result

BY_NAME = {prop.name: prop for prop in PROPERTIES}


@each(PROPERTIES)
@each_configuration
def test_our_torch_backend_keeps_the_promise(configuration: Configuration, prop: Property) -> None:
    expect_kept(Ours("torch"), prop, configuration, 2)


@each(PROPERTIES)
def test_our_torch_backend_keeps_it_for_many_small_batches(prop: Property) -> None:
    assert expect_kept(Ours("torch"), prop).examples > 3


def base_two(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out, lse / math.log(2)


def transposed_where_sizes_allow(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out, lse.T.contiguous() if lse.shape[0] == lse.shape[1] else lse


def folded_shape(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out, lse.reshape(-1, 2) if lse.numel() % 2 == 0 else lse


def finite_for_empty_rows(call: Call, options: Options) -> Decoded:
    out, lse = right(call, options)
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


def last_key_missing_from_lse(call: Call, options: Options) -> Decoded:
    shorter = torch.where(call.seq_lens > 1, call.seq_lens - 1, call.seq_lens)
    return right(call, options)[0], right(call, options, seq_lens=shorter)[1]


FAULTS = [
    ("lse-values", base_two),
    ("lse-values", transposed_where_sizes_allow),
    ("lse-values", folded_shape),
    ("lse-given", finite_for_empty_rows),
    ("cut-keys", base_two),
    ("cut-keys", finite_for_empty_rows),
    ("cut-keys", last_key_missing_from_lse),
]


class GivenLse(Ours):
    """Does something else when an lse is given.

    Attributes:
        fault: "unwritten" leaves the given one alone; "rounded" gives out other bits.
    """

    def __init__(self, fault: str) -> None:
        super().__init__("torch")
        self.fault = fault

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        def run() -> Decoded:
            own_out, own_lse = right(call, options)
            if lse is not None and self.fault == "rounded":
                own_out = (own_out.view(torch.int16) ^ 1).view(own_out.dtype)
            elif lse is not None:
                return out.copy_(own_out), own_lse  # type: ignore[union-attr]
            return own_out if out is None else out.copy_(own_out), own_lse if lse is None else lse.copy_(
                own_lse
            )

        return PreparedCall(run)


@pytest.mark.parametrize("fault", ["unwritten", "rounded"])
def test_an_lse_that_is_given_is_written_and_changes_nothing(fault: str) -> None:
    assert verdict(GivenLse(fault), BY_NAME["lse-given"]).status == "failed"


class OtherConventions(Answering):
    """Base 2, +inf and nan for empty rows, bfloat16: odd, declared, and right."""

    features = frozenset({"out"})
    conventions = Conventions(2.0, torch.bfloat16, math.inf, math.nan)

    def __init__(self) -> None:
        super().__init__(self.answer)

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        return replace(self.conventions, p_dtype=super().conventions_for(spec, options, device).p_dtype)

    def answer(self, call: Call, options: Options) -> Decoded:
        out, lse = right(call, options)
        empty = lse == -math.inf
        lse = (lse / math.log(2)).masked_fill(empty, math.inf).bfloat16()
        return out.masked_fill(empty[..., None], math.nan), lse


@each(PROPERTIES)
def test_declared_conventions_are_honoured(prop: Property) -> None:
    expect_kept(OtherConventions(), prop)


@each(PROPERTIES)
def test_nothing_is_held_against_one_without_lse(prop: Property) -> None:
    class Without(Answering):
        def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
            return replace(super().conventions_for(spec, options, device), lse_base=None)

    found = verdict(Without(right), prop, examples=3)
    assert (found.status, found.detail) == ("refused", "returns no lse")


def states(logs: list[float], seed: int = 0) -> list[Expected]:
    """Exact results of pieces: one row, one head, as many components as a bound needs to be tried often."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Expected(
            torch.zeros(1, 1, 400).double() if log == -math.inf else _normal(generator),
            torch.full((1, 1), log).double(),
            torch.zeros(1, 1, 400).double() if log == -math.inf else 1e-3 * _normal(generator).abs(),
        )
        for log in logs
    ]


def _normal(generator: torch.Generator) -> Tensor:
    return torch.randn(1, 1, 400, generator=generator).double()


def moved(piece: Expected, out_by: Tensor, lse_by: float) -> Result:
    """What a kernel returns that is off by these parts of what it may be off."""
    allowed = LSE_ABSOLUTE + LSE_RELATIVE * piece.lse.abs()
    lse = torch.where(piece.lse == -math.inf, piece.lse, piece.lse + lse_by * allowed)
    return Result(piece.out + out_by * piece.bound, lse)


LOGS = ([3.0], [3.0, 3.5], [3.0, -200.0, 2.0], [-math.inf, 40.0, 41.0, -math.inf], [9e4, 9e4 - 1, 8.9e4])


def whole_of(pieces: list[Expected]) -> Expected:
    out, lse = merge([Result(piece.out, piece.lse) for piece in pieces])
    return Expected(out, lse, torch.zeros_like(out))


@pytest.mark.parametrize("logs", LOGS, ids=str)
def test_pieces_within_their_bounds_merge_within_the_bound(logs: list[float]) -> None:
    pieces = states(logs)
    bound, whole = merged_bound(pieces), whole_of(pieces)
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        signs = [torch.sign(_normal(generator)) for _ in pieces]
        parts = [1.0 if torch.rand(1, generator=generator) < 0.5 else -1.0 for _ in pieces]
        results = [moved(*each) for each in zip(pieces, signs, parts, strict=True)]
        assert merged_difference(merge(results), whole, bound) == ""


@pytest.mark.parametrize("logs", LOGS[1:3], ids=str)
def test_the_bound_of_a_merge_is_nearly_met(logs: list[float]) -> None:
    """Errors that all lean the worst way come to most of it: it is a bound, and not a margin."""
    pieces = states(logs)
    bound, whole = merged_bound(pieces), whole_of(pieces)
    heavier = [1.0 if piece.lse.item() == max(logs) else -1.0 for piece in pieces]
    lean = torch.sign(pieces[logs.index(max(logs))].out - whole.out)
    apart = [moved(piece, lean, part) for piece, part in zip(pieces, heavier, strict=True)]
    assert ((merge(apart)[0] - whole.out).abs() / bound.out).max() > 0.9
    together = [moved(piece, lean, 1.0) for piece in pieces]
    assert ((merge(together)[1] - whole.lse).abs() / bound.lse).max() > 0.9
    beyond = [moved(piece, 2.5 * lean, part) for piece, part in zip(pieces, heavier, strict=True)]
    assert "out[0, 0" in merged_difference(merge(beyond), whole, bound)
    far = [Result(piece.out, piece.lse + 3e-4 + 3e-5 * piece.lse.abs()) for piece in pieces]
    assert "lse[0, 0]" in merged_difference(merge(far), whole, bound)


def test_pieces_without_keys_are_the_identity() -> None:
    piece, empty = states([1.5, -math.inf])
    out, lse = merge([Result(p.out, p.lse) for p in (empty, piece, empty)])
    assert torch.equal(out, piece.out)
    assert torch.equal(lse, piece.lse)
    out, lse = merge([Result(empty.out, empty.lse)] * 2)
    assert torch.equal(out, empty.out)
    assert torch.equal(lse, empty.lse)
    bound = merged_bound([empty, empty])
    assert not bound.out.any()
    assert not bound.lse.any()
    wrong = Result(empty.out, torch.zeros(1, 1))
    assert merged_difference(merge([wrong]), whole_of([empty]), bound)


def test_a_nan_of_a_piece_stays_visible() -> None:
    pieces = states([1.5, -300.0])
    bad = pieces[1].out.clone()
    bad[..., 7] = math.nan
    merged = merge([Result(pieces[0].out, pieces[0].lse), Result(bad, pieces[1].lse)])
    assert "[0, 0, 7] is nan" in merged_difference(merged, whole_of(pieces), merged_bound(pieces))


@each_fault(FAULTS)
def test_a_fault_is_caught(name: str, faulty: Callable[[Call, Options], Decoded]) -> None:
    expect_broken(Answering(faulty), BY_NAME[name])


def test_every_property_can_fail() -> None:
    assert {name for name, _ in FAULTS} == set(BY_NAME)
