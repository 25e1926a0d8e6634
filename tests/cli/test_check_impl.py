"""``pagedmla check --impl``: what it asks the kit for, what it prints of the answer, and its exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from pagedmla.cli.check import check
from pagedmla.conformance import kit
from pagedmla.conformance.child import WatchedSubject, ask, load_adapter
from pagedmla.conformance.configurations import CONFIGURATIONS
from pagedmla.conformance.findings import Finding, Report
from pagedmla.conformance.properties import KINDS, properties_of

from .conftest import error_line, run_cli

ROOT = Path(__file__).resolve().parent.parent.parent
IMPL = ("check", "--impl", "somebody:decode")

PASSED = Finding("PAGE", "moved-pages", "the same bits", "h16 p64 bf16", "passed", examples=20)
FAILED = Finding(
    "LSE", "lse-values", "right by value", "h16 p64 bf16", "failed", 3, "lse[0, 1] is 2 where 1 is right",
    "(BatchSpec(seq_lens=(5,)), {})", "call = build(seq_lens=(5,))\nprint('[bold]')\n",
)  # fmt: skip
DIED = replace(
    FAILED, configuration="h128 p64 bf16", status="died", detail="the process was killed by SIGSEGV\n  File x", reproducer=""
)  # fmt: skip
REFUSED = replace(
    PASSED, configuration="h128 p64 bf16", status="refused", examples=0, detail="few heads only"
)


class Kit:
    """In place of ``run_kit``: keeps what it was asked, and answers with these findings."""

    def __init__(self, *findings: Finding) -> None:
        self.findings = findings
        self.asked: dict[str, Any] = {}
        self.watch: Callable[[], object] = lambda: None

    def __call__(
        self, impl: str, device: Any, kinds: Any, configurations: Any = None, *, seed: int = 0, **more: Any
    ) -> Report:
        given = {
            "impl": impl,
            "device": device,
            "kinds": kinds,
            "configurations": configurations,
            "seed": seed,
        }
        self.asked = given | more
        self.watch()
        for done, finding in enumerate(self.findings, 1):
            if "report" in more:
                more["report"](finding, done, len(self.findings))
        return Report(impl, "1.2", str(device), seed, more["examples"], self.findings, 4.25)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a kit that answers with the given findings."""

    def install(*findings: Finding) -> Kit:
        planted = Kit(*findings)
        monkeypatch.setattr(kit, "run_kit", planted)
        return planted

    return install


