"""Draws the figures of ``pagedmla bench``: rows against floor and peers, and a roofline.  Needs matplotlib (extra ``plot``).

A machine that measures need not draw: this reads the JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from pagedmla.bench.figures import Figures

OUR_COLOUR = "#b2182b"
_PEER_STYLES = (("#555555", "o"), ("#009e73", "s"), ("#e69f00", "^"), ("#56b4e9", "D"), ("#cc79a7", "v"))
"""Colours that eyes of every kind tell apart, and shapes for print without colour."""
_GREY = "#666666"
_SAME_COLUMN = 1.35
"""Points whose x differ by less share a column of labels."""
_TICKS = (1, 2, 5, 10, 20, 50, 100)


def draw(figures: Figures, folder: Path, stem: str) -> list[Path]:
    """Writes ``stem_rows`` and ``stem_roofline`` as PNG and SVG.

    Args:
        figures: what is drawn; the rows in their own order.
        folder: where to; it is there.
        stem: how the names begin.

    Returns:
        The files.

    Raises:
        ValueError: there is no row with a number of ours.
    """
    names = [name for name in figures.rows if figures.value(name, figures.main) is not None]
    if not names:
        raise ValueError("no row has a number of ours")
    written = []
    figures_by_word = {"rows": rows_figure(figures, names), "roofline": roofline_figure(figures, names)}
    for word, figure in figures_by_word.items():
        for ending, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            path = folder / f"{stem}_{word}.{ending}"
            with rc_context({"svg.hashsalt": stem}):  # the same figures make the same file
                figure.savefig(path, bbox_inches="tight", facecolor="white", **options)
            written.append(path)
    return written


def rows_figure(figures: Figures, names: Sequence[str]) -> Figure:
    """Left each contender's time over the floor, right the best peer's time over ours; a line for each of ``names``."""
    figure = Figure(figsize=(13, 1.9 + 0.34 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.5, 1))
    places = range(len(names))
    for place in places[::2]:
        for axes in (left, right):
            axes.axhspan(place - 0.5, place + 0.5, color="#f4f4f4", linewidth=0)
    for peer, (colour, marker) in zip(figures.peers, _PEER_STYLES * 3, strict=False):
        _dots(left, figures, names, peer, color=colour, marker=marker, s=34, alpha=0.9, zorder=2)
    _dots(left, figures, names, figures.main, color=OUR_COLOUR, marker="*", s=150, zorder=3)
    left.axvline(1, color="black", linewidth=1.6, label="floor")
    left.set_xscale("log")
    _log_axis(left.xaxis, _TICKS)
    left.set_xlim(0.9, None)
    left.set_xlabel("time over the floor (1 is the limit)")
    left.set_yticks(places, [f"{name}   {figures.floor(name):.1f} µs" for name in names], fontsize=9)
    left.set_ylim(len(names) - 0.5, -0.5)
    left.grid(axis="x", color="#d0d0d0", linewidth=0.6)
    left.set_title("Each decode against its floor (row, floor)", fontsize=11)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=4, fontsize=9, frameon=False)
    _speed_up(right, figures, names)
    figure.suptitle(_title(figures), fontsize=12)
    return figure


def _dots(axes: Any, figures: Figures, names: Sequence[str], contender: str, **style: Any) -> None:
    found = [
        (us / floor, place)
        for place, name in enumerate(names)
        if (us := figures.value(name, contender)) is not None and (floor := figures.floor(name)) is not None
    ]
    if found:
        axes.scatter(*zip(*found, strict=True), label=contender, **style)


def _speed_up(axes: Any, figures: Figures, names: Sequence[str]) -> None:
    most = 1.0
    for place, name in enumerate(names):
        ratio, best = figures.over_best_peer(name, figures.main), figures.best_peer(name)
        if ratio is None or best is None:
            axes.text(0.03, place, "no peer", va="center", fontsize=8, color=_GREY)
            continue
        axes.barh(place, ratio, height=0.62, color=OUR_COLOUR if ratio > 1 else "#bdbdbd")
        # beyond the line at 1, which would run through the words
        axes.text(max(ratio, 1.0) + 0.03, place, f"{ratio:.2f}x  {best[0]}", va="center", fontsize=8.5)
        most = max(most, ratio)
    axes.axvline(1, color="black", linewidth=1.6)
    axes.set_xlim(0, most * 1.45)
    axes.set_xlabel("best peer's time over ours (above 1: ours is faster)")
    axes.set_title(f"{figures.main} against the best peer of each row", fontsize=11)
    axes.tick_params(left=False)
    axes.grid(axis="x", color="#d0d0d0", linewidth=0.6)
    axes.set_axisbelow(True)


def roofline_figure(figures: Figures, names: Sequence[str]) -> Figure:
    """Operations a second over operations a byte, ours and the best peer's, under the two roofs that the run measured."""
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    axes = figure.subplots()
    flops_roof = figures.document["ceilings"]["matmul_tflop_per_s"]
    bytes_roof = (figures.read_rate() or 0.0) / 1e12
    ours, best = [], []
    for name in names:
        intensity = figures.flops(name) / figures.bytes_moved(name)
        ours.append((intensity, figures.flops(name) / (figures.value(name, figures.main) or 1) / 1e6, name))
        peer = figures.best_peer(name)
        if peer is not None:
            best.append((intensity, figures.flops(name) / peer[1] / 1e6))
    low, high = min(point[0] for point in ours) / 2.5, max(point[0] for point in ours) * 6
    ridge = flops_roof / bytes_roof if bytes_roof else low
    axes.plot([low, ridge, high], [low * bytes_roof, flops_roof, flops_roof], color="black", linewidth=1.6)
    axes.text(ridge * 1.1, flops_roof * 1.04, f"matmul, {flops_roof:.0f} TFLOP/s", fontsize=9, va="bottom")
    # left of the line, where no decode can be
    at = low * (ridge / low) ** 0.75
    words = f"reading pages, {bytes_roof:.2f} TB/s"
    axes.text(at * 0.95, at * bytes_roof * 1.03, words, fontsize=9, ha="right", va="bottom")
    if best:
        intensities, rates = zip(*best, strict=True)
        axes.scatter(
            intensities,
            rates,
            s=42,
            facecolors="none",
            edgecolors="#0072b2",
            label="best peer",
            zorder=2,
        )
    axes.scatter(
        [x for x, _, _ in ours],
        [y for _, y, _ in ours],
        s=110,
        marker="*",
        color=OUR_COLOUR,
        label=figures.main,
        zorder=3,
    )
    for x, y, label_x, label_y, name in spread(ours, 1.09):
        axes.annotate(
            name,
            (x, y),
            xytext=(label_x, label_y),
            fontsize=7.5,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "#b0b0b0", "linewidth": 0.6},
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    _log_axis(axes.xaxis, _between(low, high))
    bottom = min([y for _, y, _ in ours] + [y for _, y in best]) / 1.6
    axes.set_ylim(bottom, flops_roof * 1.5)
    _log_axis(axes.yaxis, _between(bottom, flops_roof * 1.5))
    axes.set_xlabel("operations a byte (each cached token, query and output moved once)")
    axes.set_ylabel("TFLOP/s")
    axes.grid(color="#e0e0e0", linewidth=0.6)
    axes.legend(loc="lower right", frameon=False)
    axes.set_title(_title(figures), fontsize=11)
    return figure


