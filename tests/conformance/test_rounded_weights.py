"""An lse of weights that were rounded before their sum: no fault where it is declared, and held to the bound derived for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from batches import arguments, make_batch
from conformance.properties.questions import CPU, SMALL, Answering, Decoded, Raw, verdict
from torch import Tensor

from pagedmla import reference
from pagedmla.conformance import numerics
from pagedmla.conformance.adapters import make_adapter
from pagedmla.conformance.adapters.adapter import Conventions, Options
from pagedmla.conformance.adapters.flashinfer import FlashInfer
from pagedmla.conformance.builder import Call
from pagedmla.conformance.merging import merged_bound
from pagedmla.conformance.properties import properties_of
from pagedmla.conformance.properties.property import Property
from pagedmla.conformance.spec import BatchSpec

ROUNDED = (torch.bfloat16, torch.float16)
LENGTHS = (1, 2, 17, 64, 131, 400)
# of every kind that looks at lse in a way of its own
ASKED = [
    prop
    for kind, name in (
        ("LSE", "lse-values"),
        ("LSE", "cut-keys"),
        ("DCP", "sharded-keys"),
        ("NUM", "long-sums"),
        ("PAGE", "moved-pages"),
        ("QLEN", "unrolled-queries"),
        ("SPLIT", "flat-softmax"),
    )
    for prop in properties_of(kind)
    if prop.name == name
]


def attend_rounded(part: reference.SequenceAttention, scale: float, p_dtype: torch.dtype) -> Raw:
    """A streaming float32 decode of one sequence that sums the rounded weights, as FlashInfer's fa2 does."""
    queries, keys, values = part.queries.float(), part.keys.float(), part.values.float()
    state = torch.zeros(*queries.shape[:2], values.shape[1])
    total, largest = torch.zeros(queries.shape[:2]), torch.full(queries.shape[:2], -math.inf)
    for start in range(0, len(keys), 64):
        block = slice(start, start + 64)
        scores = queries @ keys[block].T * scale
        scores = scores.masked_fill(part.scores[..., block] == -math.inf, -math.inf)
        highest = torch.maximum(largest, scores.amax(-1))
        weights = torch.exp(scores - highest[..., None]).nan_to_num(nan=0.0).to(p_dtype).float()
        rescale = torch.exp(largest - highest).nan_to_num(nan=0.0)
        state = state * rescale[..., None] + weights @ values[block]
        total, largest = total * rescale + weights.sum(-1), highest
    lse = largest + torch.log(total)
    return (state / total[..., None]).masked_fill((total == 0)[..., None], 0.0), lse


def decode_rounded(call: Call, options: Options) -> Decoded:
    """In the queries' dtype."""
    out = torch.zeros(*call.q.shape[:2], call.kv_lora_rank, dtype=call.q.dtype)
    lse = torch.full(call.q.shape[:2], -math.inf)
    tensors = call.q, call.kv_cache, call.block_table, call.seq_lens
    for part in reference.attend(*tensors, **call.semantics()):  # type: ignore[arg-type]
        if len(part.keys):
            own, own_lse = attend_rounded(part, call.softmax_scale, call.q.dtype)
            assert own_lse is not None
            out[part.rows], lse[part.rows] = own.to(out.dtype), own_lse
    return out, lse


class SumsRounded(Answering):
    """Says so, or does not; ``off`` is added to lse."""

    def __init__(self, declared: bool, off: float = 0.0) -> None:
        super().__init__(
            lambda call, options: (lambda out, lse: (out, lse + off))(*decode_rounded(call, options))
        )
        self.conventions = Conventions(lse_of_rounded_weights=declared)

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        return self.conventions


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("prop", ASKED, ids=lambda prop: prop.name)
class TestDeclared:
    """The same implementation, asked with and without its declaration."""

    def test_it_is_no_fault(self, prop: Property, dtype: str) -> None:
        configuration = replace(SMALL, fields={**SMALL.fields, "dtype": dtype})
        found = verdict(SumsRounded(declared=True), prop, configuration)
        assert found.status == "passed", found.detail

    def test_undeclared_it_is_one(self, prop: Property, dtype: str) -> None:
        configuration = replace(SMALL, fields={**SMALL.fields, "dtype": dtype})
        found = verdict(SumsRounded(declared=False), prop, configuration)
        assert found.status == "failed"
        assert found.detail.startswith("lse[")

    def test_no_more_than_that_is_let_through(self, prop: Property, dtype: str) -> None:
        configuration = replace(SMALL, fields={**SMALL.fields, "dtype": dtype})
        off = {"bf16": 2.0**-7, "fp16": 2.0**-10}[dtype]
        found = verdict(SumsRounded(declared=True, off=off), prop, configuration)
        assert found.status == "failed"
        assert found.detail.startswith("lse[")


@pytest.mark.parametrize("p_dtype", ROUNDED)
@pytest.mark.parametrize("spread", [0.01, 1.7, 6.0, 40.0])
def test_a_rounded_sum_stays_within_the_slack(p_dtype: torch.dtype, spread: float) -> None:
    batch = make_batch(list(LENGTHS), num_heads=16, q_dtype=p_dtype, spread=spread)
    call = arguments(batch)
    expected = numerics.expect(**call, out_dtype=p_dtype, p_dtype=p_dtype, lse_of_rounded_weights=True)
    assert expected.lse_slack is not None
    for part in reference.attend(**call):
        _, lse = attend_rounded(part, batch.softmax_scale, p_dtype)
        assert lse is not None
        off = (lse.double() - part.lse).abs()
        assert bool((off <= numerics.lse_tolerance(expected)[part.rows]).all())
    # a key that stands alone has weight 1, which nothing rounds
    assert bool((expected.lse_slack[0] == 0).all())
    assert bool((expected.lse_slack <= -math.log1p(-numerics._unit_roundoff(p_dtype)) + 1e-4).all())


