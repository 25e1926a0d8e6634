"""The HTML page: it says everything, in words, needs nothing from elsewhere, and trusts nothing that it shows."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from pagedmla.conformance.findings import Finding, Report
from pagedmla.conformance.html_report import render_html

HOSTILE = "<script>alert('x')</script> & \"quoted\""
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """What a page holds; fails on tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[list[tuple[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self._class = ""
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)
        self._class = dict(attrs).get("class") or ""
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append((self._class, ""))
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        for tag in ("td", "th"):
            if tag in self._open:
                style, text = self.cells[-1][-1]
                self.cells[-1][-1] = style, text + data
        for tag in set(self._open):
            self.texts[tag][-1] += data


def finding(kind: str, configuration: str, status: str, **more: object) -> Finding:
    return Finding(kind, f"{kind.lower()}-property", "what is promised", configuration, status, **more)  # type: ignore[arg-type]


REPORT = Report(
    impl="somebody:decode",
    version="2.7.1",
    device="cuda:0",
    seed=41,
    examples=20,
    findings=(
        finding("PAGE", "h16", "passed", examples=20),
        finding(
            "PAGE", "h128", "failed", examples=3, detail=HOSTILE, example="e", reproducer="call = '<pre>'\n"
        ),
        finding(
            "LSE", "h16", "died", detail="was killed by SIGSEGV\nCurrent thread", example="the <b>example</b>"
        ),
        finding("LSE", "h128", "hung", detail="nothing had moved", reproducer="import torch\n"),
        finding("FP8", "h16", "refused", detail="takes no fp8"),
        finding("FP8", "h128", "not applied"),
    ),
    seconds=12.34,
    machine="a card, CUDA 13.0; Linux",
    versions={"torch": "2.11.0", "vllm": None},
    command="-m pagedmla.cli check --impl somebody:decode",
)


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(REPORT)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_header_says_what_was_examined_where_and_how(page: Page) -> None:
    header = page.texts["header"][0]
    for part in (
        "somebody:decode",
        "2.7.1",
        "a card, CUDA 13.0; Linux",
        "cuda:0",
        "41, at most 20 examples",
        "12.3 s",
        "python -m pagedmla.cli check --impl somebody:decode",
        "torch 2.11.0",
    ):
        assert part in header
    assert "vllm" not in header
    assert "declared" not in header


def test_what_is_declared_stands_in_the_header() -> None:
    html = render_html(replace(REPORT, declared=("lse has base 2", HOSTILE)))
    assert f"declared, and no faultlse has base 2; {HOSTILE}" in Page(html).texts["dl"][0].replace("\n", "")


def test_the_counts_are_in_the_header(page: Page) -> None:
    header = page.texts["header"][0]
    assert re.search(
        r"3 of 6 promises are not kept:\s+1 hung, 1 died, 1 failed, 1 passed, 1 refused, 1 not applied",
        header,
    )


def test_the_matrix_has_a_word_in_every_coloured_cell(page: Page) -> None:
    rows = {row[0][1].split()[0]: row[1:] for row in page.cells[1:4]}
    assert [text for _, text in page.cells[0]] == ["kind", "h16", "h128"]
    assert rows == {
        "PAGE": [("passed", "ok 20"), ("failed", "FAILED 3")],
        "LSE": [("died", "DIED 0"), ("hung", "HUNG 0")],
        "FP8": [("refused", "no (refused)"), ("not-applied", "-")],
    }
    assert "paged metadata and page sizes" in page.cells[1][0][1]


def test_each_failure_has_its_promise_detail_and_reproducer(page: Page) -> None:
    assert len(page.texts["section"]) == 3
    failed, died, hung = page.texts["section"]
    assert "PAGE page-property, h128" in failed
    assert "Promise: what is promised." in failed
    assert page.texts["pre"] == [
        HOSTILE,
        "call = '<pre>'\n",
        "was killed by SIGSEGV\nCurrent thread",
        "the <b>example</b>",
        "nothing had moved",
        "import torch\n",
    ]
    assert "died" in died
    assert "hung" in hung


def test_what_an_implementation_says_is_text(html: str, page: Page) -> None:
    assert "script" not in page.tags
    assert "&lt;script&gt;" in html
    assert "<b>" not in html


def test_the_page_needs_nothing_else(html: str, page: Page) -> None:
    assert {name for name, _ in page.attributes} & {"src", "href", "srcset", "data", "action"} == set()
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"url\(|@import|https?://", html)


def test_it_follows_the_readers_colours(html: str) -> None:
    dark = html[html.index("@media (prefers-color-scheme: dark)") :]
    names = set(re.findall(r"var\((--[a-z]+)\)", html))
    for scheme in (html[: html.index("@media")], dark[: dark.index("* {")]):
        assert names <= set(re.findall(r"(--[a-z]+):", scheme))
    assert "color-scheme: light dark" in html


def test_a_clean_report_says_so() -> None:
    page = Page(render_html(Report("x", "", "cpu", 0, 5, REPORT.findings[:1])))
    assert "No promise was seen broken:" in page.texts["header"][0]
    assert "unknown" in page.texts["header"][0]
    assert "section" not in page.texts
    assert "command" not in page.texts["header"][0]


def test_a_finding_of_no_detail_and_one_of_none_asked_are_shown() -> None:
    page = Page(render_html(Report("x", "1", "cpu", 0, 5, ())))
    assert "0 findings" in page.texts["summary"][0]
