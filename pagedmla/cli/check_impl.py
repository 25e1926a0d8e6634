"""``pagedmla check --impl``: any implementation, asked for every promise of the contract."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pagedmla.cli.console import EXIT_FAILED, fail, usable_device, user_errors
from pagedmla.contract.errors import InvalidArgument

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from pagedmla.conformance.configurations import Configuration
    from pagedmla.conformance.findings import Finding, Report

_EXTRA_PACKAGES = ("hypothesis", "jinja2")
_MOST_REFUSALS = 10
_EXIT_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class ImplOptions:
    """The options of ``pagedmla check`` that go with ``--impl``; None or "" where one was left out.

    Attributes:
        kind: kinds of fault, with commas.
        config: text in the name of a configuration.
        examples: most examples of a property.
        time_limit: of a job, in seconds.
        peers: folder of the software's files.
        seed: of the draws.
        html: where to write the report as a page.
    """

    kind: str = ""
    config: str = ""
    examples: int | None = None
    time_limit: float | None = None
    peers: Path | None = None
    seed: int | None = None
    html: Path | None = None

    def given(self) -> list[str]:
        """The options that were not left out, as they are typed."""
        return [
            "--" + name.replace("_", "-") for name, value in vars(self).items() if value not in (None, "")
        ]


def check_impl(
    impl: str, options: ImplOptions, device_name: str | None, processes: int | None, as_json: bool
) -> None:
    """Examines ``impl``, prints what came of it, and exits with 1 if a promise is broken, 2 if none was asked for."""
    with user_errors(), _conformance_extra():
        # before minutes of examining, not after
        write_page = _page_writer(options.html)
        if options.peers is not None and not options.peers.is_dir():
            fail(f"--peers: {options.peers} is no folder")
        device = usable_device(device_name)
        kinds, configurations = _kinds(options.kind), _configurations(options.config)
        found = _run(impl, device, kinds, configurations, options, processes, quiet=as_json)
        report = _with_machine(found, device, _command(impl, options, device_name))
        write_page(report)
        if as_json:
            typer.echo(report.to_json())
        else:
            _print(report)
    if report.bad:
        raise typer.Exit(EXIT_FAILED)
    if not report.count("passed"):
        fail(f"{impl} was asked nothing that it takes: nothing was checked{_first_reason(report)}")


@contextmanager
def _conformance_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA_PACKAGES:
            raise
        fail(f"check --impl needs {error.name}: pip install 'pagedmla[conformance]'")


def _kinds(text: str) -> list[str] | None:
    """The kinds named in ``text``, in any case; None when there is no text.

    Raises:
        InvalidArgument: there is no such kind, or nothing but commas.
    """
    from pagedmla.conformance.properties import KINDS

    names = [word.strip().upper() for word in text.split(",") if word.strip()]
    unknown = [name for name in names if name not in KINDS]
    if unknown or (text and not names):
        wanted = "some of " + ", ".join(KINDS)
        raise InvalidArgument("kind", "kind", wanted, repr(unknown[0] if unknown else text))
    return names or None


def _configurations(text: str) -> tuple[Configuration, ...] | None:
    """The kit's own configurations with ``text`` in their name; None when there is no text.

    Raises:
        InvalidArgument: none has.
    """
    from pagedmla.conformance.configurations import CONFIGURATIONS

    found = tuple(configuration for configuration in CONFIGURATIONS if text in configuration.name)
    if not found:
        names = ", ".join(configuration.name for configuration in CONFIGURATIONS)
        raise InvalidArgument("config", "config", f"text in one of {names}", repr(text))
    return found if text else None


def _run(
    impl: str,
    device: torch.device,
    kinds: list[str] | None,
    configurations: tuple[Configuration, ...] | None,
    options: ImplOptions,
    processes: int | None,
    quiet: bool,
) -> Report:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pagedmla.bench.machine import machine_line
    from pagedmla.conformance.kit import DEFAULT_EXAMPLES, DEFAULT_TIME_LIMIT_S, run_kit

    # of a document on stdout nothing else may be part
    console = Console(highlight=False, stderr=quiet)
    if not quiet:
        console.print(f"{machine_line(device)}\nexamining {impl} on {device}", markup=False, soft_wrap=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    shown = console.is_terminal and not quiet
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("loading", total=None)

        def report(finding: Finding, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=finding.title)
            if finding.bad and not quiet:
                console.print(_headline(finding), markup=False, soft_wrap=True)

        with _ended_by_sigterm():
            return run_kit(
                impl,
                device,
                kinds,
                configurations,
                examples=options.examples or DEFAULT_EXAMPLES,
                time_limit_s=options.time_limit or DEFAULT_TIME_LIMIT_S,
                processes=processes,
                seed=options.seed or 0,
                folder=options.peers,
                report=report,
            )


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """In here SIGTERM is an exception: ``run_kit`` kills its children on the way out, which would outlive this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_EXIT_TERMINATED))
    try:
        yield
    finally:
        # None: a handler that Python did not set, and cannot put back
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _with_machine(report: Report, device: torch.device, command: str) -> Report:
    from pagedmla.bench.machine import machine_line, versions

    return replace(report, machine=machine_line(device), versions=versions(), command=command)


