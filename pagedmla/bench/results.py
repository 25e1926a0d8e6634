"""One file a benchmark: the figures, the machine, the versions and the command that printed them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from pagedmla.bench.machine import machine_line, versions


def write_result(
    path: Path,
    figures: dict[str, Any],
    device: torch.device | str = "cpu",
    command: Sequence[str] | None = None,
) -> None:
    """Writes ``figures`` with what is needed to read them, as JSON.

    Args:
        path: the file; its folder is made.
        figures: what was measured; every number's unit is in its key.
        device: the device that the figures are of.
        command: words after ``python`` that print them again; left out: those of this process.
    """
    document = {
        "date": date.today().isoformat(),
        "machine": machine_line(device),
        "versions": versions(),
        "command": "python " + shlex.join(_without_destination(sys.argv) if command is None else command),
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _without_destination(arguments: list[str]) -> list[str]:
    # where the file went says nothing about the figures, and is somebody's own folder
    if "--json" not in arguments:
        return arguments
    at = arguments.index("--json")
    return arguments[:at] + arguments[at + 2 :]
