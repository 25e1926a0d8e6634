"""The JSON read back, and the word on each target: worked out by hand, and missed exactly where a number crosses the limit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagedmla.bench.figures import Figures
from pagedmla.bench.shapes import DecodeShape, named_shapes
from pagedmla.bench.targets import (
    GOALS,
    AheadOfPeers,
    HostAtMost,
    LargestStep,
    MatmulShare,
    OverFloor,
    OverOther,
    TimeAtMost,
    verdicts,
)


def row(shape: DecodeShape, floor: float = 10.0, **contenders: Any) -> dict[str, Any]:
    """A row whose read and arithmetic floors are ``floor`` and half of it; contenders: microseconds, or fields."""
    return {
        "shape": shape.name,
        "num_seqs": shape.num_seqs,
        "num_keys": sum(shape.seq_lens),
        "num_heads": shape.num_heads,
        "q_len": shape.q_len,
        "floor_us": floor,
        "read_us": floor,
        "arithmetic_us": floor / 2,
        "contenders": {
            name: value if isinstance(value, dict) else {"status": "measured", "us": value}
            for name, value in contenders.items()
        },
    }


def figures(rows: list[dict[str, Any]], ours: tuple[str, ...] = ("pagedmla",), **changes: Any) -> Figures:
    summary = [{"contender": name, "mean_best_peer_time_over_ours": 1.0 / len(name)} for name in ours]
    document = {
        "device": "cuda",
        "dtype": "bfloat16",
        "page_size_tokens": 64,
        "ceilings": {"matmul_tflop_per_s": 700.0},
        "contenders": dict.fromkeys((*ours, "fa3", "flash_mla"), "1"),
        "rows": rows,
        "summary": summary,
    }
    return Figures(document | changes)


def standard(ours: float = 10.0, peer: float = 20.0) -> list[dict[str, Any]]:
    return [row(shape, pagedmla=ours, fa3=peer, flash_mla=peer + 1) for shape in named_shapes(["std"])]


def shape(name: str) -> DecodeShape:
    found = {shape.name: shape for shape in named_shapes(["std", "extra"])}
    return found[name]


def test_figures_are_read_back() -> None:
    b1 = shape("B1 S4096 H16")
    found = figures([row(b1, 3.0, pagedmla=9.0, fa3=16.0, flash_mla=27.0)])
    assert found.peers == ("fa3", "flash_mla")
    assert found.best_peer(b1.name) == ("fa3", 16.0)
    assert found.over_best_peer(b1.name, "pagedmla") == pytest.approx(16 / 9)
    assert found.value(b1.name, "nobody") is None
    assert found.value("no shape", "pagedmla") is None
    assert found.floor(b1.name, "read_us") == 3.0
    # arithmetic 1.5 us at 700 TFLOP/s
    assert found.flops(b1.name) == pytest.approx(1.05e9)
    assert found.bytes_moved(b1.name) == b1.bytes_moved(2)
    assert found.read_rate() == pytest.approx(4096 * 576 * 2 / 3e-6)
    assert found.standard == (b1.name,)


def test_who_speaks_for_us() -> None:
    assert figures([], ("triton/split", "pagedmla")).main == "pagedmla"
    # shorter names have the better mean here
    assert figures([], ("triton/persistent", "triton/split")).main == "triton/split"


def test_a_row_without_numbers_is_no_number() -> None:
    lost = {"shape": "B1 S4096 H16", "detail": "does not fit"}
    found = figures([lost])
    assert found.best_peer("B1 S4096 H16") is None
    assert found.read_rate() is None
    assert list(verdicts(found, "pagedmla")) == []


@pytest.mark.parametrize(("us", "met"), [(9.0, True), (9.01, False)])
def test_a_time_is_held_against_its_limit(us: float, met: bool) -> None:
    found = TimeAtMost("B1 S4096 H16", 9).verdict(
        figures([row(shape("B1 S4096 H16"), pagedmla=us)]), "pagedmla"
    )
    assert found is not None
    assert found.met is met
    assert str(found) == f"B1 S4096 H16: 9.0 us, limit 9 us: {'met' if met else 'missed'}"


@pytest.mark.parametrize(("us", "met"), [(10.4, True), (10.5, False)])
def test_a_time_over_its_floor(us: float, met: bool) -> None:
    run = figures([row(shape("B128 S4096 H16"), pagedmla=us)])
    found = OverFloor("B128 S4096 H16", 1.04, "read_us").verdict(run, "pagedmla")
    assert found is not None
    assert (found.met, found.limit) == (met, "1.04")
    assert f"{us / 10:.3f} of its read limit" in found.got


@pytest.mark.parametrize(("us", "met"), [(6.25, True), (6.3, False)])
def test_a_share_of_the_matmul_rate_is_of_the_arithmetic(us: float, met: bool) -> None:
    run = figures([row(shape("B128 S8192 H128"), pagedmla=us)])  # 5 us of arithmetic
    found = MatmulShare("B128 S8192 H128", 0.8, 0.85).verdict(run, "pagedmla")
    assert found is not None
    assert found.met is met


def test_every_row_must_be_ahead_and_the_mean_is_geometric() -> None:
    rows = standard()
    run = figures(rows)
    assert [AheadOfPeers(mean=m).verdict(run, "pagedmla").met for m in (None, 1.99, 2.01)] == [
        True,
        True,
        False,
    ]  # type: ignore[union-attr]
    rows[3]["contenders"]["flash_mla"]["us"] = 10.0  # not faster: equal
    found = AheadOfPeers(mean=None).verdict(run, "pagedmla")
    assert found is not None
    assert not found.met
    assert found.got == f"19 of 20 rows, least 1.00x at {rows[3]['shape']}"
    mean = AheadOfPeers(mean=1.35).verdict(run, "pagedmla")
    assert mean is not None
    assert mean.got == f"{math.exp(19 * math.log(2) / 20):.2f}x"


def test_a_part_of_the_rows_says_nothing_of_all() -> None:
    assert AheadOfPeers(mean=None).verdict(figures(standard()[1:]), "pagedmla") is None
    rows = standard()
    del rows[0]["contenders"]["fa3"], rows[0]["contenders"]["flash_mla"]
    assert AheadOfPeers(mean=1.35).verdict(figures(rows), "pagedmla") is None


def test_pages_queries_and_heads_are_held_against_their_neighbours() -> None:
    names = ("B64 S4096 H16", "B64 S4096 H16 p1")
    run = figures([row(shape(names[0]), pagedmla=70.0), row(shape(names[1]), pagedmla=77.1)])
    page = OverOther(names[1], names[0], 1.10).verdict(run, "pagedmla")
    assert page is not None
    assert (page.met, page.got) == (False, "77.1 over 70.0 us, 1.101")
    assert OverOther("B64 S4096 H17", names[0], 1.1).verdict(run, "pagedmla") is None
    heads = [f"B64 S4096 H{n}" for n in (16, 17, 20)]
    run = figures([row(shape(n), pagedmla=us) for n, us in zip(heads, (70.0, 90.0, 80.0), strict=True)])
    step = LargestStep("step", tuple(heads), 1.3).verdict(run, "pagedmla")
    assert step is not None
    assert (step.met, step.got) == (True, "1.29x from B64 S4096 H16 to B64 S4096 H17")
    assert LargestStep("step", (*heads, "B64 S4096 H24"), 1.3).verdict(run, "pagedmla") is None


def test_the_worst_host_time_counts() -> None:
    rows = [
        row(s, pagedmla={"us": 9.0, "host_us": host})
        for s, host in zip(named_shapes(["std"]), (12, 21), strict=False)
    ]
    found = HostAtMost(20).verdict(figures(rows), "pagedmla")
    assert found is not None
    assert (found.met, found.got) == (False, f"21.0 us at {rows[1]['shape']}")
    assert HostAtMost(20).verdict(figures(standard()), "pagedmla") is None


def test_every_target_has_its_rows_in_the_named_shapes() -> None:
    rows = [row(s, pagedmla={"us": 10.0, "host_us": 1.0}, fa3=20.0) for s in named_shapes(["std", "extra"])]
    assert len(list(verdicts(figures(rows), "pagedmla"))) == len(GOALS)
    # the standard rows alone answer what is asked of them: no page, query or head row, no long one
    assert len(list(verdicts(figures(standard()), "pagedmla"))) == len(GOALS) - 9


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"dtype": "float16"}, {"page_size_tokens": 1}])
def test_another_run_is_not_held_against_the_targets(change: dict[str, Any]) -> None:
    assert list(verdicts(figures(standard(), **change), "pagedmla")) == []
