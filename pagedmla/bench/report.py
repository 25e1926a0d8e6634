"""The arithmetic of a benchmark's figures, and their JSON: every ratio is made here, for table, summary and file alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pagedmla.bench.batch import SOFTMAX_SCALE
from pagedmla.bench.decode_bench import BenchResult, Measurement, Row
from pagedmla.bench.figures import Figures
from pagedmla.bench.graph_timing import REPEATS, WARM_UP_CALLS
from pagedmla.bench.targets import verdicts
from pagedmla.bench.timing import StepTime

REFERENCE_PEER = "vllm_triton"
"""The peer of the same kind, portable Triton: our ratio to it is always shown."""


def measured(row: Row) -> dict[str, float]:
    """Microseconds of every contender that has a number, by name."""
    return {m.contender: m.time.median_us for m in row.measurements if m.time is not None}


def floor_ratio(row: Row, name: str) -> float | None:
    """The floor over the contender's time: 1 is the limit; None without a number."""
    time = measured(row).get(name)
    return None if time is None or row.floor is None else row.floor.us / time


def peer_ratios(row: Row, ours: str, peers: Iterable[str]) -> dict[str, float]:
    """Each peer's time over ours: above 1, ours is faster.  Peers without a number are left out."""
    times = measured(row)
    if ours not in times:
        return {}
    return {peer: times[peer] / times[ours] for peer in peers if peer in times}


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """The mean for ratios; None of nothing."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


@dataclass(frozen=True)
class Summary:
    """One of our contenders over all rows.

    Attributes:
        contender: its name.
        measured, rows: shapes that have a number, and all.
        of_floor: geometric mean of the floor over its time.
        vs_best: geometric mean of the best peer's time over its time; None where no peer has a number.
        worst_vs_best, worst_shape: the least such ratio, and where.
        vs_peer: for each peer, the geometric mean of that peer's time over its time, on the shapes where both have one.
    """

    contender: str
    measured: int
    rows: int
    of_floor: float | None
    vs_best: float | None
    worst_vs_best: float | None
    worst_shape: str
    vs_peer: dict[str, float]


def summarise(result: BenchResult, ours: str) -> Summary:
    """The means of the contender called ``ours``."""
    peers = [peer.name for peer in result.plan.peers]
    ratios = {row.shape.name: peer_ratios(row, ours, peers) for row in result.rows}
    against_best = {shape: min(found.values()) for shape, found in ratios.items() if found}
    worst = min(against_best, key=against_best.__getitem__, default="")
    of_floor = [ratio for row in result.rows if (ratio := floor_ratio(row, ours)) is not None]
    means = {
        peer: geometric_mean(found[peer] for found in ratios.values() if peer in found) for peer in peers
    }
    return Summary(
        contender=ours,
        measured=len(of_floor),
        rows=len(result.rows),
        of_floor=geometric_mean(of_floor),
        vs_best=geometric_mean(against_best.values()),
        worst_vs_best=against_best.get(worst),
        worst_shape=worst,
        vs_peer={peer: mean for peer, mean in means.items() if mean is not None},
    )


def summary_line(summary: Summary) -> str:
    """Such as ``triton/split: 20 of 20 shapes; 0.61 of the floor; ...``, every mean geometric."""
    parts = [f"{summary.contender}: {summary.measured} of {summary.rows} shapes"]
    if summary.of_floor is not None:
        parts.append(f"geometric means {summary.of_floor:.2f} of the floor")
    if summary.vs_best is not None:
        parts.append(
            f"{summary.vs_best:.2f}x the best peer (least {summary.worst_vs_best:.2f}x, {summary.worst_shape})"
        )
    parts += [f"{ratio:.2f}x {peer}" for peer, ratio in summary.vs_peer.items()]
    return "; ".join(parts)


def caption(result: BenchResult) -> str:
    """How the figures were taken and what the floor is, in one sentence each."""
    plan, ceilings = result.plan, result.ceilings
    how = "wall clock"
    if plan.device.type == "cuda":
        how = f"CUDA graph replays of {REPEATS} calls on one input, so what fits in L2 is read from there"
    sum_rate = f"{ceilings.sum_bytes_per_s / 1e12:.3g} TB/s"
    memory = f"reading its pages into shared memory and nothing else (torch.sum: {sum_rate})"
    if ceilings.pages_unread:
        memory = f"its bytes at torch.sum's {sum_rate} ({ceilings.pages_unread})"
    matmul = (
        f"{dtype_name(ceilings.matmul_dtype)} matmul rate, {ceilings.matmul_flops_per_s / 1e12:.3g} TFLOP/s"
    )
    return (
        f"us of one decode, median of {plan.how.rounds} rounds; {how}.  Floor: the larger of {memory} and its operations"
        f" at the {matmul}; in parentheses, the floor over the time.{_caption_of_extras(result)}"
    )


def _caption_of_extras(result: BenchResult) -> str:
    """What the words cold, host, eager and plan mean, where they stand."""
    how, parts = result.plan.how, []
    if how.cold:
        parts.append("cold: with nothing of the input in L2, the difference of two graphs")
    if how.eager:
        parts.append(
            "host: of an eager call, until it returns; eager: of one of many in a row, until the GPU is done"
        )
    if any(m.plan is not None for row in result.rows for m in row.measurements):
        parts.append(
            "plan: what a peer does once a step for all layers, apart from the decode and not in its time"
        )
    return "".join(f"  {part[0].upper()}{part[1:]}." for part in parts)


def dtype_name(dtype: torch.dtype) -> str:
    """Without the module."""
    return str(dtype).removeprefix("torch.")


def document(result: BenchResult) -> dict[str, Any]:
    """The figures as JSON; every number's unit is in its key, and a ratio says of what over what."""
    plan, ceilings = result.plan, result.ceilings
    fields: dict[str, Any] = {
        "device": str(plan.device),
        "dtype": dtype_name(plan.dtype),
        "page_size_tokens": plan.page_size,
        "softmax_scale": SOFTMAX_SCALE,
        "how": caption(result),
        "rounds": plan.how.rounds,
        "calls_in_a_graph": REPEATS if plan.device.type == "cuda" else None,
        "warm_up_calls": WARM_UP_CALLS if plan.device.type == "cuda" else None,
        "clocks": {"before": result.clocks_before, "after": result.clocks_after},
        "ceilings": {
            "matmul_dtype": dtype_name(ceilings.matmul_dtype),
            "matmul_tflop_per_s": ceilings.matmul_flops_per_s / 1e12,
            "torch_sum_tb_per_s": ceilings.sum_bytes_per_s / 1e12,
            "floor_reads_pages": not ceilings.pages_unread,
            "pages_unread": ceilings.pages_unread,
        },
        "contenders": {contender.name: contender.version for contender in plan.contenders},
        "absent": result.absent,
        "complete": len(result.rows) == len(plan.shapes),
        "rows": [_row_fields(result, row) for row in result.rows],
        "summary": [_summary_fields(summarise(result, ours.name)) for ours in plan.ours],
    }
    figures = Figures(fields)
    fields["verdicts"] = {name: [asdict(v) for v in verdicts(figures, name)] for name in figures.ours}
    return fields


