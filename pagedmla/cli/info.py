"""``pagedmla info``: this machine, its versions, and what is supported on it and why the rest is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from pagedmla.cli.report import BackendReport


def info(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
) -> None:
    """Show the machine, the versions, and what each backend takes here and why it refuses the rest."""
    from pagedmla.bench.machine import machine_line, versions
    from pagedmla.cli.devices import targets
    from pagedmla.cli.report import report_all

    devices = targets()
    reports = {device: report_all(target) for device, target in devices.items()}
    if as_json:
        document = {
            "machine": machine_line(),
            "versions": versions(),
            "targets": {
                device: {**_target_fields(target), "backends": [_backend_fields(r) for r in reports[device]]}
                for device, target in devices.items()
            },
        }
        typer.echo(json.dumps(document, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"machine   {machine_line()}", soft_wrap=True)
    found = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions().items())
    console.print(f"versions  {found}", soft_wrap=True)
    for device, target in devices.items():
        console.print(f"\n{device}: {target}", style="bold")
        for report in reports[device]:
            _print_backend(console, report)


def _print_backend(console: Console, report: BackendReport) -> None:
    from rich.table import Table

    console.print(
        f"backend {report.name}: {report.summary}; takes {report.accepted} of {report.sampled} sampled"
    )
    table = Table("field", "taken", "values that check visits", show_lines=False)
    for axis in report.axes:
        table.add_row(axis.field, axis.rule, ", ".join(axis.taken))
    console.print(table)
    for group in report.refusals:
        console.print(f"refused [{group.code}] {group.argument}:", markup=False)
        for wanted, given in group.given.items():
            console.print(f"    {', '.join(given)}; taken: {wanted}", markup=False, soft_wrap=True)


def _target_fields(target: Any) -> dict[str, Any]:
    return {
        "vendor": target.vendor,
        "arch": target.arch,
        "name": target.name,
        "compute_units": target.compute_units,
    }


def _backend_fields(report: BackendReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "summary": report.summary,
        "accepted": report.accepted,
        "sampled": report.sampled,
        "axes": [
            {"field": axis.field, "rule": axis.rule, "taken": axis.taken, "refused": axis.refused}
            for axis in report.axes
        ],
        "refusals": [
            {
                "code": group.code,
                "argument": group.argument,
                "reasons": [{"wanted": wanted, "got": list(given)} for wanted, given in group.given.items()],
            }
            for group in report.refusals
        ],
    }
