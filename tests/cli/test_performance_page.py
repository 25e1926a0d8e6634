"""docs/performance.md says what the kept files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedmla.bench.figures import Figures
from pagedmla.cli import performance_page
from pagedmla.cli.performance_page import FILES, PAGE, REGIONS, begin, read_files, rewritten

ROOT = Path(__file__).resolve().parents[2]
EMPTY = "".join(f"{region}:\n{begin(region)}<!-- End. -->\n" for region in REGIONS) + "the end\n"


def kept() -> dict[str, Any]:
    return json.loads((ROOT / FILES[0]).read_text())


def written(document: dict[str, Any]) -> str:
    return rewritten(EMPTY, {FILES[0]: Figures(document)})


def test_the_page_is_what_the_files_say() -> None:
    page = (ROOT / PAGE).read_text()
    assert page == rewritten(page, read_files(ROOT)), "run: python -m pagedmla.cli.performance_page"


def test_a_row_of_the_table_is_the_files() -> None:
    found = kept()
    row = found["rows"][0]
    figures = Figures(found)
    best = figures.best_peer(row["shape"])
    assert best is not None
    (line,) = [line for line in written(found).splitlines() if line.startswith(f"| {row['shape']} |")][:1]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == f"{row['floor_us']:.1f}"
    own = row["contenders"][figures.main]["us"]
    assert f"{own:.1f}" in cells
    assert cells[-2:] == [f"{row['floor_us'] / own:.2f}", f"{best[1] / own:.2f}x ({best[0]})"]


def test_what_was_measured_besides_is_shown_where_it_was() -> None:
    found = kept()
    assert "Cold times: not measured" in written(
        {**found, "rows": [without_cold(row) for row in found["rows"]]}
    )
    main = Figures(found).main
    row = found["rows"][0]
    row["floor_cold_us"] = 4.25
    row["contenders"][main] |= {
        "cold_us": 15.75,
        "breakdown": {"between_us": 1.5, "parts": [{"name": "f<1>(int)", "launches": 2.0, "us": 8.5}]},
    }
    row["contenders"]["flashinfer_fa3"] |= {"cold_us": 20.25, "plan_us": 98.0}
    for later in found["rows"][1:]:
        later["contenders"]["flashinfer_fa3"]["plan_us"] = 101.0
    found["clocks"] = {"before": {"sm_mhz": 1980.0, "memory_mhz": 3201.0}, "after": None}
    page = written(found)
    assert f"| {row['shape']} | 4.2 | 15.8 |" in page
    assert "98.0 to 101.0" in page
    assert "| `f` | 2 | 8.5 |" in page
    assert "| between kernels | | 1.5 |" in page
    assert "before 1980 (SM) and 3201 MHz (memory)" in page


def without_cold(row: dict[str, Any]) -> dict[str, Any]:
    contenders = {
        name: {key: value for key, value in fields.items() if key != "cold_us"}
        for name, fields in row["contenders"].items()
    }
    return {**row, "contenders": contenders}


def test_a_target_is_answered_by_the_first_file_that_can() -> None:
    found = kept()
    row = next(row for row in found["rows"] if row["shape"] == "B1 S4096 H16")
    main = Figures(found).main
    without = {**found, "rows": [other for other in found["rows"] if other is not row]}
    fast = json.loads(json.dumps({**found, "rows": [row]}))
    fast["rows"][0]["contenders"][main]["us"] = 8.9
    line = "| B1 S4096 H16 | 8.9 us | 9 us | met |"
    assert line in rewritten(EMPTY, {FILES[0]: Figures(without), FILES[1]: Figures(fast)})
    assert line not in rewritten(EMPTY, {FILES[0]: Figures(found), FILES[1]: Figures(fast)})


def test_what_stands_between_the_marks_is_written_over_and_the_rest_is_kept() -> None:
    once = written(kept())
    assert rewritten(once, {FILES[0]: Figures(kept())}) == once
    assert once.endswith("<!-- End. -->\nthe end\n")
    with pytest.raises(ValueError, match="no marks to write"):
        rewritten("no mark", {FILES[0]: Figures(kept())})


def test_it_is_written_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, text in ((PAGE, EMPTY), (FILES[0], json.dumps(kept()))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    performance_page.main()
    assert PAGE.read_text() == written(kept())
