"""What ``pagedmla bench`` prints: a line for each row while it runs, then the table, the notes, the parts and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pagedmla.bench.decode_bench import BenchResult, Measurement, Row

_MOST_PARTS = 12
"""Lines of parts for one decode; a GPU's decode has a handful of kernels, a CPU's dozens of operations."""


def progress_line(row: Row) -> str:
    if row.floor is None:
        return f"{row.shape.name}: {row.detail}"
    times = (
        f"{m.contender} {m.status if m.time is None else format(m.time.median_us, '.1f')}"
        for m in row.measurements
    )
    return f"{row.shape.name}: floor {row.floor.us:.1f} us ({row.floor.bound}); {', '.join(times)}"


def print_result(result: BenchResult) -> None:
    from rich.console import Console
    from rich.measure import Measurement as Width

    from pagedmla.bench.report import caption, document, summarise, summary_line

    console = Console(highlight=False)
    table = _table(result)
    if not console.is_terminal:
        # a file has no edge: nothing is cut or wrapped
        console.width = max(
            console.width, Width.get(console, console.options.update(max_width=2000), table).maximum
        )
    console.print(table)
    console.print(caption(result), markup=False, soft_wrap=True)
    for contender in result.plan.contenders:
        console.print(f"{contender.name}: {contender.version}", markup=False, soft_wrap=True)
    _print_notes(console, result)
    _print_parts(console, result)
    for ours in result.plan.ours:
        console.print(summary_line(summarise(result, ours.name)), markup=False, soft_wrap=True)
    print_verdicts(console, document(result))


def _table(result: BenchResult) -> Table:
    from rich.table import Table

    from pagedmla.bench.machine import machine_line

    table = Table(title=machine_line(result.plan.device))
    table.add_column("shape", no_wrap=True)
    table.add_column("floor, us", justify="right", no_wrap=True)
    for contender in result.plan.contenders:
        table.add_column(contender.name, justify="right", no_wrap=True)
    for row in result.rows:
        floor = "-" if row.floor is None else f"{row.floor.us:.1f} {row.floor.bound}"
        if row.floor is not None and row.floor.cold_us is not None:
            floor += f"\ncold {row.floor.cold_us:.1f}"
        table.add_row(row.shape.name, floor, *(_cell(result, row, m) for m in row.measurements))
    return table


def _cell(result: BenchResult, row: Row, measurement: Measurement) -> str:
    from pagedmla.bench.report import REFERENCE_PEER, floor_ratio, peer_ratios

    if measurement.time is None:
        return measurement.status
    name = measurement.contender
    lines = [f"{measurement.time.median_us:.1f} ({floor_ratio(row, name):.2f})"]
    if name in {ours.name for ours in result.plan.ours}:
        ratios = peer_ratios(row, name, [peer.name for peer in result.plan.peers])
        if ratios:
            lines.append(f"{min(ratios.values()):.2f}x best")
        if REFERENCE_PEER in ratios:
            lines.append(f"{ratios[REFERENCE_PEER]:.2f}x {REFERENCE_PEER}")
    for word in ("cold", "host", "eager"):
        time = getattr(measurement, word)
        if time is not None:
            lines.append(f"{word} {time.median_us:.1f}")
    if measurement.plan is not None:
        lines.append(f"plan {measurement.plan.time.median_us:.1f} ({measurement.plan.where})")
    if measurement.runs_on not in ("", name.split("/")[0]):
        lines.append(f"by {measurement.runs_on}")
    return "\n".join(lines)


def _print_notes(console: Console, result: BenchResult) -> None:
    """Why a number is missing, each reason once."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in result.rows:
        if row.detail:
            console.print(f"{row.shape.name}: {row.detail}", markup=False, soft_wrap=True)
        for m in row.measurements:
            if m.detail:
                reasons.setdefault((m.contender, m.status, m.detail), []).append(row.shape.name)
    for (name, status, detail), where in reasons.items():
        console.print(f"{name} {status}: {detail} ({'; '.join(where)})", markup=False, soft_wrap=True)
    for name, reason in result.absent.items():
        console.print(f"{name} not measured: {reason}", markup=False, soft_wrap=True)


def _print_parts(console: Console, result: BenchResult) -> None:
    """The kernels of a decode, where --breakdown asked for them."""
    from pagedmla.bench.breakdown import short_name

    for row in result.rows:
        for m in row.measurements:
            if m.breakdown is None:
                continue
            where = f"{row.shape.name}, {m.contender}: {m.breakdown.decode_us:.1f} us"
            console.print(f"{where}, of which between the kernels {m.breakdown.between_us:.1f}", markup=False)
            for part in m.breakdown.parts[:_MOST_PARTS]:
                line = f"  {part.us:9.1f} us  {part.launches:5.1f} x  {short_name(part.name)}"
                console.print(line, markup=False, soft_wrap=True)
            rest = m.breakdown.parts[_MOST_PARTS:]
            if rest:
                console.print(
                    f"  {sum(part.us for part in rest):9.1f} us  in {len(rest)} others", markup=False
                )


def print_verdicts(console: Console, figures: Mapping[str, Any]) -> None:
    """The word on each target, for each contender of ours: a missed one is no error."""
    from pagedmla.bench.targets import Verdict

    for name, found in figures["verdicts"].items():
        if found:
            console.print(f"targets (set for one NVIDIA H200), {name}:", markup=False)
        for fields in found:
            console.print(f"  {Verdict(**fields)}", markup=False, soft_wrap=True)
