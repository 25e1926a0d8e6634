"""The measuring tools, and the benchmarks' own checks: a figure must not come out of a run that is wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pagedmla.bench import graph_timing, machine, results, timing

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_step_is_called_for_every_round_and_warm_up() -> None:
    calls = []
    found = timing.time_step(lambda: calls.append(0), "cpu", steps=5, rounds=3)
    assert len(calls) == 5 * (3 + 1)
    assert 0 < found.fastest_us <= found.median_us <= found.slowest_us


def test_a_result_names_machine_versions_and_command_but_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["benchmarks/x.py", "--device", "cpu", "--json", str(tmp_path / "r.json")]
    )
    results.write_result(tmp_path / "deep" / "r.json", {"step_us": 1.5})
    found = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert found["step_us"] == 1.5
    assert found["command"] == "python benchmarks/x.py --device cpu"
    assert found["machine"] == machine.machine_line()
    assert found["versions"]["torch"] == torch.__version__
    assert str(tmp_path) not in json.dumps(found)


def test_clocks_are_read_by_name_and_what_is_no_number_is_left_out() -> None:
    assert machine.parsed_clocks("1980, 3201, 1980, 3201, 118.42, 31\n") == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "largest_sm_mhz": 1980.0,
        "largest_memory_mhz": 3201.0,
        "power_w": 118.42,
        "temperature_c": 31.0,
    }
    assert machine.parsed_clocks("345, 2619, 1980, 3201, [N/A], [N/A]") == {
        "sm_mhz": 345.0,
        "memory_mhz": 2619.0,
        "largest_sm_mhz": 1980.0,
        "largest_memory_mhz": 3201.0,
    }
    assert machine.parsed_clocks("No devices were found") is None
    assert machine.clocks("cpu") is None


def test_a_cold_time_is_what_the_reading_before_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []

    class Captured:
        def __init__(self, step: Any, device: torch.device, before: Any = None) -> None:
            captured.append((step, before))
            self.us = 40.0 if before is None else 52.5

        def time(self, rounds: int) -> timing.StepTime:
            assert rounds == 1
            self.us += 1 if len(captured) == 2 else 0
            return timing.StepTime.of([self.us])

    monkeypatch.setattr(graph_timing, "CapturedStep", Captured)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=48 << 20)
    )
    step = torch.ones(1).clone
    found = graph_timing.time_cold(step, torch.device("cpu"), rounds=3)
    assert found == timing.StepTime(12.5, 12.5, 12.5)
    (timed, flush), (alone, nothing) = captured
    assert (timed, alone, nothing) == (step, flush, None)


def test_the_metadata_benchmark_refuses_to_time_values_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load("metadata_step")
    monkeypatch.setattr(
        benchmark, "time_step", lambda step, device, steps: timing.time_step(step, device, steps=1, rounds=1)
    )
    kept, rebuilt, whole = benchmark.measure("cpu", 3)
    assert min(kept.median_us, rebuilt.median_us, whole.median_us) > 0
    plain = benchmark.DecodeMetadata.__init__

    def lengths_for_ones(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        plain(self, *args, **kwargs)
        self.kv_last_page_len.fill_(127)  # the founding fault

    monkeypatch.setattr(benchmark.DecodeMetadata, "__init__", lengths_for_ones)
    with pytest.raises(SystemExit):
        benchmark.measure("cpu", 3)


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem)
def test_kept_results_say_where_they_are_from(path: Path) -> None:
    found = json.loads(path.read_text())
    assert {"date", "machine", "versions", "command"} <= set(found)
    assert found["command"].startswith("python ")
    assert "/root" not in path.read_text()
