"""The public names are the documented ones, and each has a docstring."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import pagedmla

API_PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"


def first_column(headings: set[str], page: str) -> list[str]:
    """The code words that open a table row under one of ``headings``."""
    found = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        if section.splitlines()[0] in headings:
            found += re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
    return found


def test_all_is_what_the_page_documents() -> None:
    page = API_PAGE.read_text()
    documented = first_column({"Decoding", "What is asked, and what is supported", "Errors"}, page)
    assert len(documented) == len(set(documented))
    assert sorted(documented) == sorted(pagedmla.__all__)


def test_the_page_is_really_read() -> None:
    page = "## Errors\n\n| name | is |\n|---|---|\n| `A` | x |\n| `B` | y |\n\n## Other\n\n| `C` | z |\n"
    assert first_column({"Errors"}, page) == ["A", "B"]


def test_all_is_sorted_and_has_no_repeats() -> None:
    assert list(pagedmla.__all__) == sorted(set(pagedmla.__all__))


@pytest.mark.parametrize("name", pagedmla.__all__)
def test_each_public_name_exists_and_says_what_it_is(name: str) -> None:
    documentation = getattr(pagedmla, name).__doc__
    assert documentation
    assert len(documentation.split()) >= 5


@pytest.mark.parametrize("module", first_column({"Modules beside it"}, API_PAGE.read_text()))
def test_each_module_beside_it_is_there_with_the_names_that_the_page_gives(module: str) -> None:
    loaded = importlib.import_module(module)
    row = next(line for line in API_PAGE.read_text().splitlines() if line.startswith(f"| `{module}` |"))
    for word in re.findall(r"`(\w+)(?:\(\))?`", row.split("|")[2].split(";")[0]):
        assert hasattr(loaded, word) or importlib.util.find_spec(f"{module}.{word}"), word
