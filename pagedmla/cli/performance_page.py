"""Writes the figures of ``pagedmla bench`` into docs/performance.md: ``python -m pagedmla.cli.performance_page``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pagedmla.bench.breakdown import short_name
from pagedmla.bench.figures import Figures
from pagedmla.bench.report import geometric_mean
from pagedmla.bench.targets import GOALS, Verdict

PAGE = Path("docs/performance.md")
FILES = tuple(
    Path(f"benchmarks/results/{name}.json")
    for name in ("decode_h200", "decode_h200_extra", "decode_h200_parts")
)
"""The standard rows; the extra rows; rows with their parts.  Those that are not there are left out."""
_LINKS = "../"  # from docs/ to the files above
_END = "<!-- End. -->\n"

Kept = Mapping[Path, Figures]
"""Files, at least one, by where they lie."""


def table(files: Kept) -> Iterator[str]:
    """Every row of the first file."""
    run = next(iter(files.values()))
    contenders = (*run.ours, *run.peers)
    yield "| shape | floor | " + " | ".join(contenders) + " | floor over time | over the best peer |"
    yield "|---" * (len(contenders) + 4) + "|"
    for name in run.rows:
        ratio = run.over_best_peer(name, run.main)
        own, floor, best = run.value(name, run.main), run.floor(name), run.best_peer(name)
        share = "-" if own is None or floor is None else f"{floor / own:.2f}"
        over = "-" if ratio is None or best is None else f"{ratio:.2f}x ({best[0]})"
        times = " | ".join(_number(run.value(name, contender)) for contender in contenders)
        yield f"| {name} | {_number(floor)} | {times} | {share} | {over} |"
    yield ""
    for contender in run.ours:
        yield _means(run, contender)


def _means(run: Figures, contender: str) -> str:
    ratios = [r for name in run.rows if (r := run.over_best_peer(name, contender)) is not None]
    shares = [
        floor / own
        for name in run.rows
        if (own := run.value(name, contender)) is not None and (floor := run.floor(name)) is not None
    ]
    best, share = geometric_mean(ratios), geometric_mean(shares)
    against = (
        "" if best is None else f", {best:.2f}x the best peer of each (ahead in {sum(r > 1 for r in ratios)})"
    )
    return f"- `{contender}`, geometric means of {len(shares)} rows: {_ratio(share)} of the floor{against}."


def sources(files: Kept) -> Iterator[str]:
    """Machine, versions, clocks, ceilings and command of each file."""
    for path, run in files.items():
        found = run.document
        rates = found["ceilings"]
        yield f"[`{path.name}`]({_LINKS}{path}), {found['date']}, `{found['command'].removeprefix('python -m ')}`:"
        yield ""
        yield f"- {found['machine']}."
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
        yield f"- {versions}."
        peers = ", ".join(
            f"{name}: {version}" for name, version in found["contenders"].items() if name in run.peers
        )
        yield f"- Peers: {peers or 'none'}."
        yield (
            f"- Measured limits: {rates['matmul_tflop_per_s']:.0f} TFLOP/s ({rates['matmul_dtype']} product),"
            f" {rates['torch_sum_tb_per_s']:.2f} TB/s (`torch.sum`)."
        )
        yield f"- {_clocks(found.get('clocks'))}"
        for name, reason in found["absent"].items():
            yield f"- Not measured: {name}: {reason}."
        yield ""


def _clocks(found: dict[str, dict[str, float] | None] | None) -> str:
    words = [
        f"{when} {values.get('sm_mhz', 0):.0f} (SM) and {values.get('memory_mhz', 0):.0f} MHz (memory)"
        for when, values in (found or {}).items()
        if values
    ]
    return f"Clocks: {', '.join(words)}." if words else "Clocks: not recorded."


def besides(files: Kept) -> Iterator[str]:
    """Cold times, and what calls and plans cost, of the first file."""
    run = next(iter(files.values()))
    cold = [name for name in run.rows if run.value(name, run.main, "cold_us") is not None]
    if cold:
        peers = [p for p in run.peers if any(run.value(name, p, "cold_us") is not None for name in cold)]
        yield f"| shape, cold L2 | floor | {' | '.join((run.main, *peers))} |"
        yield "|---" * (len(peers) + 3) + "|"
        for name in cold:
            times = " | ".join(_number(run.value(name, who, "cold_us")) for who in (run.main, *peers))
            yield f"| {name} | {_number(run.floor(name, 'floor_cold_us'))} | {times} |"
        yield ""
    else:
        yield "Cold times: not measured in this run.\n"
    yield "| | host time of an eager call, us | plan, once a step, us |"
    yield "|---|---|---|"
    for contender in (*run.ours, *run.peers):
        yield f"| {contender} | {_range(run, contender, 'host_us')} | {_range(run, contender, 'plan_us')} |"


def _range(run: Figures, contender: str, key: str) -> str:
    found = [us for name in run.rows if (us := run.value(name, contender, key)) is not None]
    return f"{min(found):.1f} to {max(found):.1f}" if found else "-"


def targets(files: Kept) -> Iterator[str]:
    """The word on each target, of the first file that has the rows for it."""
    yield "| target | measured | limit | |"
    yield "|---|---|---|---|"
    missing = 0
    for goal in GOALS:
        found: Verdict | None = None
        for run in files.values():
            found = found or goal.verdict(run, run.main)
        if found is None:
            missing += 1
            continue
        yield f"| {found.what} | {found.got} | {found.limit} | {'met' if found.met else '**missed**'} |"
    if missing:
        yield f"\n{missing} of {len(GOALS)} targets: their rows were not measured."


def parts(files: Kept) -> Iterator[str]:
    """The kernels of each decode of ours that was taken apart."""
    found = False
    for run in files.values():
        for name, row in run.rows.items():
            measured = row.get("contenders", {}).get(run.main, {})
            if "breakdown" not in measured:
                continue
            found = True
            yield f"{name}, `{run.main}`, {measured['us']:.1f} us:"
            yield ""
            yield "| kernel | launches | us |"
            yield "|---|---|---|"
            for part in measured["breakdown"]["parts"]:
                yield f"| `{short_name(part['name'])}` | {part['launches']:g} | {part['us']:.1f} |"
            yield f"| between kernels | | {measured['breakdown']['between_us']:.1f} |"
            yield ""
    if not found:
        yield "No row was taken apart yet (`pagedmla bench --breakdown`)."


REGIONS: dict[str, Callable[[Kept], Iterator[str]]] = {
    "table": table,
    "sources": sources,
    "besides": besides,
    "targets": targets,
    "parts": parts,
}
"""Word in the mark -> what is written between it and the next end mark."""


def begin(region: str) -> str:
    """The line that a region begins with."""
    return f"<!-- Made by `python -m pagedmla.cli.performance_page`: {region}. -->\n"


def rewritten(page: str, files: Kept) -> str:
    """``page`` with the figures of ``files`` between its marks.

    Raises:
        ValueError: it has not every mark.
    """
    for region, lines in REGIONS.items():
        before, mark, rest = page.partition(begin(region))
        _, end, after = rest.partition(_END)
        if not mark or not end:
            raise ValueError(f"{PAGE} has no marks to write {region} between")
        text = "\n".join(lines(files)).strip("\n")
        page = f"{before}{mark}\n{text}\n\n{end}{after}"
    return page


def read_files(root: Path = Path()) -> Kept:
    """The files that are there, under ``root``."""
    texts = {path: (root / path).read_text(encoding="utf-8") for path in FILES if (root / path).exists()}
    return {path: Figures(json.loads(text)) for path, text in texts.items()}


def _number(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    """Rewrites the page in the current directory."""
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), read_files()), encoding="utf-8")


if __name__ == "__main__":
    main()
