"""A report as one HTML page that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

from importlib import resources

import jinja2

from pagedmla.conformance.findings import STATUSES, Report, cell_text
from pagedmla.conformance.properties import KINDS


def render_html(report: Report) -> str:
    """The page; everything that came from an implementation is escaped."""
    source = resources.files("pagedmla.conformance").joinpath("templates/report.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(
        report=report,
        matrix=report.matrix(),
        kinds=KINDS,
        cell_text=cell_text,
        counts={status: report.count(status) for status in STATUSES},
    )
