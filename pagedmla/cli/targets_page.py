"""Writes the figures of a compile report into docs/targets.md: ``python -m pagedmla.cli.targets_page``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPORT = Path("benchmarks/results/compile_targets.json")
PAGE = Path("docs/targets.md")
_BEGIN = "<!-- Made by `python -m pagedmla.cli.targets_page`. -->\n"
_END = "<!-- End. -->\n"
# of the Gluon backend: for one architecture, and with far more shared memory than the others
_GLUON = ("few_heads", "many_heads")


def figures(report: dict[str, Any]) -> Iterator[str]:
    """The lines of the page's table, and what the kernels outside it need at most."""
    yield "| architecture | limit, bytes | shared, bytes | registers | variants that spill | spilled, bytes | common path |"
    yield "|---|---|---|---|---|---|---|"
    others: list[dict[str, Any]] = []
    gluon: list[dict[str, Any]] = []
    for arch, target in report["targets"].items():
        for kernel in target["kernels"]:
            if kernel["kernel"] != "decode":
                (gluon if kernel["kernel"] in _GLUON else others).append(kernel)
                continue
            yield (
                f"| `{arch}` | {target['limit_shared_bytes']:,} | {kernel['largest_shared_bytes']:,}"
                f" | {kernel['most_registers']} | {kernel['variants_that_spill']} of {kernel['variants']}"
                f" | {kernel['most_spilled_bytes']:,} | {_spilled_on_the_common_path(target)} |"
            )
    yield ""
    shared = max(kernel["largest_shared_bytes"] for kernel in others)
    spilled = max(kernel["most_spilled_bytes"] for kernel in others)
    words = f"{spilled} bytes a thread" if spilled else "nothing"
    yield f"The other kernels need {shared:,} bytes of shared memory at most, and spill {words}."
    for kernel in gluon:
        yield (
            f"The Gluon kernel `{kernel['kernel']}`, for `sm_90` alone, needs {kernel['largest_shared_bytes']:,} bytes of"
            f" shared memory and {kernel['most_registers']} registers, and spills {kernel['most_spilled_bytes']} bytes a"
            " thread."
        )


def _spilled_on_the_common_path(target: dict[str, Any]) -> int:
    """Bytes that a thread spills at most where no row hides a key from another and addresses are multiples of 16."""
    common = (
        one["spilled_bytes_per_thread"]
        for one in target["compiled"]
        if one["variant"].startswith("decode ")
        and "CAUSAL=False" in one["variant"]
        and not one["variant"].endswith("unaligned")
    )
    return max(common, default=0)


def rewritten(page: str, report: dict[str, Any]) -> str:
    """``page`` with the figures of ``report`` between its two marks.

    Raises:
        ValueError: it has no such marks.
    """
    before, _, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{PAGE} has no marks to write between")
    return before + _BEGIN + "\n".join(["", *figures(report), "", ""]) + _END + after


def main() -> None:
    """Rewrites the page in the current directory."""
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")


if __name__ == "__main__":
    main()