def spread(
    points: Sequence[tuple[float, float, str]], gap: float
) -> list[tuple[float, float, float, float, str]]:
    """Places for labels right of ``points``, on logarithmic axes.

    Returns:
        (x, y, x of the label, y of the label, name).  Points with nearly the same x have labels in one column, in the order of
        y and ``gap`` times apart at least.
    """
    placed: list[tuple[float, float, float, float, str]] = []
    for x, y, name in sorted(points, key=lambda point: point[1]):
        column = [other for other, _, _ in points if 1 / _SAME_COLUMN < other / x < _SAME_COLUMN]
        label_x = max(column) * 1.2
        below = [label_y for other, _, _, label_y, _ in placed if other in column]
        placed.append((x, y, label_x, max([y, *(height * gap for height in below)]), name))
    return placed


def _between(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times the powers of ten in that range."""
    return tuple(
        t for power in range(-3, 7) for digit in (1, 2, 5) if low <= (t := digit * 10.0**power) <= high
    )


def _log_axis(axis: Any, ticks: Sequence[float]) -> None:
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _title(figures: Figures) -> str:
    run = figures.document
    machine = run["machine"].partition(",")[0]
    torch_version = run["versions"]["torch"]
    return f"MLA decode on {machine}: {run['dtype']}, graph replays, {run['date']}, torch {torch_version}"
