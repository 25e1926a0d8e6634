"""What compiled code needs of a device, read from the compiler's own output; nothing is loaded onto a device."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs


@dataclass(frozen=True)
class Resources:
    """What one compilation needs.

    Attributes:
        shared_bytes: shared memory (AMD: LDS) of a program, bytes.
        registers: of a thread, 32-bit (AMD: vector registers, accumulation registers included).
        spilled_bytes: of a thread, in its private memory (NVIDIA: stack frame; AMD: private segment).
        tensor_memory_columns: of a multiprocessor's 512 (NVIDIA from sm_100 on), else 0.
    """

    shared_bytes: int
    registers: int
    spilled_bytes: int
    tensor_memory_columns: int = 0


def resources_of(compiled: Any) -> Resources:
    """What ``compiled``, a kernel that ``triton.compile`` returned, needs."""
    if "cubin" in compiled.asm:
        registers, spilled = parse_cuobjdump(_cuobjdump(compiled.asm["cubin"]))
    else:
        registers, spilled = parse_amdgcn(compiled.asm["amdgcn"])
    tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
    return Resources(int(compiled.metadata.shared), registers, spilled, int(tensor_memory))


def parse_cuobjdump(text: str) -> tuple[int, int]:
    """(registers, spilled bytes) of a thread from what ``cuobjdump --dump-resource-usage`` prints.

    Our kernels have no arrays of their own in local memory, so all of the stack frame is spilled registers.

    Raises:
        ValueError: ``text`` names no kernel.
    """
    return _largest(r"\bREG:(\d+)", text), max(
        _largest(r"\bSTACK:(\d+)", text), _largest(r"\bLOCAL:(\d+)", text)
    )


def parse_amdgcn(text: str) -> tuple[int, int]:
    """(registers, spilled bytes) of a thread from AMD's assembly and the metadata at its end.

    Raises:
        ValueError: ``text`` describes no kernel.
    """
    return _largest(r"\.vgpr_count:\s+(\d+)", text), _largest(r"\.private_segment_fixed_size:\s+(\d+)", text)


def _largest(pattern: str, text: str) -> int:
    found = [int(number) for number in re.findall(pattern, text)]
    if not found:
        raise ValueError(f"the compiler's output has no {pattern}")
    return max(found)


def _cuobjdump(cubin: bytes) -> str:
    """The resource lines of ``cubin``; the program comes with Triton."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