def _headline(finding: Finding) -> str:
    return f"{finding.status.upper()} {finding.title}: {_first_line(finding.detail)}"


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _refusals(report: Report) -> list[str]:
    """A line for each kind and reason of what was refused."""
    reasons = (
        (finding.kind, _first_line(finding.detail) or "no reason was given")
        for finding in report.findings
        if finding.status == "refused"
    )
    return [f"refused {kind}: {reason}" for kind, reason in dict.fromkeys(reasons)]


def _first_reason(report: Report) -> str:
    """Why nothing was checked, with a semicolon ahead; a refusal's reason says more than a feature that is not claimed."""
    if not report.findings:
        # what takes none of the kit's own is not asked at all, unless they are named
        return "; it takes no configuration of the kit's, and says why to --config h16"
    for status in ("refused", "not applied"):
        for finding in report.findings:
            if finding.status == status and finding.detail:
                return f"; {status}: {_first_line(finding.detail)}"
    return ""


def _print(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _print_matrix(console, report)
    refusals = _refusals(report)
    for line in refusals[:_MOST_REFUSALS]:
        console.print(line, markup=False, soft_wrap=True)
    if len(refusals) > _MOST_REFUSALS:
        console.print(f"and {len(refusals) - _MOST_REFUSALS} more", markup=False, soft_wrap=True)
    shown: dict[tuple[str, str, str], str] = {}
    for finding in report.bad:
        key = finding.kind, finding.property, finding.detail
        if key in shown:
            console.print(f"\n{_headline(finding)}\nas for {shown[key]}", markup=False, soft_wrap=True)
        else:
            _print_finding(console, finding)
            shown[key] = finding.configuration
    counts = (
        f"{report.count(status)} {status}"
        for status in ("passed", "failed", "died", "hung", "refused", "not applied")
        if report.count(status) or status in ("passed", "failed")
    )
    console.print(f"{', '.join(counts)} in {report.seconds:.1f} s", markup=False, soft_wrap=True)


def _print_matrix(console: Console, report: Report) -> None:
    from rich.measure import Measurement
    from rich.table import Table

    from pagedmla.conformance.findings import cell_text

    title = (
        f"{report.impl} ({report.version or 'of an unknown version'}) on {report.device}, seed {report.seed}"
    )
    console.print(title, markup=False, soft_wrap=True)
    for said in report.declared:
        console.print(f"declared: {said}", markup=False, soft_wrap=True)
    table = Table()
    table.add_column("kind", no_wrap=True)
    for name in report.configurations():
        table.add_column(name)
    cells = report.matrix()
    for kind in report.kinds():
        table.add_row(kind, *(cell_text(cells.get((kind, name))) for name in report.configurations()))
    if not console.is_terminal:
        # a file has no edge: nothing is cut or wrapped
        widest = Measurement.get(console, console.options.update(max_width=2000), table).maximum
        console.width = max(console.width, widest)
    console.print(table)


def _print_finding(console: Console, finding: Finding) -> None:
    shown = finding.reproducer or f"example: {finding.example}"
    text = f"\n{_headline(finding)}\npromise: {finding.promise}\n"
    rest = finding.detail.splitlines()[1:]
    text += "".join(f"    {line}\n" for line in rest)
    console.print(
        text + "\n" + "\n".join(f"    {line}".rstrip() for line in shown.splitlines()),
        markup=False,
        soft_wrap=True,
    )


def _page_writer(html: Path | None) -> Callable[[Report], object]:
    """Writes a report to ``html``, of which it is known by now that it can be."""
    if html is None:
        return lambda report: None
    from pagedmla.conformance.html_report import render_html

    if html.is_dir() or not os.access(html.parent, os.W_OK):
        fail(f"--html: {html} cannot be written")
    return lambda report: html.write_text(render_html(report), encoding="utf-8")


def _command(impl: str, options: ImplOptions, device: str | None) -> str:
    """The words after ``python`` that examine the same again; where somebody keeps files is not in them."""
    words = ["-m", "pagedmla.cli", "check", "--impl", impl]
    for name, value in {**vars(options), "device": device}.items():
        if name == "html" or value in (None, ""):
            continue
        words += ["--" + name.replace("_", "-"), "DIR" if name == "peers" else str(value)]
    return shlex.join(words)