def test_the_options_reach_the_kit(answer: Any, tmp_path: Path) -> None:
    asked = answer(PASSED)
    result = run_cli(
        *IMPL, "--kind", "page, Lse", "--config", "h16", "--examples", "7", "--time-limit", "9.5", "--processes", "3",
        "--peers", str(tmp_path), "--seed", "11", "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    given = {name: value for name, value in asked.asked.items() if name != "report"}
    assert given == {
        "impl": "somebody:decode",
        "device": torch.device("cpu"),
        "kinds": ["PAGE", "LSE"],
        "configurations": tuple(one for one in CONFIGURATIONS if "h16" in one.name),
        "examples": 7,
        "time_limit_s": 9.5,
        "processes": 3,
        "seed": 11,
        "folder": tmp_path,
    }


def test_what_is_left_out_is_the_kits_default(answer: Any) -> None:
    asked = answer(PASSED)
    assert run_cli(*IMPL, "--device", "cpu").exit_code == 0
    given = {name: value for name, value in asked.asked.items() if name not in ("report", "impl", "device")}
    assert given == {
        "kinds": None,
        "configurations": None,
        "examples": kit.DEFAULT_EXAMPLES,
        "time_limit_s": kit.DEFAULT_TIME_LIMIT_S,
        "processes": None,
        "seed": 0,
        "folder": None,
    }


def test_the_matrix_comes_before_what_is_broken(answer: Any) -> None:
    answer(PASSED, REFUSED, FAILED, DIED)
    result = run_cli(*IMPL, "--device", "cpu")
    assert result.exit_code == 1
    text = result.stdout
    matrix = text[text.index("somebody:decode (1.2) on cpu, seed 0") : text.rindex("\nFAILED")]
    rows = {line.split()[1]: line for line in matrix.splitlines() if line.startswith("│")}
    assert "ok 20" in rows["PAGE"]
    assert "no (refused)" in rows["PAGE"]
    assert "FAILED 3" in rows["LSE"]
    assert "DIED 3" in rows["LSE"]
    assert text.splitlines()[-1] == "1 passed, 1 failed, 1 died, 1 refused in 4.2 s"


def test_each_failure_has_promise_detail_and_reproducer(answer: Any) -> None:
    answer(FAILED, DIED)
    text = run_cli(*IMPL, "--device", "cpu").stdout
    shown = text[text.rindex("\nFAILED") :]
    assert shown.startswith(
        "\nFAILED LSE lse-values, h16 p64 bf16: lse[0, 1] is 2 where 1 is right\npromise: right by value\n"
    )
    # indented as a block that can be copied, and not taken for markup
    assert "\n    call = build(seq_lens=(5,))\n    print('[bold]')\n" in shown
    died = shown[shown.index("\nDIED LSE lse-values, h128 p64 bf16: the process was killed by SIGSEGV\n") :]
    assert "\n      File x\n" in died
    assert "    example: (BatchSpec(seq_lens=(5,)), {})" in died


def test_the_same_failure_elsewhere_is_one_line_more(answer: Any) -> None:
    answer(FAILED, replace(FAILED, configuration="h40 p16 bf16"))
    text = run_cli(*IMPL, "--device", "cpu").stdout
    assert text.count("call = build(") == 1
    assert "as for h16 p64 bf16" in text
    assert text.count("LSE lse-values, h40 p16 bf16") == 2  # as it came, and in the list


@pytest.mark.parametrize("status", ["failed", "died", "hung"])
def test_what_is_held_against_it_is_exit_status_1(answer: Any, status: str) -> None:
    answer(PASSED, replace(FAILED, status=status))
    assert run_cli(*IMPL, "--device", "cpu").exit_code == 1


def test_a_report_in_which_nothing_was_asked_is_no_success(answer: Any) -> None:
    answer(REFUSED)
    result = run_cli(*IMPL, "--device", "cpu")
    assert result.exit_code == 2
    said = "somebody:decode was asked nothing that it takes: nothing was checked; refused: few heads only"
    assert result.stderr == f"pagedmla: {said}\n"
    assert "no (refused)" in result.stdout
    assert "\nrefused PAGE: few heads only\n" in result.stdout


def test_a_refusal_says_more_than_what_was_not_applied(answer: Any) -> None:
    unclaimed = replace(PASSED, status="not applied", examples=0, detail="does not claim 'graph'")
    answer(unclaimed, REFUSED)
    assert error_of(run_cli(*IMPL, "--device", "cpu")).endswith("; refused: few heads only")
    answer(unclaimed)
    assert error_of(run_cli(*IMPL, "--device", "cpu")).endswith("; not applied: does not claim 'graph'")
    answer()
    assert error_of(run_cli(*IMPL, "--device", "cpu")).endswith("and says why to --config h16")


def error_of(result: Result) -> str:
    assert result.exit_code == 2
    return result.stderr.rstrip("\n")


def test_each_reason_of_a_refusal_stands_once_under_the_matrix(answer: Any) -> None:
    elsewhere = replace(REFUSED, configuration="h40 p16 bf16", detail="few heads only\nsecond line")
    answer(PASSED, REFUSED, elsewhere, replace(REFUSED, kind="LSE", detail="[no] lse"), FAILED)
    text = run_cli(*IMPL, "--device", "cpu").stdout
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("refused ")] == [
        "refused PAGE: few heads only", "refused LSE: [no] lse",
    ]  # fmt: skip
    assert text.rindex("no (refused)") < text.index("refused PAGE: ") < text.rindex("\nFAILED")


def test_of_many_refusals_ten_are_shown(answer: Any) -> None:
    answer(PASSED, *(replace(REFUSED, detail=f"reason {number}") for number in range(13)))
    lines = run_cli(*IMPL, "--device", "cpu").stdout.splitlines()
    shown = [line for line in lines if line.startswith("refused ")]
    assert shown == [f"refused PAGE: reason {number}" for number in range(10)]
    assert lines[lines.index(shown[-1]) + 1] == "and 3 more"


def test_json_is_the_whole_of_stdout(answer: Any) -> None:
    answer(PASSED, FAILED)
    result = run_cli(*IMPL, "--json", "--device", "cpu", "--seed", "5")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    report = Report.from_json(result.stdout)
    assert report.findings == (PASSED, FAILED)
    assert document["machine"].startswith("Linux")
    assert document["versions"]["torch"] == torch.__version__
    assert document["command"] == "-m pagedmla.cli check --impl somebody:decode --seed 5 --device cpu"


