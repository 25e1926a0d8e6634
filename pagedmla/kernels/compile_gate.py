"""The compile gate: every kernel variant of a target, compiled in processes of its own, against the target's limits.

This module imports no Triton: the processes do, after TRITON_INTERPRET is out of their environment, whatever this one's says.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from pagedmla.contract.target import Target

KERNEL_NAMES = (
    "decode",
    "few_heads",
    "many_heads",
    "merge_partials",
    "plan_persistent",
    "plan_split",
    "append",
    "index_pages",
    "compact",
    "merge_states",
)
"""All that the backends of BACKENDS launch; the keys of their ``offline.KERNELS``.  ``few_heads`` and ``many_heads`` are of the
Gluon backend alone."""

BACKENDS = ("triton", "gluon")
"""Backends with modules ``variants`` and ``offline``; a target that one of them does not take asks it for no variant."""

_SLOWEST = ("many_heads", "few_heads", "decode")


@dataclass(frozen=True)
class Compiled:
    """What came of one variant.

    Attributes:
        kernel: its name.
        variant: all that tells it apart, in words.
        shared_bytes, registers, spilled_bytes, tensor_memory_columns: see ``kernels.split_kv.resources.Resources``; 0
            where it did not compile.
        failure: why it does not run on the target; empty where it fits.
    """

    kernel: str
    variant: str
    shared_bytes: int = 0
    registers: int = 0
    spilled_bytes: int = 0
    tensor_memory_columns: int = 0
    failure: str = ""


@dataclass(frozen=True)
class KernelFigures:
    """The largest of what a kernel's variants need.

    Attributes:
        kernel: its name.
        variants: how many were compiled.
        largest_shared_bytes, most_registers, most_spilled_bytes: of a program, a thread, a thread.
        variants_that_spill: how many spill registers to memory.
        failures: how many do not compile or do not fit.
    """

    kernel: str
    variants: int
    largest_shared_bytes: int
    most_registers: int
    variants_that_spill: int
    most_spilled_bytes: int
    failures: int


@dataclass(frozen=True)
class TargetReport:
    """All variants of one target.

    Attributes:
        target: what they were compiled for.
        compiled: one for each variant, by kernel and name.
    """

    target: Target
    compiled: tuple[Compiled, ...]

    @property
    def failures(self) -> tuple[Compiled, ...]:
        """Those that do not compile or do not fit."""
        return tuple(one for one in self.compiled if one.failure)

    @property
    def kernels(self) -> tuple[KernelFigures, ...]:
        """A line for each kernel."""
        groups: dict[str, list[Compiled]] = {}
        for one in self.compiled:
            groups.setdefault(one.kernel, []).append(one)
        return tuple(_figures(kernel, group) for kernel, group in groups.items())

    def document(self) -> dict[str, Any]:
        """The report as JSON; units are in the keys."""
        return {
            "vendor": self.target.vendor,
            "part": self.target.name,
            "limit_shared_bytes": self.target.shared_memory_bytes,
            "variants_compiled": len(self.compiled),
            "failures": len(self.failures),
            "kernels": [asdict(kernel) for kernel in self.kernels],
            "compiled": [_fields(one) for one in self.compiled],
        }


def _figures(kernel: str, group: list[Compiled]) -> KernelFigures:
    return KernelFigures(
        kernel,
        len(group),
        max(one.shared_bytes for one in group),
        max(one.registers for one in group),
        sum(one.spilled_bytes > 0 for one in group),
        max(one.spilled_bytes for one in group),
        sum(bool(one.failure) for one in group),
    )


def _fields(one: Compiled) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "variant": one.variant,
        "shared_bytes": one.shared_bytes,
        "registers_per_thread": one.registers,
        "spilled_bytes_per_thread": one.spilled_bytes,
    }
    if one.tensor_memory_columns:
        fields["tensor_memory_columns"] = one.tensor_memory_columns
    if one.failure:
        fields["failure"] = one.failure
    return fields


def run_gate(
    targets: Sequence[Target],
    whole: bool = False,
    done: Callable[[Target, Compiled, int], None] = lambda target, compiled, total: None,
    kernels: Iterable[str] = (),
    processes: int | None = None,
) -> list[TargetReport]:
    """Compiles for each target; nothing is launched, and no device is asked.

    Args:
        targets: what to compile for.
        whole: every distinct variant; otherwise a part that holds every pair of factors (``variants.representative_variants``).
        done: called after each compilation, with the number of all.
        kernels: only these, by name; empty: all.
        processes: left out: one for each core.

    Raises:
        ModuleNotFoundError: the triton package is not installed.
    """
    wanted = set(kernels) or set(KERNEL_NAMES)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes or os.cpu_count() or 1, context, _start_process) as pool:
        found = list(pool.map(_jobs, targets, [whole] * len(targets)))
        jobs = [
            (target, job)
            for target, some in zip(targets, found, strict=True)
            for job in some
            if job.kernel in wanted
        ]
        # the decode kernels first: they take longest, and none should be left to run alone at the end
        jobs.sort(key=lambda job: (*_SLOWEST, job[1].kernel).index(job[1].kernel))
        futures = {pool.submit(_compile, target, job): (target, job) for target, job in jobs}
        results: dict[Target, list[Compiled]] = {target: [] for target in targets}
        for future in as_completed(futures):
            target, job = futures[future]
            try:
                compiled = future.result()
            except BrokenProcessPool:
                # the compiler ended its process, this variant's or another one's that ran beside it
                compiled = Compiled(job.kernel, job.variant, failure="a compiler process ended abruptly")
            results[target].append(compiled)
            done(target, compiled, len(jobs))
    return [
        TargetReport(target, tuple(sorted(results[target], key=lambda one: (one.kernel, one.variant))))
        for target in targets
    ]


def _start_process() -> None:
    # before Triton is imported: it reads this when a kernel is declared
    os.environ.pop("TRITON_INTERPRET", None)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's processes outlive a parent that is killed, and wait for work that nobody sends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@dataclass(frozen=True)
class _Job:
    """A variant: its backend, its kernel, its name, and itself, pickled: only the processes with Triton unpack it."""

    backend: str
    kernel: str
    variant: str
    pickled: bytes


def _jobs(target: Target, whole: bool) -> list[_Job]:
    found = []
    for backend in BACKENDS:
        module = import_module(f"pagedmla.kernels.{backend}.variants")
        chosen = module.all_variants(target) if whole else module.representative_variants(target)
        found += [_Job(backend, variant.kernel, str(variant), pickle.dumps(variant)) for variant in chosen]
    return found


def _compile(target: Target, job: _Job) -> Compiled:
    offline = import_module(f"pagedmla.kernels.{job.backend}.offline")
    try:
        needed, _ = offline.compile_variant(pickle.loads(job.pickled), target)
    except Exception as error:  # noqa: BLE001  the gate reports whatever the compiler says, and goes on
        return Compiled(job.kernel, job.variant, failure=_one_line(error))
    return Compiled(
        job.kernel,
        job.variant,
        needed.shared_bytes,
        needed.registers,
        needed.spilled_bytes,
        needed.tensor_memory_columns,
        offline.over_limit(needed, target),
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
