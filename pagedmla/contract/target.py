"""The machine a kernel is chosen for: detected when asked, never at import, and constructible by hand."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

import torch

from pagedmla.contract.errors import InvalidArgument


@dataclass(frozen=True)
class Target:
    """A device as the support table sees it.

    Attributes:
        vendor: ``"cpu"``, ``"nvidia"``, ``"amd"``, or another torch device type as it is named there.
        arch: ``"sm_90"``, ``"gfx942"``, a CPU's machine name, ...
        compute_units: streaming multiprocessors, compute units, or the threads torch uses.
        shared_memory_bytes: most shared memory (LDS) of one workgroup; 0 where there is none.
        name: the device's own name, for people.
        read_bytes_per_s: measured rate of reading pages from memory, or None where it was not measured.
        matmul_flops_per_s: measured dense bf16 rate, or None where it was not measured.
    """

    vendor: str
    arch: str
    compute_units: int
    shared_memory_bytes: int
    name: str = ""
    read_bytes_per_s: float | None = None
    matmul_flops_per_s: float | None = None

    @classmethod
    def detect(cls, device: torch.device | str = "cpu") -> Target:
        """Asks torch about ``device``.

        Raises:
            InvalidArgument: the device does not exist here.
        """
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise InvalidArgument(
                "device", "device", "a torch device, such as cpu or cuda:0", f"{device!r} ({error})"
            ) from error
        if device.type == "cpu":
            return _detect_cpu(torch.get_num_threads())
        if device.type == "cuda":
            return _detect_cuda(device.index if device.index is not None else _current_cuda())
        return cls(device.type, device.type, 1, 0, device.type)

    def __str__(self) -> str:
        return f"{self.name or self.arch} ({self.vendor} {self.arch}, {self.compute_units} compute units)"


# One well-known part of each architecture, so that what is chosen for it can be asked and compiled without it.  Shared memory:
# CUDA C++ Programming Guide, table of compute capabilities (a block's opt-in maximum: the multiprocessor's less 1 KiB); AMD
# CDNA3 and CDNA4 instruction set guides, local data share.  What detect() finds on a machine counts there, not this table.
KNOWN_TARGETS: dict[str, Target] = {
    target.arch: target
    for target in (
        Target("nvidia", "sm_80", 108, 163 * 1024, "NVIDIA A100"),
        Target("nvidia", "sm_86", 84, 99 * 1024, "NVIDIA A40"),
        Target("nvidia", "sm_89", 142, 99 * 1024, "NVIDIA L40S"),
        Target("nvidia", "sm_90", 132, 227 * 1024, "NVIDIA H200"),
        Target("nvidia", "sm_100", 148, 227 * 1024, "NVIDIA B200"),
        Target("nvidia", "sm_103", 148, 227 * 1024, "NVIDIA B300"),
        Target("nvidia", "sm_120", 188, 99 * 1024, "NVIDIA RTX PRO 6000 Blackwell"),
        Target("amd", "gfx90a", 104, 64 * 1024, "AMD Instinct MI210"),
        Target("amd", "gfx942", 304, 64 * 1024, "AMD Instinct MI300X"),
        Target("amd", "gfx950", 256, 160 * 1024, "AMD Instinct MI355X"),
    )
}

# (bytes/s of reading permuted pages into shared memory, bf16 matmul FLOP/s on random data), measured on one card each
_MEASURED_RATES: dict[str, tuple[float, float]] = {"NVIDIA H200": (4.61e12, 795e12)}


@cache
def _detect_cpu(num_threads: int) -> Target:
    machine = platform.machine()
    return Target("cpu", machine, num_threads, 0, platform.processor() or machine)


def _current_cuda() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.device_count() else 0


@cache
def _detect_cuda(index: int) -> Target:
    # asked for in every call: what a device is does not change in a process
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        wanted = f"one of the {count} CUDA devices of this machine"
        raise InvalidArgument("device", "device", wanted, f"cuda:{index}")
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
        # every CDNA part so far gives a workgroup 64 KiB; gfx950 doubled and a half it
        lds = 163840 if arch == "gfx950" else 65536
        return Target("amd", arch, properties.multi_processor_count, lds, properties.name)
    arch = f"sm_{properties.major}{properties.minor}"
    shared = int(getattr(properties, "shared_memory_per_block_optin", 0))
    rates = _MEASURED_RATES.get(properties.name, (None, None))
    return Target("nvidia", arch, properties.multi_processor_count, shared, properties.name, *rates)