def test_the_page_is_written_and_nobodys_folder_is_in_it(answer: Any, tmp_path: Path) -> None:
    answer(PASSED, FAILED)
    page = tmp_path / "report.html"
    result = run_cli(*IMPL, "--html", str(page), "--peers", str(tmp_path), "--device", "cpu")
    assert result.exit_code == 1
    html = page.read_text()
    assert "lse[0, 1] is 2 where 1 is right" in html
    assert "check --impl somebody:decode --peers DIR --device cpu" in html
    assert str(tmp_path) not in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kind", "PAGE,WRONG"), f"kind: wanted some of {', '.join(KINDS)}, got 'WRONG' [kind]"),
        (("--kind", ","), f"kind: wanted some of {', '.join(KINDS)}, got ',' [kind]"),
        (("--kind", " "), f"kind: wanted some of {', '.join(KINDS)}, got ' ' [kind]"),
        (("--peers", "/no/such/folder"), "--peers: /no/such/folder is no folder"),
        (("--config", "h17"), "config: wanted text in one of h16 p64 bf16, "),
        (("--html", "/no/such/folder/x.html"), "--html: /no/such/folder/x.html cannot be written"),
        (("--device", "toaster"), "device: wanted a torch device"),
        (("--backend", "torch"), "--backend: only without --impl"),
        (("--filter", "x", "--limit", "3"), "--filter, --limit: only without --impl"),
    ],
)
def test_what_cannot_be_asked_is_one_line_before_anything_runs(
    answer: Any, arguments: tuple[str, ...], message: str
) -> None:
    asked = answer(PASSED)
    assert message in error_line(run_cli(*IMPL, "--device", "cpu", *arguments))
    assert asked.asked == {}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--kind", "PAGE"), "--kind"),
        (("--config", "h16", "--examples", "3"), "--config, --examples"),
        (
            ("--time-limit", "3", "--peers", ".", "--seed", "0", "--html", "x"),
            "--time-limit, --peers, --seed, --html",
        ),
    ],
)
def test_the_options_of_the_kit_need_an_implementation(arguments: tuple[str, ...], named: str) -> None:
    assert error_line(run_cli("check", *arguments)) == f"pagedmla: {named}: only with --impl NAME"


def test_an_unknown_name_lists_the_known_ones() -> None:
    line = error_line(run_cli("check", "--impl", "nobody", "--kind", "LSE", "--device", "cpu"))
    for name in ("pagedmla:torch", "flash_mla", "vllm_triton", "module:function"):
        assert name in line


@pytest.mark.parametrize(("package", "arguments"), [("hypothesis", []), ("jinja2", ["--html", "x.html"])])
def test_a_missing_package_is_named_with_its_extra(
    package: str, arguments: list[str], tmp_path: Path
) -> None:
    source = f"""
import sys
sys.modules[{package!r}] = None
sys.argv = ["pagedmla", "check", "--impl", "pagedmla:torch", "--device", "cpu", *{arguments!r}]
from pagedmla.cli.entry import run
run()
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"pagedmla: check --impl needs {package}: pip install 'pagedmla[conformance]'\n"
    assert not (tmp_path / "x.html").exists()


def test_the_help_names_every_option() -> None:
    text = run_cli("check", "--help").stdout
    for option in (
        "--impl",
        "--kind",
        "--config",
        "--examples",
        "--time-limit",
        "--peers",
        "--seed",
        "--html",
    ):
        assert option in text
    assert check.__doc__ is not None


HANGING = """
import os, time

