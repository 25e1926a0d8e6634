"""The ratios' arithmetic, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from pagedmla.bench.breakdown import Breakdown, Part
from pagedmla.bench.ceilings import Ceilings, Floor, why_pages_unread
from pagedmla.bench.decode_bench import BenchPlan, BenchResult, How, Measurement, Row
from pagedmla.bench.ours import OurDecode
from pagedmla.bench.peers.planning import PlanTime
from pagedmla.bench.report import (
    caption,
    document,
    floor_ratio,
    geometric_mean,
    peer_ratios,
    summarise,
    summary_line,
)
from pagedmla.bench.shapes import DecodeShape
from pagedmla.bench.timing import StepTime
from pagedmla.contract.target import Target

OURS = OurDecode("torch", "split")


class NamedPeer:
    version = "1.0"

    def __init__(self, name: str) -> None:
        self.name = name

    def supports(self, batch: object) -> str | None:
        return None

    def prepare(self, batch: object) -> None:  # type: ignore[override]
        raise NotImplementedError


def timed(name: str, us: float) -> Measurement:
    return Measurement(name, "measured", StepTime(us - 1, us, us + 1), "", 1e-3, 1e-6)


def result() -> BenchResult:
    shapes = tuple(DecodeShape(f"S{length}", (length,), 16) for length in (100, 200, 300, 400))
    peers = (NamedPeer("vllm_triton"), NamedPeer("fa3"))
    plan = BenchPlan(torch.device("cpu"), shapes, (OURS,), peers)  # type: ignore[arg-type]
    wrong = Measurement(OURS.name, "wrong", detail="out of sequence 0 is off", out_error=float("nan"))
    rows = [
        # ours 20 us: twice as fast as vllm_triton, 0.5 of fa3; the floor is 10 us
        Row(shapes[0], Floor(10, 4), (timed(OURS.name, 20), timed("vllm_triton", 40), timed("fa3", 10))),
        # ours 10 us: 8 times vllm_triton, the only peer
        Row(
            shapes[1],
            Floor(2, 5),
            (timed(OURS.name, 10), timed("vllm_triton", 80), Measurement("fa3", "refused", detail="no")),
        ),
        # ours is wrong: no ratio of it
        Row(shapes[2], Floor(1, 1), (wrong, timed("vllm_triton", 7), timed("fa3", 9))),
        Row(shapes[3], None, (), "does not fit"),
    ]
    return BenchResult(
        plan, Ceilings(torch.float32, 2e12, 3e12, "no reader"), rows, {"flash_mla": "not here"}
    )


def test_ratios_of_a_row() -> None:
    rows = result().rows
    assert floor_ratio(rows[0], OURS.name) == 0.5
    assert floor_ratio(rows[0], "fa3") == 1.0
    assert floor_ratio(rows[1], OURS.name) == 0.5
    assert floor_ratio(rows[2], OURS.name) is None
    assert floor_ratio(rows[3], OURS.name) is None
    assert peer_ratios(rows[0], OURS.name, ["vllm_triton", "fa3"]) == {"vllm_triton": 2.0, "fa3": 0.5}
    assert peer_ratios(rows[1], OURS.name, ["vllm_triton", "fa3"]) == {"vllm_triton": 8.0}
    assert peer_ratios(rows[2], OURS.name, ["vllm_triton", "fa3"]) == {}


def test_the_floor_is_the_larger_part() -> None:
    assert (Floor(10, 4).us, Floor(10, 4).bound) == (10, "memory")
    assert (Floor(2, 5).us, Floor(2, 5).bound) == (5, "flops")


def test_means_are_geometric_and_of_the_rows_that_have_both() -> None:
    found = summarise(result(), OURS.name)
    assert (found.measured, found.rows) == (2, 4)
    assert found.of_floor == pytest.approx(0.5)
    assert found.vs_peer == pytest.approx({"vllm_triton": 4.0, "fa3": 0.5})  # sqrt(2 * 8)
    assert found.vs_best == pytest.approx(2.0)  # sqrt(0.5 * 8): the best peer of each row
    assert (found.worst_vs_best, found.worst_shape) == (0.5, "S100")
    assert geometric_mean([]) is None
    line = summary_line(found)
    assert line.startswith("torch/split: 2 of 4 shapes; geometric means 0.50 of the floor")
    assert "2.00x the best peer (least 0.50x, S100)" in line
    assert line.endswith("4.00x vllm_triton; 0.50x fa3")


def test_the_document_says_the_same_and_is_json() -> None:
    text = json.dumps(document(result()), allow_nan=False)
    found = json.loads(text)
    assert found["complete"] is True
    assert found["absent"] == {"flash_mla": "not here"}
    assert found["contenders"]["fa3"] == "1.0"
    assert found["ceilings"]["matmul_tflop_per_s"] == 2.0
    assert found["ceilings"]["torch_sum_tb_per_s"] == 3.0
    first, second, third, last = found["rows"]
    ours = first["contenders"]["torch/split"]
    assert (ours["us"], ours["fastest_us"], ours["slowest_us"]) == (20, 19, 21)
    assert ours["floor_over_time"] == 0.5
    assert ours["peer_time_over_ours"] == {"vllm_triton": 2.0, "fa3": 0.5}
    assert ours["best_peer"] == "fa3"
    assert second["contenders"]["fa3"] == {"status": "refused", "detail": "no"}
    assert second["bound"] == "flops"
    broken = third["contenders"]["torch/split"]
    assert broken == {"status": "wrong", "detail": "out of sequence 0 is off", "out_error": "nan"}
    assert last["detail"] == "does not fit"
    assert found["summary"][0]["mean_best_peer_time_over_ours"] == pytest.approx(2.0)


def test_what_was_measured_besides_is_in_the_document() -> None:
    full = result()
    time = StepTime(1.0, 2.0, 3.0)
    parts = (Part("kernel<64>(int)", 1.0, 12.0), Part("merge", 2.0, 5.0))
    found = replace(
        full.rows[0].measurements[0],
        runs_on="triton",
        cold=time,
        eager=time,
        host=time,
        plan=PlanTime(time, "host"),
        breakdown=Breakdown(parts, 20.0),
    )
    row = replace(full.rows[0], floor=Floor(10, 4, 11), measurements=(found, *full.rows[0].measurements[1:]))
    full.rows[0] = row
    full.clocks_before = {"sm_mhz": 1980.0}
    written = json.loads(json.dumps(document(full), allow_nan=False))
    assert written["clocks"] == {"before": {"sm_mhz": 1980.0}, "after": None}
    first = written["rows"][0]
    assert (first["floor_us"], first["floor_cold_us"], first["cold_read_us"]) == (10, 11, 11)
    assert first["page_size_tokens"] == 64
    ours = first["contenders"]["torch/split"]
    for prefix in ("cold", "eager", "host", "plan"):
        assert [ours[f"{prefix}_{word}us"] for word in ("fastest_", "", "slowest_")] == [1.0, 2.0, 3.0]
    assert (ours["plan_on"], ours["backend"]) == ("host", "triton")
    assert ours["breakdown"]["between_us"] == 3.0
    assert ours["breakdown"]["parts"][0] == {"name": "kernel<64>(int)", "launches": 1.0, "us": 12.0}
    assert "floor_cold_us" not in written["rows"][1]


def test_the_caption_explains_the_words_of_the_run() -> None:
    run = result()
    assert "Plan: " not in caption(run)
    planned = replace(run.rows[0].measurements[2], plan=PlanTime(StepTime(1.0, 2.0, 3.0), "host"))
    run.rows[0] = replace(run.rows[0], measurements=(*run.rows[0].measurements[:2], planned))
    assert "Plan: what a peer does once a step" in caption(run)
    assert "nothing of the input in L2" not in caption(run)
    run.plan = replace(run.plan, how=How(cold=True, eager=True))
    assert "Cold: with nothing of the input in L2" in caption(run)
    assert "Host: of an eager call" in caption(run)


def test_a_result_that_is_cut_short_says_so() -> None:
    cut = result()
    cut.rows.pop()
    assert document(cut)["complete"] is False


def test_the_caption_says_which_memory_limit_it_is() -> None:
    assert "torch.sum's 3 TB/s (no reader)" in caption(result())
    other = result()
    other.ceilings = Ceilings(torch.bfloat16, 2e12, 3e12, "")
    assert "reading its pages into shared memory and nothing else" in caption(other)


def test_pages_are_read_on_hopper_with_16_bits_alone() -> None:
    hopper, other = Target("nvidia", "sm_90", 132, 232448), Target("amd", "gfx942", 304, 65536)
    assert why_pages_unread(hopper, torch.bfloat16) == ""
    assert why_pages_unread(hopper, torch.float16) == ""
    assert "gfx942" in why_pages_unread(other, torch.bfloat16)
    assert "not of 32" in why_pages_unread(hopper, torch.float32)