def part_of(weights: Tensor) -> reference.SequenceAttention:
    """One row whose keys have these weights, relative to the largest."""
    scores = weights.double().log()[None, None]
    keys = torch.zeros(len(weights), 8, dtype=torch.float64)
    part = next(iter(reference.attend(**arguments(make_batch([len(weights)], num_heads=1)))))
    return replace(
        part,
        scores=scores,
        probabilities=scores.softmax(-1),
        lse=scores.logsumexp(-1),
        keys=keys,
        values=keys,
    )


@pytest.mark.parametrize("p_dtype", ROUNDED)
@pytest.mark.parametrize("lean", [1, -1])
def test_the_slack_is_no_wider_than_it_must_be(p_dtype: torch.dtype, lean: int) -> None:
    """Weights next to the middle between two numbers of the dtype, all rounded the same way, use nearly all of it."""
    u = torch.finfo(p_dtype).eps / 2
    weight = 0.5 + u / 2 + lean * u * 1e-3
    weights = torch.tensor([1.0, *[weight] * 999], dtype=torch.float64)
    rounded = weights.to(p_dtype).double()
    assert float(rounded[1]) == (0.5 if lean < 0 else 0.5 + u)
    off = abs(math.log(rounded.sum()) - math.log(weights.sum()))
    slack = numerics.lse_slack(part_of(weights), p_dtype).item()
    assert 0.95 * slack < off <= slack


def test_the_slack_by_hand() -> None:
    """Two keys alike, bfloat16: u (1 - 1/2), and next to nothing from the bottom of its range."""
    slack = numerics.lse_slack(part_of(torch.tensor([1.0, 1.0])), torch.bfloat16).item()
    assert slack == pytest.approx(-math.log1p(-(2.0**-9)), rel=1e-12)
    # float16: half the smallest subnormal, 2^-25, for each key but the first
    slack = numerics.lse_slack(part_of(torch.tensor([1.0, 2.0**-30, 2.0**-30])), torch.float16).item()
    assert slack == pytest.approx(2 * 2.0**-25, rel=1e-3)
    assert numerics.lse_slack(part_of(torch.tensor([1.0, 1.0])), torch.float32).item() == 0.0


def test_a_row_without_keys_has_none() -> None:
    call = arguments(make_batch([0, 3], [1, 5]))
    expected = numerics.expect(
        **call, out_dtype=torch.bfloat16, p_dtype=torch.bfloat16, lse_of_rounded_weights=True
    )
    assert expected.lse_slack is not None
    blind = expected.lse == -math.inf
    assert bool((expected.lse_slack[blind] == 0).all())
    assert bool(numerics.lse_tolerance(expected).isfinite().all())


def test_the_slack_of_pieces_is_in_their_merge() -> None:
    expected = numerics.expect(
        **arguments(make_batch([40])),
        out_dtype=torch.bfloat16,
        p_dtype=torch.bfloat16,
        lse_of_rounded_weights=True,
    )
    assert expected.lse_slack is not None
    plain = merged_bound([replace(expected, lse_slack=None)])
    bound = merged_bound([expected])
    torch.testing.assert_close(bound.lse - plain.lse, expected.lse_slack, rtol=1e-9, atol=0.0)
    assert bool((bound.out >= plain.out).all())


def test_fa2_alone_declares_it() -> None:
    spec = BatchSpec((5,))
    for kernel in ("fa2", "fa3", "auto"):
        adapter = FlashInfer(kernel)
        assert adapter.conventions_for(spec, {}, CPU).lse_of_rounded_weights == (kernel == "fa2")
    assert any("rounded" in said for said in make_adapter("flashinfer_fa2").conventions.deviations())
    for name in ("flashinfer_fa3", "flashinfer:pagedmla.compat.flashinfer", "pagedmla", "flash_mla", "fa3"):
        assert not make_adapter(name).conventions.lse_of_rounded_weights


@pytest.mark.parametrize(
    ("conventions", "said"),
    [
        (Conventions(), ()),
        (Conventions(p_dtype=torch.float32), ()),
        (
            Conventions(lse_base=None, lse_of_rounded_weights=True, empty_lse=math.nan),
            ("no lse is returned",),
        ),
        (
            Conventions(lse_base=2.0, lse_of_rounded_weights=True),
            ("lse has base 2", "lse is of the sum of weights that were rounded to the queries' dtype"),
        ),
        (
            Conventions(lse_dtype=torch.float16, p_dtype=torch.bfloat16, lse_of_rounded_weights=True),
            ("lse is float16", "lse is of the sum of weights that were rounded to bfloat16"),
        ),
        (
            Conventions(empty_lse=math.inf, empty_out=math.nan, out_dtype=torch.float32),
            (
                "lse of a row that sees no key is inf",
                "out of a row that sees no key is unspecified",
                "out is float32",
            ),
        ),
    ],
)
def test_what_is_declared_is_said_in_words(conventions: Conventions, said: tuple[str, ...]) -> None:
    assert conventions.deviations() == said