def _row_fields(result: BenchResult, row: Row) -> dict[str, Any]:
    peers = [peer.name for peer in result.plan.peers]
    shape, floor = row.shape, row.floor
    fields: dict[str, Any] = {
        "shape": shape.name,
        "num_seqs": shape.num_seqs,
        "num_keys": sum(shape.seq_lens),
        "longest_tokens": max(shape.seq_lens),
        "num_heads": shape.num_heads,
        "q_len": shape.q_len,
        "page_size_tokens": shape.page_size or result.plan.page_size,
    }
    if floor is None:
        return {**fields, "detail": row.detail}
    fields |= {
        "floor_us": floor.us,
        "bound": floor.bound,
        "read_us": floor.read_us,
        "arithmetic_us": floor.arithmetic_us,
    }
    if floor.cold_us is not None:
        fields |= {"floor_cold_us": floor.cold_us, "cold_read_us": floor.cold_read_us}
    found = {m.contender: _measurement_fields(m) for m in row.measurements}
    for name, measurement in found.items():
        ratio = floor_ratio(row, name)
        if ratio is not None:
            measurement["floor_over_time"] = ratio
    for ours in result.plan.ours:
        ratios = peer_ratios(row, ours.name, peers)
        if ratios:
            found[ours.name] |= {
                "peer_time_over_ours": ratios,
                "best_peer": min(ratios, key=ratios.__getitem__),
            }
    return {**fields, "contenders": found}


def _measurement_fields(measurement: Measurement) -> dict[str, Any]:
    fields: dict[str, Any] = {"status": measurement.status}
    if measurement.detail:
        fields["detail"] = measurement.detail
    if measurement.time is not None:
        fields |= _time_fields("", measurement.time)
    for prefix in ("cold", "host", "eager"):
        time = getattr(measurement, prefix)
        if time is not None:
            fields |= _time_fields(f"{prefix}_", time)
    if measurement.plan is not None:
        fields |= {"plan_on": measurement.plan.where, **_time_fields("plan_", measurement.plan.time)}
    if measurement.runs_on:
        fields["backend"] = measurement.runs_on
    if measurement.breakdown is not None:
        fields["breakdown"] = {
            "between_us": measurement.breakdown.between_us,
            "parts": [asdict(part) for part in measurement.breakdown.parts],
        }
    for name in ("out_error", "lse_error"):
        error = getattr(measurement, name)
        if error is not None:
            # JSON has no number for nan
            fields[name] = error if math.isfinite(error) else str(error)
    return fields


def _time_fields(prefix: str, time: StepTime) -> dict[str, float]:
    return {
        f"{prefix}us": time.median_us,
        f"{prefix}fastest_us": time.fastest_us,
        f"{prefix}slowest_us": time.slowest_us,
    }


def _summary_fields(summary: Summary) -> dict[str, Any]:
    return {
        "contender": summary.contender,
        "measured": summary.measured,
        "rows": summary.rows,
        "mean_floor_over_time": summary.of_floor,
        "mean_best_peer_time_over_ours": summary.vs_best,
        "least_best_peer_time_over_ours": summary.worst_vs_best,
        "least_at": summary.worst_shape,
        "mean_peer_time_over_ours": summary.vs_peer,
    }