def decode(q, kv_cache, block_table, seq_lens, *, softmax_scale, kv_lora_rank=512):
    with open("pid.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("pid.part", "pid")
    time.sleep(600)
"""


def test_sigterm_leaves_no_child_behind(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    words = ["check", "--impl", "hanging:decode", "--kind", "LSE", "--config", "256+64", "--processes", "1"]
    parent = subprocess.Popen(
        [sys.executable, "-m", "pagedmla.cli", *words, "--device", "cpu", "--time-limit", "100"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    written = tmp_path / "pid"
    child = 0
    try:
        end = time.monotonic() + 60
        while not written.exists() and parent.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        child = int(written.read_text())
        assert is_running(child)
        parent.send_signal(signal.SIGTERM)
        _, errors = parent.communicate(timeout=10)
        assert (parent.returncode, errors) == (128 + signal.SIGTERM, b"")
        end = time.monotonic() + 3
        while is_running(child) and time.monotonic() < end:
            time.sleep(0.05)
        assert not is_running(child)
    finally:
        parent.kill()
        parent.wait()
        if child and is_running(child):
            os.kill(child, signal.SIGKILL)


def is_running(process: int) -> bool:
    """Whether it is there and no zombie, which is one until somebody asks after it."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_the_handler_of_sigterm_is_put_back(answer: Any) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []
    asked = answer(PASSED)
    asked.watch = lambda: seen.append(signal.getsignal(signal.SIGTERM))
    assert run_cli(*IMPL, "--device", "cpu").exit_code == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert seen != [before]


KERNELS = """
import pagedmla

def without_the_last_key(q, kv_cache, block_table, seq_lens, **given):
    return pagedmla.decode(q, kv_cache, block_table, (seq_lens - 1).clamp(min=0), **given)
"""


@pytest.fixture
def _kernels(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "checked_kernels.py").write_text(KERNELS)
    sys.path.insert(0, str(tmp_path))
    yield
    sys.path.remove(str(tmp_path))


@pytest.mark.usefixtures("_kernels")
def test_a_broken_kernel_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    result = run_cli(
        "check", "--impl", "checked_kernels:without_the_last_key", "--kind", "PAGE", "--config", "256+64",
        "--examples", "2", "--device", "cpu", "--json", "--html", str(page),
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    report = Report.from_json(result.stdout)
    assert report.configurations() == ["h8 p32 256+64 bf16"]
    assert report.count("failed") >= 1
    finding = report.bad[0]
    assert "from checked_kernels import without_the_last_key" in finding.reproducer
    assert "without_the_last_key" in page.read_text()
    before = torch.get_deterministic_debug_mode()
    try:
        exec(compile(finding.reproducer, "reproducer", "exec"), {"__name__": "__main__"})
    finally:
        torch.set_deterministic_debug_mode(before)
    assert finding.detail.split(" where ")[0] in capsys.readouterr().out


PAGE = (ROOT / "docs" / "test_your_kernel.md").read_text()


@pytest.fixture
def _files_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each block of Python, under the name in its first line, on the module path."""
    blocks = re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == PAGE.count("```python")
    for name, source in blocks:
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    for name, _ in blocks:
        sys.modules.pop(name.removesuffix(".py"), None)


@pytest.mark.usefixtures("_files_of_the_page")
@pytest.mark.parametrize("name", ["my_kernels:decode", "my_adapter:MyKernel"])
@pytest.mark.parametrize("kind", ["PAGE", "LSE", "EMPTY", "QLEN"])
def test_the_kernels_of_the_page_keep_their_promises(name: str, kind: str) -> None:
    subject = WatchedSubject(load_adapter(name), torch.device("cpu"))
    small = CONFIGURATIONS[-1]
    assert small.fields["num_heads"] == 8
    found = [ask(prop, subject, small, examples=3, seed=0) for prop in properties_of(kind)]
    assert [finding for finding in found if finding.bad] == []
    assert any(finding.status == "passed" for finding in found)


@pytest.mark.usefixtures("_files_of_the_page")
def test_the_lines_of_the_pages_adapter_call_it() -> None:
    from pagedmla.conformance.builder import build

    adapter, call = load_adapter("my_adapter:MyKernel"), build((5, 0, 70), num_heads=4)
    names: dict[str, Any] = {"call": call, "math": __import__("math")}
    exec(adapter.lines({}), names)
    out, lse = adapter.prepare(call, {}).run()
    assert torch.equal(out, names["out"])
    assert lse is not None
    assert torch.equal(lse, names["lse"])


@pytest.mark.usefixtures("_files_of_the_page")
def test_the_script_of_the_page_prints_and_writes(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    asked = answer(FAILED)
    source = Path("my_report.py").read_text()
    exec(compile(source, "my_report.py", "exec"), {"__name__": "__main__"})
    assert asked.asked["impl"] == "my_kernels:decode"
    assert capsys.readouterr().out.startswith(
        "LSE lse-values, h16 p64 bf16\nlse[0, 1] is 2 where 1 is right\n"
    )
    assert "lse[0, 1] is 2 where 1 is right" in Path("report.html").read_text()


def test_the_page_lists_every_kind_and_only_options_that_exist() -> None:
    kinds = dict(re.findall(r"^\| `([A-Z0-9]+)` \| (.+?) \|$", PAGE, flags=re.MULTILINE))
    assert kinds == KINDS
    text = run_cli("check", "--help").stdout
    options = set(re.findall(r"(--[a-z][a-z-]*)", PAGE))
    assert {"--impl", "--kind", "--html", "--time-limit"} <= options
    assert [option for option in options if option not in text] == []
