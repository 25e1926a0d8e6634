"""The pictures: what they show is what the figures say, and both kinds of file are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from pagedmla.bench.figures import Figures
from pagedmla.bench.plot import draw, rows_figure, spread

KEPT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "decode_h200.json"


@pytest.fixture(scope="module")
def kept() -> Figures:
    return Figures(json.loads(KEPT.read_text()))


def test_png_and_svg_of_both_pictures(tmp_path: Path, kept: Figures) -> None:
    written = draw(kept, tmp_path, "x")
    assert [path.name for path in written] == [
        "x_rows.png",
        "x_rows.svg",
        "x_roofline.png",
        "x_roofline.svg",
    ]
    for path in written:
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in start


def test_the_same_figures_make_the_same_file(tmp_path: Path, kept: Figures) -> None:
    once, again = tmp_path / "once", tmp_path / "again"
    for folder in (once, again):
        folder.mkdir()
        draw(kept, folder, "x")
    assert (once / "x_rows.svg").read_bytes() == (again / "x_rows.svg").read_bytes()


def test_each_bar_is_the_best_peers_time_over_ours(kept: Figures) -> None:
    names = list(kept.rows)[:4]
    left, right = rows_figure(kept, names).axes
    for bar, name in zip(right.patches[-len(names) :], names, strict=True):
        best = kept.best_peer(name)
        own = kept.value(name, kept.main)
        assert best is not None
        assert own is not None
        assert bar.get_width() == pytest.approx(best[1] / own)
    shown = {collection.get_label() for collection in left.collections}
    assert {kept.main, *kept.peers} <= shown


def test_labels_of_a_column_do_not_touch() -> None:
    points = [(30.0, 100.0, "a"), (31.0, 101.0, "b"), (29.0, 99.0, "c"), (200.0, 100.0, "d")]
    placed = {name: (label_x, label_y) for _, _, label_x, label_y, name in spread(points, 1.1)}
    assert placed["c"] == (31.0 * 1.2, 99.0)
    assert placed["a"] == (31.0 * 1.2, pytest.approx(99.0 * 1.1))
    assert placed["b"] == (31.0 * 1.2, pytest.approx(99.0 * 1.21))
    assert placed["d"] == (240.0, 100.0)


def test_nothing_of_ours_is_nothing_to_draw(tmp_path: Path, kept: Figures) -> None:
    rows = [{**row, "contenders": {}} for row in kept.document["rows"]]
    with pytest.raises(ValueError, match="no row"):
        draw(Figures({**kept.document, "rows": rows}), tmp_path, "x")
