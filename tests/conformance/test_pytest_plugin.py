"""The plug-in in test runs of its own: what it collects, fails, skips and says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedmla.conformance import pytest_plugin

pytest_plugins = ["pytester"]

KERNELS = """
import pagedmla
from pagedmla.conformance.adapters.ours import Ours

def right(q, kv_cache, block_table, seq_lens, **given):
    return pagedmla.decode(q, kv_cache, block_table, seq_lens, **given)

def last_page_full(q, kv_cache, block_table, seq_lens, **given):
    size = kv_cache.shape[1]
    return right(q, kv_cache, block_table, (seq_lens + size - 1) // size * size, **given)

class NoFp16(Ours):
    name = "no fp16"
    def refuses(self, spec, options, device):
        return "takes no fp16" if spec.dtype == "fp16" else super().refuses(spec, options, device)
"""

TEST = """
import pytest
from pagedmla.conformance.configurations import Configuration

DIMS = {{"num_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "page_size": 16}}
SMALL = Configuration("small bf16", DIMS, most_keys=40)
HALF = Configuration("small fp16", {{**DIMS, "dtype": "fp16"}}, most_keys=40)

{marker}
def test_kernel(mla_property):
    mla_property.check()
"""


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """What a run inside this process imports, it takes along when it ends; torch does not bear being imported twice."""
    from pagedmla.conformance import child  # noqa: F401
    from pagedmla.conformance.properties import KINDS, properties_of
    from pagedmla.conformance.subject import unwritten_memory_is_nan

    for kind in KINDS:
        properties_of(kind)
    with unwritten_memory_is_nan():
        torch.empty(1)


@pytest.fixture(autouse=True)
def _plugin_alone(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As it is loaded by name, and without the plug-ins that are installed here."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(plugged_kernels=KERNELS)
    pytester.syspathinsert()
    yield
    sys.modules.pop("plugged_kernels", None)


def run(pytester: pytest.Pytester, marker: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_it=TEST.format(marker=marker))
    return pytester.runpytest_inprocess(
        "-p", "pagedmla.conformance.pytest_plugin", "-p", "no:cacheprovider", "--strict-markers", *options
    )


def marker(impl: str, rest: str) -> str:
    return f"@pytest.mark.mla_conformance(impl={impl!r}, examples=4, {rest})"


def test_a_right_function_passes(pytester: pytest.Pytester) -> None:
    given = marker("plugged_kernels:right", "kinds=('PAGE', 'LSE'), configurations=[SMALL]")
    result = run(pytester, given, "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["*test_kernel?PAGE-small-bf16? PASSED*", "*test_kernel?LSE-small-bf16? PASSED*"]
    )


def test_a_broken_one_fails_with_a_reproducer_and_without_our_frames(pytester: pytest.Pytester) -> None:
    result = run(pytester, marker("plugged_kernels:last_page_full", "kinds=['PAGE'], configurations=[SMALL]"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "PAGE page-sizes, small bf16: failed",
            "promise: every page size that is accepted gives the values of the float64 oracle*",
            "out?*? is * where * is right, bound *",
            "from pagedmla.conformance.builder import build",
            "call = build(seq_lens=(*",
            "from plugged_kernels import last_page_full",
        ]
    )
    assert "pytest_plugin.py" not in result.stdout.str()


def test_what_is_refused_is_skipped_with_the_reason(pytester: pytest.Pytester) -> None:
    given = marker("plugged_kernels:NoFp16", "kinds=('PAGE',), configurations=(SMALL, HALF)")
    result = run(pytester, given, "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*SKIPPED*refused: takes no fp16*"])


def test_what_does_not_apply_is_skipped(pytester: pytest.Pytester) -> None:
    given = marker("plugged_kernels:right", "kinds='PERF', configurations=[SMALL]")
    result = run(pytester, given, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not applied: *"])


def test_configurations_are_named_or_all(pytester: pytest.Pytester) -> None:
    result = run(
        pytester, marker("x", "kinds=['LSE'], configurations=['h16 p64 bf16']"), "--collect-only", "-q"
    )
    result.stdout.fnmatch_lines(["test_it.py::test_kernel?LSE-h16-p64-bf16?", "*1 test collected*"])
    # one name is no sequence of letters
    result = run(
        pytester, marker("x", "kinds=['LSE'], configurations='h16 p64 bf16'"), "--collect-only", "-q"
    )
    result.stdout.fnmatch_lines(["test_it.py::test_kernel?LSE-h16-p64-bf16?", "*1 test collected*"])
    from pagedmla.conformance.configurations import CONFIGURATIONS
    from pagedmla.conformance.properties import KINDS

    result = run(pytester, "@pytest.mark.mla_conformance('x')", "--collect-only", "-q")
    result.stdout.fnmatch_lines([f"*{len(KINDS) * len(CONFIGURATIONS)} tests collected*"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "",
            "*test_kernel asks for mla_property: it needs @pytest.mark.mla_conformance(impl='module:function')*",
        ),
        (marker("x", "kinds=['NONE']"), "*kind: wanted one of PAGE, *, got 'NONE'*"),
        (
            marker("x", "configurations=['h17']"),
            "*configurations: wanted some of h16 p64 bf16, *, got 'h17'*",
        ),
        (marker("x", "colour='red'"), "*mla_conformance: *unexpected keyword argument 'colour'*"),
    ],
)
def test_a_mistake_in_the_marker_is_said_at_collection(
    pytester: pytest.Pytester, given: str, message: str
) -> None:
    result = run(pytester, given)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])


def test_an_unknown_implementation_is_an_error_of_the_test(pytester: pytest.Pytester) -> None:
    result = run(pytester, marker("plugged_kernels:nothing", "kinds=['LSE'], configurations=[SMALL]"))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*impl: wanted *'nothing', which it does not have*"])


def test_the_marker_is_registered(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("-p", "pagedmla.conformance.pytest_plugin", "--markers")
    result.stdout.fnmatch_lines(
        ["@pytest.mark.mla_conformance(impl, kinds=None, *examples=20, device='cpu'*"]
    )


def test_other_tests_are_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="import pytest\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_n(n):\n    assert n\n"
    )
    pytester.runpytest_inprocess("-p", "pagedmla.conformance.pytest_plugin").assert_outcomes(passed=2)


def test_the_module_itself_loads_pytest_and_nothing_heavy() -> None:
    source = f"""
import importlib.abc, importlib.util, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "hypothesis", "jinja2", "numpy", "pagedmla"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Block())
spec = importlib.util.spec_from_file_location("plugin", {str(Path(pytest_plugin.__file__))!r})
module = importlib.util.module_from_spec(spec)
sys.modules["plugin"] = module
spec.loader.exec_module(module)
assert module.pytest_generate_tests
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_loading_it_leaves_the_kit_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="""
import sys

def test_nothing_of_the_kit_is_loaded():
    assert "hypothesis" not in sys.modules
    loaded = [name for name in sys.modules if name.startswith("pagedmla.conformance.")]
    assert loaded == ["pagedmla.conformance.pytest_plugin"]
"""
    )
    result = pytester.runpytest_subprocess("-p", "pagedmla.conformance.pytest_plugin")
    result.assert_outcomes(passed=1)


def test_the_test_in_the_documentation_passes(pytester: pytest.Pytester) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "test_your_kernel.md").read_text()
    for name, source in re.findall(
        r"^```python\n# (\w+)\.py\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL
    ):
        if name in ("my_kernels", "test_my_kernels"):
            pytester.makepyfile(**{name: source})
    pytester.runpytest_inprocess(
        "-p", "pagedmla.conformance.pytest_plugin", "--strict-markers"
    ).assert_outcomes(passed=2)
    sys.modules.pop("my_kernels", None)
