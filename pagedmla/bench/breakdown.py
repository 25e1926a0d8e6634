"""Where a decode's time goes: the kernels of its graph by name, as torch's profiler sees them, and the rest between them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Part:
    """One kernel; on a CPU, one operation without what it calls.

    Attributes:
        name: the kernel's own.
        launches: in one decode.
        us: microseconds of one decode, all launches together.
    """

    name: str
    launches: float
    us: float


@dataclass(frozen=True)
class Breakdown:
    """The parts of one decode, longest first.

    Attributes:
        parts: of a profiled run; a profiler slows nothing inside a kernel, but may lengthen the gaps.
        decode_us: the decode's time, of a run without the profiler.
    """

    parts: tuple[Part, ...]
    decode_us: float

    @property
    def between_us(self) -> float:
        """What no kernel accounts for: launches and gaps.  Below 0 where kernels overlap."""
        return self.decode_us - sum(part.us for part in self.parts)


def profiled_parts(run: Callable[[], object], calls: int, device: torch.device) -> tuple[Part, ...]:
    """The parts of one decode.

    Args:
        run: does ``calls`` decodes and waits for them, such as a replay.
        calls: decodes in a run.
        device: where.
    """
    on_gpu = device.type == "cuda"
    # the first time starts the profiler's own machinery
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
            run()
    events = seen.events() or ()
    if on_gpu:
        kernels = (event for event in events if event.device_type == DeviceType.CUDA)
        return parts_of(((event.name, event.time_range.elapsed_us()) for event in kernels), calls)
    return parts_of(((event.name, event.self_cpu_time_total) for event in events), calls)


def repeated(step: Callable[[], object], calls: int) -> Callable[[], None]:
    """``calls`` calls of ``step``."""
    return partial(_repeat, step, calls)


def _repeat(step: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        step()


def parts_of(launches: Iterable[tuple[str, float]], calls: int) -> tuple[Part, ...]:
    """Sums (name, microseconds) of single launches in ``calls`` decodes up, longest first."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for name, us in launches:
        by_name[name].append(us)
    parts = (Part(name, len(times) / calls, sum(times) / calls) for name, times in by_name.items())
    return tuple(sorted(parts, key=lambda part: -part.us))


def short_name(kernel: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    return re.sub(r"[<(].*", "", kernel.removeprefix("void "))
