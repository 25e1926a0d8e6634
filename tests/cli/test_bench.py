"""``pagedmla bench`` on a CPU: what it prints, its JSON, and that a wrong decode costs the number and the exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pagedmla
from pagedmla.bench import ceilings, decode_bench
from pagedmla.bench.machine import machine_line
from pagedmla.bench.peers import PEER_NAMES
from pagedmla.bench.shapes import named_shapes

from .conftest import error_line, run_cli

TINY = ("bench", "--device", "cpu", "--shapes", "tiny", "--backend", "torch", "--rounds", "2")
DECODE = pagedmla.decode


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ceilings, decode_bench):
        monkeypatch.setattr(module, "wall_clock_steps", lambda step: 1)


def bench_json(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    file = tmp_path / "new" / "figures.json"
    result = run_cli(*TINY, *arguments, "--json", str(file))
    return result.exit_code, json.loads(file.read_text()), result.stdout


def test_the_json_holds_the_figures_and_what_is_needed_to_read_them(tmp_path: Path) -> None:
    status, found, printed = bench_json(tmp_path, "--page-size", "16", "--eager")
    assert status == 0
    assert found["machine"] == machine_line()
    assert found["versions"]["torch"] == torch.__version__
    assert found["command"] == (
        "python -m pagedmla.cli bench --device cpu --shapes tiny --page-size 16 --backend torch --rounds 2 --eager"
    )
    assert str(tmp_path) not in json.dumps(found)
    assert (found["device"], found["dtype"], found["page_size_tokens"]) == ("cpu", "bfloat16", 16)
    assert found["ceilings"]["matmul_tflop_per_s"] > 0
    assert found["ceilings"]["torch_sum_tb_per_s"] > 0
    assert found["ceilings"]["floor_reads_pages"] is False
    assert found["complete"] is True
    assert [row["shape"] for row in found["rows"]] == [shape.name for shape in named_shapes(["tiny"])]
    for row in found["rows"]:
        ours = row["contenders"]["torch/split"]
        assert ours["status"] == "measured"
        assert ours["us"] > 0
        assert ours["host_us"] > 0
        assert 0 < ours["out_error"] < 6e-3
        assert ours["lse_error"] < 1e-5
        assert row["floor_us"] == max(row["read_us"], row["arithmetic_us"])
        assert ours["floor_over_time"] == pytest.approx(row["floor_us"] / ours["us"])
        assert row["shape"] in printed
    assert f"{found['rows'][0]['contenders']['torch/split']['us']:.1f}" in printed
    assert "torch/split: 2 of 2 shapes; geometric means" in printed
    assert "torch.sum" in printed  # which memory limit the floor is


def test_peers_that_are_not_here_are_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "_flashmla_C.abi3.so").write_bytes(b"not a library")
    monkeypatch.setattr("sys.path", [])
    status, found, printed = bench_json(
        tmp_path, "--peers", "vllm_triton,flash_mla,fa3", "--peers-path", str(tmp_path)
    )
    assert status == 0
    assert "vllm is not installed" in found["absent"]["vllm_triton"]
    assert found["absent"]["flash_mla"].startswith("_flashmla_C.abi3.so does not load")
    assert "torch/persistent" in found["absent"]
    for name, reason in found["absent"].items():
        assert f"{name} not measured: {reason}" in printed
    assert "--peers-path DIR" in found["command"]
    assert list(found["contenders"]) == ["torch/split"]


def test_peers_none_asks_for_none(tmp_path: Path) -> None:
    _, found, _ = bench_json(tmp_path, "--peers", "none", "-k", "B2")
    assert not set(found["absent"]) & set(PEER_NAMES)
    assert [row["shape"] for row in found["rows"]] == ["B2 S65 H4 q2"]


def test_a_function_named_as_a_peer_takes_part(tmp_path: Path) -> None:
    status, found, printed = bench_json(tmp_path, "--peers", "pagedmla:decode", "-k", "B3")
    assert status == 0
    (row,) = found["rows"]
    assert row["contenders"]["pagedmla:decode"]["status"] == "measured"
    assert row["contenders"]["torch/split"]["best_peer"] == "pagedmla:decode"
    assert "x best" in printed
    # a run on a CPU is not held against targets of a GPU
    assert found["verdicts"] == {"torch/split": []}
    assert "targets" not in printed


def test_the_parts_of_a_decode_are_printed_and_kept(tmp_path: Path) -> None:
    _, found, printed = bench_json(tmp_path, "--peers", "none", "-k", "B3", "--breakdown", "--cold")
    assert found["command"].endswith("--filter B3 --backend torch --peers none --rounds 2 --cold --breakdown")
    parts = found["rows"][0]["contenders"]["torch/split"]["breakdown"]["parts"]
    assert parts == sorted(parts, key=lambda part: -part["us"])
    assert f"x  {parts[0]['name']}" in printed
    assert "between the kernels" in printed


def test_unnamed_the_contender_is_what_a_user_gets(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    result = run_cli(
        "bench",
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--rounds",
        "1",
        "--peers",
        "none",
        "--json",
        str(file),
    )
    assert result.exit_code == 0
    found = json.loads(file.read_text())
    assert list(found["contenders"]) == ["pagedmla"]
    assert {row["contenders"]["pagedmla"]["backend"] for row in found["rows"]} == {"torch"}
    assert "by torch" in result.stdout


def test_verdicts_are_printed_for_a_missed_and_a_met_target_alike(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from pagedmla.cli.bench_print import print_verdicts

    fields = {"what": "B1 S4096 H16", "got": "8.9 us", "limit": "9 us"}
    found = [{**fields, "met": True}, {**fields, "got": "9.3 us", "met": False}]
    print_verdicts(Console(width=200), {"verdicts": {"pagedmla": found, "other": []}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "  B1 S4096 H16: 8.9 us, limit 9 us: met",
        "  B1 S4096 H16: 9.3 us, limit 9 us: missed",
    ]
    assert "pagedmla" in lines[0]


def test_plotting_measures_nothing_and_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_bench, "run_bench", None)
    monkeypatch.delitem(sys.modules, "pagedmla.bench.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = tmp_path / "x.json"
    file.write_text("[]")
    assert "pip install 'pagedmla[plot]'" in error_line(run_cli("bench", "--plot", str(file)))


@pytest.mark.parametrize("text", ["[]", "no json", '{"rows": []}'])
def test_a_file_of_something_else_is_not_drawn(tmp_path: Path, text: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.json"
    file.write_text(text)
    assert "has no figures of pagedmla bench" in error_line(run_cli("bench", "--plot", str(file)))


def test_a_wrong_result_gets_no_number_and_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any, **options: Any) -> None:
        DECODE(*arguments, **options)
        options["out"][0] += 1

    monkeypatch.setattr(pagedmla, "decode", wrong)
    status, found, printed = bench_json(tmp_path)
    assert status == 1
    for row in found["rows"]:
        ours = row["contenders"]["torch/split"]
        assert ours["status"] == "wrong"
        assert ours["detail"].startswith("out of sequence 0 is off by")
        assert "us" not in ours
        assert "floor_over_time" not in ours
    assert found["summary"][0]["measured"] == 0
    assert "wrong: out of sequence 0 is off by" in printed
    assert "0 of 2 shapes" in printed


def test_a_run_that_is_cut_short_leaves_the_rows_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = decode_bench.build_batch

    def cut(shape: Any, *arguments: Any) -> Any:
        if shape.name.startswith("B2"):
            raise KeyboardInterrupt
        return build(shape, *arguments)

    monkeypatch.setattr(decode_bench, "build_batch", cut)
    status, found, _ = bench_json(tmp_path)
    assert status != 0
    assert found["complete"] is False
    assert [row["shape"] for row in found["rows"]] == ["B3 S1,64,131 H4"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--shapes", "huge"), "shapes: wanted some of std"),
        (("--heads", "16,x"), "heads: wanted whole numbers"),
        (("--heads", "0"), "heads: wanted whole numbers >= 1"),
        (("-k", "no such shape"), "filter: wanted text in a shape's name"),
        (("--dtype", "fp8"), "dtype: wanted one of bf16, fp16, fp32"),
        (("--backend", "cutlass"), "backend: wanted None or one of"),
        (("--schedule", "dynamic"), "schedule: wanted some of split, persistent, auto"),
        (("--schedule", "persistent"), "schedule: wanted None or 'split', got 'persistent'"),
        (("--peers", "tensorrt"), "peers: wanted none, all or some of vllm_triton"),
        (("--peers-path", "no/such/folder"), "peers-path: wanted a folder"),
        (("--json", "/dev/null/x.json"), "--json: "),
        (("--device", "meta"), "device: wanted"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_status_2(arguments: tuple[str, ...], part: str) -> None:
    assert part in error_line(run_cli(*TINY, *arguments))


def test_without_a_gpu_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = error_line(run_cli("bench"))
    assert "bench measures a GPU" in line
    assert "--device cpu" in line
