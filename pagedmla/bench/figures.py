"""The JSON of ``pagedmla bench``, read back: what targets, plots and pages ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedmla.bench.shapes import HEAD_DIM_QK, KV_LORA_RANK, named_shapes

OURS = "pagedmla"
"""The contender without a named backend or schedule: what a user gets."""
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


class Figures:
    """One file's figures; every time in microseconds, and None where there is no number."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Args:
        document: what ``report.document`` makes, read from its file or not written yet.
        """
        self.document = document
        self.rows: dict[str, Mapping[str, Any]] = {row["shape"]: row for row in document["rows"]}
        self.ours: tuple[str, ...] = tuple(summary["contender"] for summary in document["summary"])
        self.peers: tuple[str, ...] = tuple(n for n in document["contenders"] if n not in self.ours)

    @property
    def main(self) -> str:
        """The contender of ours that speaks for us: what a user gets, or, where that was not run, our best."""
        if OURS in self.ours:
            return OURS
        means = {s["contender"]: s["mean_best_peer_time_over_ours"] or 0.0 for s in self.document["summary"]}
        return max(means, key=means.__getitem__)

    @property
    def standard(self) -> tuple[str, ...]:
        """Names of the rows that are among the standard ones, in their order."""
        return tuple(shape.name for shape in named_shapes(["std"]) if shape.name in self.rows)

    def value(self, shape: str, contender: str, key: str = "us") -> float | None:
        """A field of a measurement; None where that is not there."""
        found = self.rows.get(shape, {}).get("contenders", {}).get(contender, {}).get(key)
        return None if found is None else float(found)

    def floor(self, shape: str, key: str = "floor_us") -> float | None:
        """``floor_us``, ``read_us``, ``arithmetic_us`` or ``floor_cold_us`` of a shape."""
        found = self.rows.get(shape, {}).get(key)
        return None if found is None else float(found)

    def best_peer(self, shape: str) -> tuple[str, float] | None:
        """The fastest peer and its time."""
        times = {peer: us for peer in self.peers if (us := self.value(shape, peer)) is not None}
        return min(times.items(), key=lambda found: found[1]) if times else None

    def over_best_peer(self, shape: str, contender: str) -> float | None:
        """The fastest peer's time over the contender's."""
        own, best = self.value(shape, contender), self.best_peer(shape)
        return None if own is None or best is None else best[1] / own

    def flops(self, shape: str) -> float:
        """Operations of both products."""
        rate = self.document["ceilings"]["matmul_tflop_per_s"] * 1e12
        return float(self.rows[shape]["arithmetic_us"] * 1e-6 * rate)

    def bytes_moved(self, shape: str) -> int:
        """Every cached token, query and output, each once."""
        row = self.rows[shape]
        head_rows = row["num_seqs"] * row["q_len"] * row["num_heads"]
        numbers = row["num_keys"] * HEAD_DIM_QK + head_rows * (HEAD_DIM_QK + KV_LORA_RANK)
        return int(numbers * _ITEMSIZE[self.document["dtype"]])

    def read_rate(self) -> float | None:
        """Bytes a second of the longest memory floor: the one that the caches help least with; None without a row."""
        rates = [
            (row["read_us"], row["num_keys"] * HEAD_DIM_QK * _ITEMSIZE[self.document["dtype"]])
            for row in self.rows.values()
            if "read_us" in row
        ]
        if not rates:
            return None
        us, num_bytes = max(rates)
        return float(num_bytes / us * 1e6)


def first_with(files: Sequence[Figures], shape: str) -> Figures | None:
    """The first file that has a row of ``shape``."""
    return next((figures for figures in files if shape in figures.rows), None)
