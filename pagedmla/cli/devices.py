"""The devices of this machine, by name."""

from __future__ import annotations

import torch

from pagedmla.bench.machine import cpu_name
from pagedmla.contract.target import Target


def device_line(device: torch.device) -> str:
    """The device's own name, and what the support table calls it."""
    target = Target.detect(device)
    name = cpu_name() if device.type == "cpu" else target.name
    return f"{name} ({target.vendor} {target.arch})"


def targets() -> dict[str, Target]:
    """Every device of this machine that the support table can be asked about, by torch's name of it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {device: Target.detect(device) for device in ("cpu", *(f"cuda:{index}" for index in range(count)))}
