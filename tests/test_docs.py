"""The pages are true: their code runs, their links lead somewhere, and docs/support.md is what the table prints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedmla.cli import support_page
from pagedmla.contract.support import refusals

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def run_block(source: str, name: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, object], str]:
    """Runs a page's code as a program; returns its names and what it printed."""
    names: dict[str, object] = {"__name__": "__main__"}
    torch.manual_seed(0)
    exec(compile(source, name, "exec"), names)  # the project's own page
    return names, capsys.readouterr().out


def test_the_readme_has_the_two_examples() -> None:
    assert len(python_blocks(ROOT / "README.md")) == 2


def test_the_readme_transformers_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names, printed = run_block(python_blocks(ROOT / "README.md")[0], "README.md", capsys)
    model, prompt, tokens = names["model"], names["prompt"], names["tokens"]
    stock = model.generate(prompt, max_new_tokens=40, do_sample=False)  # type: ignore[attr-defined]
    assert torch.equal(tokens, stock)  # type: ignore[arg-type]
    assert printed.startswith("The two sisters walked to the village after breakfast, and")


def test_the_readme_decode_example_runs_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    names, printed = run_block(python_blocks(ROOT / "README.md")[1], "README.md", capsys)
    errors = [float(number) for number in re.findall(r"tensor\(([^,]+),", printed)]
    assert len(errors) == 2
    assert errors[0] < 0.02  # bf16 keeps 8 bits of values up to about 4
    assert errors[1] < 1e-4
    # an independent look at one row: sequence 1 has 20 tokens, all in page 3
    q, cache = names["q"], names["cache"]
    keys = cache[3, :20].double()  # type: ignore[index]
    weights = torch.softmax(q[1].double() @ keys.T * 192**-0.5, -1)  # type: ignore[index]
    torch.testing.assert_close(names["out"][1].double(), weights @ keys[:, :512], rtol=0.02, atol=0.02)  # type: ignore[index]


@pytest.fixture
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page is about machines as users have them; these tests interpret Triton's kernels."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refusals.cache_clear()
    yield
    refusals.cache_clear()


@pytest.mark.usefixtures("_no_interpreter")
def test_the_support_page_is_what_the_table_prints() -> None:
    committed = (ROOT / support_page.DEFAULT_FILE).read_text()
    assert committed == support_page.support_page(), "run: python -m pagedmla.cli.support_page"


def test_the_support_page_is_written_where_it_is_told(tmp_path: Path) -> None:
    support_page.main([str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text() == support_page.support_page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    navigation = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert navigation == {page.name for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_pages_exist(page: Path) -> None:
    from pagedmla.cli.main import app

    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    for command in re.findall(r"pagedmla ([a-z]+)(?= --|`|$)", page.read_text(), flags=re.MULTILINE):
        assert command in commands, command
