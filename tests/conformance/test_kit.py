"""The kit's processes: whatever an implementation does to its own, every finding comes, and names what was running."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagedmla.conformance import kit
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.findings import STATUSES, Cell, Finding, Report, cell_text
from pagedmla.conformance.kit import default_processes, run_kit
from pagedmla.conformance.properties import properties_of
from pagedmla.conformance.reproducer import exit_in_words, last_words
from pagedmla.contract.errors import InvalidArgument

PATIENCE_S = 120.0
"""A time limit for runs in which nothing hangs."""


def small(name: str, **fields: object) -> Configuration:
    dims = {"num_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "page_size": 16}
    return Configuration(name, {**dims, **fields}, most_keys=40)


RIGHT, WRONG, ABORTS, EXITS, LOSES, SLEEPS = (
    small(name, softmax_scale=scale)
    for name, scale in (
        ("right", 0.1), ("wrong", 0.2), ("aborts", 0.3), ("exits", 0.4), ("loses", 0.5), ("sleeps", 0.6)
    )
)  # fmt: skip

# what this kernel does is told by the scale of its batch; each of the worst faults happens once, and leaves a file
MODULE = """
import os, sys, time
from dataclasses import replace
from pathlib import Path
from pagedmla.conformance import asking, child
from pagedmla.conformance.adapters.adapter import Conventions
from pagedmla.conformance.adapters.ours import Ours

def first(what):
    file = Path(__file__).with_name(f"{what} once")
    if file.exists():
        return False
    file.touch()
    return True

class Treacherous(Ours):
    conventions = Conventions(lse_base=2.0)

    def __init__(self):
        super().__init__("torch")
        self.name, self.version = "treacherous", "1.2.3"

    def prepare(self, call, options, out=None, lse=None):
        scale = call.spec.softmax_scale
        if scale == 0.2:
            call = replace(call, softmax_scale=call.softmax_scale * 1.5)
        if scale == 0.3 and first("aborted"):
            print("the last words", file=sys.stderr, flush=True)
            os.abort()
        if scale == 0.4 and first("exited"):
            os._exit(7)
        if scale == 0.5 and first("lost"):
            asking.lost_context = child.lost_context = lambda device: "CUDA error: an illegal memory access was encountered"
            raise RuntimeError("CUDA error in a launch")
        if scale == 0.6 and first("slept"):
            time.sleep(600)
        return super().prepare(call, options, out, lse)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """On the module path, for the children too."""
    path = tmp_path_factory.mktemp("modules")
    (path / "treacherous_kernels.py").write_text(MODULE)
    (path / "aborting_module.py").write_text("import os\nos.abort()\n")
    sys.path.insert(0, str(path))
    yield path
    sys.path.remove(str(path))


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    told: list[tuple[Finding, int, int]] = []
    columns = (RIGHT, WRONG, ABORTS, EXITS, LOSES)
    found = run_kit(
        "treacherous_kernels:Treacherous",
        "cpu",
        ["LSE"],
        columns,
        examples=4,
        time_limit_s=PATIENCE_S,
        processes=2,
        seed=3,
        report=lambda *what: told.append(what),
    )
    total = len(columns) * len(properties_of("LSE"))
    assert [done for _, done, _ in told] == list(range(1, total + 1))
    assert {of for _, _, of in told} == {total}
    assert sorted(f.title for f, _, _ in told) == sorted(f.title for f in found.findings)
    return found


def of(report: Report, configuration: Configuration) -> list[Finding]:
    return [finding for finding in report.findings if finding.configuration == configuration.name]


def test_a_report_says_what_the_adapter_declares(report: Report) -> None:
    assert report.declared == ("lse has base 2",)


def test_every_property_of_every_job_has_a_finding_in_order(report: Report) -> None:
    wanted = [
        (prop.name, configuration.name)
        for configuration in (RIGHT, WRONG, ABORTS, EXITS, LOSES)
        for prop in properties_of("LSE")
    ]
    assert [(finding.property, finding.configuration) for finding in report.findings] == wanted
    assert (report.impl, report.version) == ("treacherous_kernels:Treacherous", "1.2.3")
    assert (report.device, report.seed, report.examples) == ("cpu", 3, 4)


