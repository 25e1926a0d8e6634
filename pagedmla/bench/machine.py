"""The machine and the versions behind a figure: no number is worth reading without them."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

import pagedmla

_PACKAGES = ("torch", "transformers", "safetensors", "triton", "vllm")


def versions() -> dict[str, str | None]:
    """Version of Python and of each package that matters here; None for one that is not installed."""
    # the package's own word: it may run from a checkout that nobody installed
    found: dict[str, str | None] = {"python": platform.python_version(), "pagedmla": pagedmla.__version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    # torch's own word names the build too (+cpu, +cu130), which the package's metadata may not
    found["torch"] = torch.__version__
    return found


def cpu_name() -> str:
    """The processor's own name where the system tells it, else the machine type."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_line(device: torch.device | str = "cpu") -> str:
    """System and processor with the threads that torch uses of it, and the GPU's name when ``device`` is one."""
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} threads"
    line = f"{platform.system()} {platform.machine()}, {cpu_name()}, {threads}"
    if torch.device(device).type == "cuda":
        line = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}; {line}"
    return line
