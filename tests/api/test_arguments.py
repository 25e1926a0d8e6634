"""Bad input: every argument of the public calls, wrong in every way, names itself, what was wanted and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pagedmla
from pagedmla import BatchBounds, DecodePlan, DecodeProblem, InvalidArgument, PlanMismatch, Unsupported

RANK, ROPE, HEADS, PAGE = 32, 8, 4, 16
CACHE = torch.zeros(5, PAGE, RANK + ROPE)


def good() -> dict[str, Any]:
    return {
        "q": torch.zeros(2, HEADS, RANK + ROPE),
        "kv_cache": CACHE,
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([17, 3], dtype=torch.int32),
        "softmax_scale": 0.1,
        "kv_lora_rank": RANK,
    }


def fp8(**changes: Any) -> dict[str, Any]:
    e4m3 = torch.float8_e4m3fn
    return {"q": good()["q"].to(e4m3), "kv_cache": CACHE.to(e4m3)} | changes


NAN, INF = float("nan"), float("inf")
META = {"device": "meta"}
LOW = torch.zeros(2, 2, dtype=torch.int32)

TABLE: list[tuple[dict[str, Any], type[Exception], str]] = [
    # q
    ({"q": None}, InvalidArgument, "q"),
    ({"q": [1.0, 2.0]}, InvalidArgument, "q"),
    ({"q": torch.zeros(2, RANK + ROPE)}, InvalidArgument, "q"),
    ({"q": torch.zeros(2, HEADS, RANK + ROPE, dtype=torch.float64)}, InvalidArgument, "q"),
    ({"q": torch.zeros(2, HEADS, RANK + ROPE, dtype=torch.int32)}, InvalidArgument, "q"),
    ({"q": torch.zeros(2, HEADS, RANK - 1)}, InvalidArgument, "q"),
    ({"q": torch.zeros(2, HEADS, RANK + 7)}, InvalidArgument, "q"),
    ({"q": torch.zeros(2, 0, RANK + ROPE)}, InvalidArgument, "q"),
    ({"q": torch.zeros(3, HEADS, RANK + ROPE)}, InvalidArgument, "q"),
    ({"q": torch.zeros(2, RANK + ROPE, HEADS).transpose(1, 2)}, InvalidArgument, "q"),
    ({"q": torch.zeros(2, HEADS, RANK + ROPE, dtype=torch.bfloat16)}, Unsupported, "kv_cache"),
    ({"q": (torch.zeros(2, HEADS, RANK), torch.zeros(2, HEADS + 1, ROPE))}, InvalidArgument, "q[1] (q_pe)"),
    (
        {"q": (torch.zeros(2, HEADS, RANK), torch.zeros(2, HEADS, ROPE).bfloat16())},
        InvalidArgument,
        "q[1] (q_pe)",
    ),
    ({"q": (torch.zeros(2, HEADS, RANK + 2), torch.zeros(2, HEADS, ROPE))}, InvalidArgument, "q[0] (q_nope)"),
    ({"q": (torch.zeros(2, HEADS, RANK), torch.zeros(2, HEADS, ROPE), None)}, InvalidArgument, "q"),
    # kv_cache
    ({"kv_cache": None}, InvalidArgument, "kv_cache"),
    ({"kv_cache": torch.zeros(5, RANK + ROPE)}, InvalidArgument, "kv_cache"),
    ({"kv_cache": torch.zeros(5, PAGE, RANK)}, InvalidArgument, "kv_cache"),
    ({"kv_cache": torch.zeros(5, 0, RANK + ROPE)}, InvalidArgument, "kv_cache"),
    ({"kv_cache": CACHE.double()}, InvalidArgument, "kv_cache"),
    ({"kv_cache": torch.zeros(5, RANK + ROPE, PAGE).transpose(1, 2)}, InvalidArgument, "kv_cache"),
    ({"kv_cache": CACHE.to(**META)}, InvalidArgument, "kv_cache"),
    ({"kv_cache": torch.zeros(5, PAGE, 656, dtype=torch.uint8)}, Unsupported, "kv_cache"),
    # block_table
    ({"block_table": None}, InvalidArgument, "block_table"),
    ({"block_table": LOW[0]}, InvalidArgument, "block_table"),
    ({"block_table": LOW.long()}, InvalidArgument, "block_table"),
    ({"block_table": LOW.float()}, InvalidArgument, "block_table"),
    ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, InvalidArgument, "block_table"),
    ({"block_table": LOW.to(**META)}, InvalidArgument, "block_table"),
    # seq_lens
    ({"seq_lens": [17, 3]}, InvalidArgument, "seq_lens"),
    ({"seq_lens": torch.tensor([17, 3])}, InvalidArgument, "seq_lens"),
    ({"seq_lens": LOW}, InvalidArgument, "seq_lens"),
    ({"seq_lens": LOW[0].to(**META)}, InvalidArgument, "seq_lens"),
    # cu_seqlens_q
    ({"cu_seqlens_q": [0, 1, 2]}, InvalidArgument, "cu_seqlens_q"),
    ({"cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, InvalidArgument, "cu_seqlens_q"),
    ({"cu_seqlens_q": torch.tensor([0, 1, 2])}, InvalidArgument, "cu_seqlens_q"),
    # softmax_scale
    *(
        ({"softmax_scale": value}, InvalidArgument, "softmax_scale")
        for value in (None, 0, -0.1, NAN, INF, 1e-50, 1e300, "0.1", True, torch.tensor(0.1))
    ),
    # flags, numbers, names
    ({"causal": 1}, InvalidArgument, "causal"),
    ({"causal": None}, InvalidArgument, "causal"),
    ({"batch_invariant": "yes"}, InvalidArgument, "batch_invariant"),
    ({"validate": 0}, InvalidArgument, "validate"),
    ({"kv_lora_rank": 0}, InvalidArgument, "kv_lora_rank"),
    ({"kv_lora_rank": -4}, InvalidArgument, "kv_lora_rank"),
    ({"kv_lora_rank": 32.0}, InvalidArgument, "kv_lora_rank"),
    ({"num_kv_splits": 0}, InvalidArgument, "num_kv_splits"),
    ({"num_kv_splits": -1}, InvalidArgument, "num_kv_splits"),
    ({"num_kv_splits": 1.5}, InvalidArgument, "num_kv_splits"),
    ({"num_kv_splits": True}, InvalidArgument, "num_kv_splits"),
    ({"backend": "cutlass"}, InvalidArgument, "backend"),
    ({"backend": 3}, InvalidArgument, "backend"),
    ({"backend": []}, InvalidArgument, "backend"),
    ({"num_kv_splits": 2**70}, InvalidArgument, "num_kv_splits"),
    ({"kv_lora_rank": 2**70}, InvalidArgument, "kv_lora_rank"),
    ({"kv_lora_rank": 10**12, "lse": torch.zeros(2, HEADS)}, InvalidArgument, "q"),
    ({"softmax_scale": 10**400}, InvalidArgument, "softmax_scale"),
    ({"schedule": "magic"}, InvalidArgument, "schedule"),
    ({"schedule": 3}, InvalidArgument, "schedule"),
    ({"schedule": "persistent"}, Unsupported, "schedule"),
    ({"batch_invariant": True, "num_kv_splits": 2}, Unsupported, "num_kv_splits"),
    # scales: only for fp8, and valid in float32
    ({"kv_scale": 2.0}, InvalidArgument, "kv_scale"),
    ({"kv_scale": torch.tensor(1.0)}, InvalidArgument, "kv_scale"),
    ({"q_scale": 1.0}, InvalidArgument, "q_scale"),
    *(
        (fp8(kv_scale=value), InvalidArgument, "kv_scale")
        for value in (
            0.0,
            -1.0,
            NAN,
            INF,
            1e-50,
            1e300,
            "1",
            torch.ones(2),
            torch.ones(1).double(),
            torch.ones(1, **META),
        )
    ),
    (fp8(q_scale=0), InvalidArgument, "q_scale"),
    # out, lse, workspace
    ({"out": torch.zeros(2, HEADS, RANK + ROPE)}, InvalidArgument, "out"),
    ({"out": torch.zeros(2, HEADS, RANK).bfloat16()}, InvalidArgument, "out"),
    ({"out": torch.zeros(2, HEADS, RANK, **META)}, InvalidArgument, "out"),
    ({"out": torch.zeros(1, HEADS, RANK).expand(2, -1, -1)}, InvalidArgument, "out"),
    ({"out": 3}, InvalidArgument, "out"),
    ({"lse": torch.zeros(HEADS, 2)}, InvalidArgument, "lse"),
    ({"lse": torch.zeros(2, HEADS).double()}, InvalidArgument, "lse"),
    ({"lse": torch.zeros(1, HEADS).expand(2, -1)}, InvalidArgument, "lse"),
    ({"workspace": torch.zeros(4)}, InvalidArgument, "workspace"),
    ({"workspace": torch.zeros(4, dtype=torch.uint8)}, InvalidArgument, "workspace"),
]


def test_the_good_call_is_good() -> None:
    out, lse = pagedmla.decode(**good())
    assert out.shape == (2, HEADS, RANK)
    # zeros everywhere: every key has the same weight, so lse is the logarithm of their number
    torch.testing.assert_close(lse, torch.tensor([[17.0], [3.0]]).log().expand(2, HEADS))


@pytest.mark.parametrize(
    ("changes", "error", "argument"),
    TABLE,
    ids=[f"{number}-{next(iter(changes))}" for number, (changes, _, _) in enumerate(TABLE)],
)
def test_a_bad_argument_is_named_with_what_was_wanted_and_what_came(
    changes: dict[str, Any], error: type[Exception], argument: str
) -> None:
    with pytest.raises(error) as caught:
        pagedmla.decode(**(good() | changes))
    found: Any = caught.value
    assert found.argument == argument
    assert found.code
    assert found.wanted
    assert found.got
    assert str(found.got) in str(found)


def test_outputs_on_an_input_are_refused_and_beside_it_are_not() -> None:
    buffer = torch.randn(2, HEADS, RANK + ROPE + RANK)
    beside = good() | {"q": buffer[..., : RANK + ROPE], "out": buffer[..., RANK + ROPE :]}
    expected = pagedmla.decode(**(good() | {"q": beside["q"].clone()}))[0]
    assert torch.equal(pagedmla.decode(**beside)[0], expected)
    pool = torch.zeros(5, PAGE, RANK + ROPE)
    for changes in (
        {"out": buffer[..., ROPE : ROPE + RANK], "q": buffer[..., : RANK + ROPE]},
        {"out": pool.view(-1)[: 2 * HEADS * RANK].view(2, HEADS, RANK), "kv_cache": pool},
        {"out": buffer[..., :RANK], "q": (buffer[..., :RANK], buffer[..., RANK : RANK + ROPE])},
    ):
        with pytest.raises(InvalidArgument) as caught:
            pagedmla.decode(**(good() | changes))
        assert (caught.value.code, caught.value.argument) == ("overlap", "out")
    cases = [
        {"out": torch.zeros(600).as_strided((2, HEADS, RANK), (RANK * 2, RANK // 2, 1))},
        {"workspace": pool.view(-1).view(torch.uint8), "kv_cache": pool},
    ]
    shared = torch.zeros(5 * PAGE * (RANK + ROPE))
    numpy = pytest.importorskip("numpy")
    array = numpy.frombuffer(bytearray(shared.numel() * 4), dtype=numpy.float32)
    cases.append(
        {
            "out": torch.from_numpy(array[8 : 8 + 2 * HEADS * RANK]).view(2, HEADS, RANK),
            "kv_cache": torch.from_numpy(array).view(5, PAGE, -1),
        }
    )
    for changes in cases:
        with pytest.raises(InvalidArgument) as caught:
            pagedmla.decode(**(good() | changes))
        assert caught.value.code == "overlap"
    fused = torch.randn(2 * HEADS * (RANK + ROPE) + 2 * HEADS * RANK + 2 * HEADS)
    ends = [2 * HEADS * (RANK + ROPE), 2 * HEADS * (RANK + ROPE + RANK)]
    pagedmla.decode(
        **good()
        | {
            "q": fused[: ends[0]].view(2, HEADS, -1),
            "out": fused[ends[0] : ends[1]].view(2, HEADS, RANK),
            "lse": fused[ends[1] :].view(2, HEADS),
        }
    )
    memory = torch.zeros(2 * HEADS * (RANK + 1))
    both = {
        "out": memory[: 2 * HEADS * RANK].view(2, HEADS, RANK),
        "lse": memory[-2 * HEADS - 5 : -5].view(2, HEADS),
    }
    with pytest.raises(InvalidArgument):
        pagedmla.decode(**(good() | both))


def test_softmax_scale_has_no_default() -> None:
    given = good()
    del given["softmax_scale"]
    with pytest.raises(TypeError, match="softmax_scale"):
        pagedmla.decode(**given)


@pytest.mark.parametrize(
    ("changes", "argument", "value"),
    [
        ({"seq_lens": torch.tensor([17, 33], dtype=torch.int32)}, "seq_lens", "33 for sequence 1"),
        ({"seq_lens": torch.tensor([-2, 3], dtype=torch.int32)}, "seq_lens", "-2 for sequence 0"),
        (
            {"block_table": torch.tensor([[0, 5], [2, 3]], dtype=torch.int32)},
            "block_table",
            "5 for page 1 of sequence 0",
        ),
        (
            {"block_table": torch.tensor([[0, 1], [-1, 3]], dtype=torch.int32)},
            "block_table",
            "-1 for page 0 of sequence 1",
        ),
        ({"cu_seqlens_q": torch.tensor([1, 2, 2], dtype=torch.int32)}, "cu_seqlens_q", "1"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 2], dtype=torch.int32)}, "cu_seqlens_q", "0..3 for sequence 0"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 1], dtype=torch.int32)}, "cu_seqlens_q", "2..1 for sequence 1"),
        (
            {"cu_seqlens_q": torch.tensor([0, 2, 2], dtype=torch.int32), "max_q_len": 1},
            "cu_seqlens_q",
            "2 for sequence 0",
        ),
        (fp8(kv_scale=torch.tensor(NAN)), "kv_scale", "nan"),
    ],
)
def test_validate_reports_the_argument_the_sequence_and_the_value(
    changes: dict[str, Any], argument: str, value: str
) -> None:
    pagedmla.decode(**(good() | changes))  # bounded, so it runs
    with pytest.raises(InvalidArgument) as caught:
        pagedmla.decode(**(good() | changes), validate=True)
    assert caught.value.argument == argument
    assert value in caught.value.got


def test_cells_past_a_sequence_s_end_are_not_validated() -> None:
    table = torch.tensor([[0, 1], [2, -7]], dtype=torch.int32)
    pagedmla.decode(**(good() | {"block_table": table}), validate=True)


def test_training_is_refused_and_inference_is_not() -> None:
    given = good() | {"q": good()["q"].requires_grad_()}
    with pytest.raises(Unsupported) as caught:
        pagedmla.decode(**given)
    assert (caught.value.code, caught.value.argument) == ("training", "q")
    with torch.no_grad():
        pagedmla.decode(**given)
    with torch.inference_mode():
        pagedmla.decode(**good())


def plan() -> DecodePlan:
    problem = DecodeProblem(HEADS, 0.1, RANK, ROPE, PAGE, torch.float32, "fp32")
    made = DecodePlan(problem, BatchBounds(max_num_seqs=3, max_pages_per_seq=2))
    made.update(good()["block_table"], good()["seq_lens"])
    return made


@pytest.mark.parametrize(
    ("q", "kv_cache", "code"),
    [
        (torch.zeros(2, HEADS + 1, RANK + ROPE), CACHE, "num_heads"),
        (torch.zeros(2, HEADS, RANK), CACHE, "head_dim_qk"),
        (torch.zeros(2, HEADS, RANK + ROPE).half(), CACHE, "dtype"),
        (torch.zeros(2, HEADS, RANK + ROPE), CACHE.half(), "layout"),
        (torch.zeros(2, HEADS, RANK + ROPE), CACHE[:, :8], "page_size"),
        (torch.zeros(2, HEADS, RANK + ROPE, **META), CACHE, "device"),
        (torch.zeros(4, HEADS, RANK + ROPE), CACHE, "max_num_tokens"),
        (torch.zeros(1, HEADS, RANK + ROPE), CACHE, "num_tokens"),
    ],
)
def test_a_plan_used_with_another_problem_is_a_mismatch(
    q: torch.Tensor, kv_cache: torch.Tensor, code: str
) -> None:
    with pytest.raises(PlanMismatch) as caught:
        plan().run(q, kv_cache)
    assert caught.value.code == code


def test_a_plan_never_cuts_a_table_or_a_batch() -> None:
    made = plan()
    wide = torch.zeros(1, 3, dtype=torch.int32)
    for table, lengths in ((wide, torch.tensor([40])), (wide[:, :1].expand(4, 1), torch.ones(4))):
        with pytest.raises(PlanMismatch):
            made.update(table, lengths.int())


@pytest.mark.parametrize(
    ("problem", "bounds", "options", "error"),
    [
        (None, BatchBounds(1, 1), {}, InvalidArgument),
        (DecodeProblem(1, 0.1), None, {}, InvalidArgument),
        (DecodeProblem(1, 0.1), BatchBounds(1, 1), {"backend": "x"}, InvalidArgument),
        (DecodeProblem(1, 0.1), BatchBounds(1, 1), {"device": "cuda:97"}, InvalidArgument),
        (DecodeProblem(1, 0.1, schedule="persistent"), BatchBounds(1, 1), {}, Unsupported),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(
    problem: Any, bounds: Any, options: dict, error: type[Exception]
) -> None:
    with pytest.raises(error):
        DecodePlan(problem, bounds, **options)


STATES = [torch.zeros(3, 2, 8), torch.zeros(3, 2, 8)]
LSES = [torch.zeros(3, 2), torch.zeros(3, 2)]


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        ([], []),
        (STATES, LSES[:1]),
        (STATES, [torch.zeros(2, 3)] * 2),
        ([STATES[0], torch.zeros(3, 2, 9)], LSES),
        ([STATES[0], STATES[0].half()], LSES),
        (STATES, [lse.double() for lse in LSES]),
        (STATES[0], LSES[0]),
        ([STATES[0], None], LSES),
        (None, LSES),
        (torch.zeros(0, 3, 2, 8), torch.zeros(0, 3, 2)),
        ([state.int() for state in STATES], LSES),
    ],
)
def test_states_that_do_not_fit_are_refused(outs: Any, lses: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pagedmla.merge_states(outs, lses)
    assert caught.value.argument in ("outs", "lses")