def test_a_right_kernel_passes_and_a_wrong_one_fails_with_a_reproducer(report: Report) -> None:
    assert {finding.status for finding in of(report, RIGHT)} <= {"passed", "not applied"}
    assert sum(finding.examples for finding in of(report, RIGHT)) >= 4
    by_value = of(report, WRONG)[0]
    assert by_value.status == "failed"
    assert "is right" in by_value.detail
    assert "softmax_scale=0.2" in by_value.reproducer


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (ABORTS, ("was killed by SIGABRT", "the last words", "in prepare")),
        (EXITS, ("ended with exit status 7",)),
        (LOSES, ("CUDA error in a launch", "context is lost: CUDA error: an illegal memory access")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_death_names_its_cause_and_the_job_goes_on(
    report: Report, configuration: Configuration, words: tuple[str, ...]
) -> None:
    first, *others = of(report, configuration)
    assert first.status == "died"
    for word in words:
        assert word in first.detail
    scale = configuration.fields["softmax_scale"]
    assert f"softmax_scale={scale}" in first.example
    assert f"softmax_scale={scale}" in first.reproducer
    assert others
    assert {finding.status for finding in others} <= {"passed", "not applied"}
    assert any(finding.status == "passed" for finding in others)


def test_no_process_is_left(report: Report) -> None:
    assert report.findings
    assert multiprocessing.active_children() == []


def test_what_hangs_is_killed_and_the_job_goes_on(folder: Path) -> None:
    found = run_kit(
        "treacherous_kernels:Treacherous",
        kinds=["LSE"],
        configurations=[SLEEPS],
        examples=2,
        time_limit_s=2,
        processes=1,
    )
    first, *others = found.findings
    assert first.status == "hung"
    assert "nothing had moved for 2 s" in first.detail
    assert "treacherous_kernels.py" in first.detail  # the stack
    assert "softmax_scale=0.6" in first.example
    assert "in here the process was killed" in first.reproducer
    assert 1.5 < first.seconds < 30
    assert [finding.property for finding in found.findings] == [prop.name for prop in properties_of("LSE")]
    assert any(finding.status == "passed" for finding in others)
    assert multiprocessing.active_children() == []


def test_ctrl_c_ends_the_children(folder: Path) -> None:
    def interrupt(*told: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_kit(
            "treacherous_kernels:Treacherous",
            kinds=["LSE"],
            configurations=[RIGHT],
            examples=1,
            report=interrupt,
        )
    assert multiprocessing.active_children() == []


def test_a_module_that_kills_its_process_is_an_error_of_the_caller(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"aborting_module:decode: .* was killed by SIGABRT") as caught:
        run_kit("aborting_module:decode", kinds=["LSE"], configurations=[RIGHT])
    assert caught.value.argument == "impl"
    assert multiprocessing.active_children() == []


def test_the_errors_of_a_child_are_raised_here() -> None:
    with pytest.raises(InvalidArgument) as caught:
        run_kit("no_such_module_anywhere:decode", kinds=["LSE"], configurations=[RIGHT])
    assert caught.value.argument == "impl"


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"kinds": ["PAGE", "NONE"]}, "kind"),
        ({"examples": 0}, "examples"),
        ({"time_limit_s": -1.0}, "time_limit_s"),
        ({"processes": 0}, "processes"),
    ],
)
def test_wrong_arguments_start_nothing(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], argument: str
) -> None:
    monkeypatch.setattr(kit, "_Examination", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(InvalidArgument) as caught:
        run_kit("pagedmla:torch", **arguments)  # type: ignore[arg-type]
    assert caught.value.argument == argument


def test_processes_are_few_on_a_cpu_and_bounded_on_a_card() -> None:
    count = os.cpu_count() or 1
    assert default_processes(torch.device("cpu")) == min(2, count)
    assert default_processes(torch.device("cuda")) == min(16, count)


FINDING = Finding("PAGE", "moved-pages", "the same bits", "h16", "passed", examples=20, seconds=0.1234567)


def report_of(*findings: Finding) -> Report:
    return Report("mine", "1", "cpu", 0, 20, findings, versions={"torch": "2", "vllm": None})


def test_a_report_survives_json() -> None:
    failed = replace(
        FINDING, status="failed", detail="out[0] is nan\n<b>", example="('x',)", reproducer="print()"
    )
    before = replace(report_of(FINDING, failed), declared=("lse has base 2", "out is float32"))
    after = Report.from_json(before.to_json())
    assert after.findings == tuple(replace(finding, seconds=0.123) for finding in before.findings)
    assert replace(after, findings=()) == replace(before, findings=())
    assert before.document()["counts"] == dict.fromkeys(STATUSES, 0) | {"passed": 1, "failed": 1}


def test_no_nan_gets_into_json() -> None:
    assert "NaN" not in report_of(replace(FINDING, seconds=math.nan)).to_json()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"findings": [{"status": "passed"}]}', '{"findings": 3}'])
def test_what_is_no_report_is_an_invalid_argument(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Report.from_json(text)


def test_there_are_no_other_statuses() -> None:
    with pytest.raises(InvalidArgument, match="wanted one of hung, died, failed"):
        replace(FINDING, status="skipped")


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        (("passed", "failed", "refused"), "FAILED 40"),
        (("passed", "refused", "not applied"), "ok 20"),
        (("failed", "died", "passed"), "DIED 60"),
        (("died", "hung"), "HUNG 20"),
        (("refused", "not applied"), "no (refused)"),
        (("not applied", "not applied"), "-"),
    ],
)
def test_a_cell_shows_the_worst_and_all_examples(statuses: tuple[str, ...], text: str) -> None:
    counts = {"passed": 20, "failed": 20, "died": 20}
    findings = [replace(FINDING, status=status, examples=counts.get(status, 0)) for status in statuses]
    other = replace(FINDING, configuration="other", examples=7)
    matrix = report_of(*findings, other).matrix()
    assert cell_text(matrix["PAGE", "h16"]) == text
    assert matrix["PAGE", "other"] == Cell("passed", 7)


def test_an_exit_code_has_words() -> None:
    assert exit_in_words(3) == "ended with exit status 3"
    assert exit_in_words(-11) == "was killed by SIGSEGV"
    assert exit_in_words(-63) == "was killed by signal 63"


def test_the_last_words_are_the_end_or_the_top_of_the_stack() -> None:
    assert last_words("\n".join(str(line) for line in range(30))).split("\n") == [
        str(n) for n in range(18, 30)
    ]
    stack = (
        ["noise"] * 9
        + ["Fatal", "", "Current thread (most recent call first):"]
        + [f"call {n}" for n in range(40)]
    )
    lines = last_words("\n".join(stack)).split("\n")
    assert lines[-1] == "call 4"
    assert "Fatal" in lines
