"""Prints docs/support.md from the support table: ``python -m pagedmla.cli.support_page [FILE]``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pagedmla.cli.report import BackendReport, report_all
from pagedmla.contract.kv_layout import KV_LAYOUTS
from pagedmla.contract.target import Target

DEFAULT_FILE = Path("docs/support.md")

TARGETS: dict[str, Target] = {
    "Any CPU": Target(vendor="cpu", arch="any", compute_units=1, shared_memory_bytes=0),
}
"""The machines that the page describes, by their heading."""

_HEAD = """# Support

<!-- Made by `python -m pagedmla.cli.support_page`; edit pagedmla/contract/support.py instead. -->

This page is printed from the table that the dispatcher, the errors, `pagedmla info` and the tests ask.  A problem
is refused when any rule refuses it; `pagedmla.explain(problem)` gives the reasons for one.  `pagedmla check` runs
every accepted configuration that the table samples against the float64 reference.

## Cache layouts

| layout | dtype | bytes per token at 512 + 64 | fields in order |
|---|---|---|---|
"""


def support_page() -> str:
    """The page as Markdown."""
    lines = [_HEAD.rstrip("\n")]
    for name, layout in KV_LAYOUTS.items():
        dtype = str(layout.dtype).removeprefix("torch.")
        lines.append(f"| `{name}` | {dtype} | {layout.bytes_per_token(512, 64)} | {layout.description} |")
    for heading, target in TARGETS.items():
        lines += ["", f"## {heading}"]
        for report in report_all(target):
            lines += ["", *_backend_section(report)]
    return "\n".join(lines) + "\n"


def _backend_section(report: BackendReport) -> Iterator[str]:
    yield f"### `{report.name}`: {report.summary}"
    yield ""
    yield f"Takes {report.accepted} of the {report.sampled} problems that the table samples."
    yield ""
    yield "| field | taken | values that checks and tests visit |"
    yield "|---|---|---|"
    for axis in report.axes:
        yield f"| {axis.field} | {axis.rule} | {', '.join(axis.taken)} |"
    yield ""
    yield "Refused:"
    yield ""
    yield "| code | argument | given | this backend takes |"
    yield "|---|---|---|---|"
    for group in report.refusals:
        for wanted, given in group.given.items():
            yield f"| `{group.code}` | {group.argument} | {', '.join(given)} | {wanted} |"


def main(arguments: list[str]) -> None:
    """Writes the page to the file named first in ``arguments``, docs/support.md when there is none."""
    file = Path(arguments[0]) if arguments else DEFAULT_FILE
    file.write_text(support_page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
