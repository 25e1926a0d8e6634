"""The machine and the versions behind a figure: no number is worth reading without them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import pagedmla

_PACKAGES = ("torch", "transformers", "safetensors", "triton", "vllm", "flashinfer-python", "flash-mla")
_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "largest_sm_mhz": "clocks.max.sm",
    "largest_memory_mhz": "clocks.max.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
"""Our word -> nvidia-smi's."""


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


def clocks(device: torch.device | str) -> dict[str, float] | None:
    """Clocks in MHz, power in watts and temperature of an NVIDIA GPU just now, by ``nvidia-smi``; None where nothing tells.

    A word that it has no number for is left out.
    """
    device = torch.device(device)
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or torch.version.cuda is None or tool is None:
        return None
    # torch counts the GPUs that it may see, nvidia-smi all of them: only the identifier is the same for both
    gpus = [f"GPU-{torch.cuda.get_device_properties(device).uuid}"]
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        gpus.append(str(device.index or 0))
    for gpu in gpus:
        query = [
            tool,
            f"--query-gpu={','.join(_CLOCKS.values())}",
            "--format=csv,noheader,nounits",
            "-i",
            gpu,
        ]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        return parsed_clocks(answer)
    return None


def parsed_clocks(answer: str) -> dict[str, float] | None:
    """The numbers of ``nvidia-smi``'s line, in the order that they were asked for; None when there are none."""
    found = {}
    for name, word in zip(_CLOCKS, answer.strip().split(","), strict=False):
        try:
            found[name] = float(word)
        except ValueError:
            continue
    return found or None
