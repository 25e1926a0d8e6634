"""What a step's ``kv_last_page_len`` costs with one-token pages: a slice of a buffer of ones, against ones made anew.

    python benchmarks/metadata_step.py [--device cuda] [--json FILE]

The engine's fault that started this library rebuilt the buffer on every step: ``torch.ones`` and a copy into the persistent
buffer.  It is ones at every step, so a slice of a buffer that was filled once says the same.  Values are compared before
anything is timed.  The whole metadata step (tables, lengths, CSR form) stands below, for scale.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from pagedmla import BatchBounds, InvalidArgument
from pagedmla.bench.machine import machine_line
from pagedmla.bench.results import write_result
from pagedmla.bench.timing import StepTime, time_step
from pagedmla.contract.target import Target
from pagedmla.paging.metadata import DecodeMetadata

CAPACITY = 512


def measure(device: str, num_seqs: int) -> tuple[StepTime, StepTime, StepTime]:
    """(slice of ones, ones and copy, whole metadata step) for ``num_seqs`` sequences of up to 4,096 tokens."""
    metadata = DecodeMetadata(BatchBounds(CAPACITY, 4096 // 64), page_size=64, kernel_page_size=1, device=device)
    rebuilt = torch.zeros(CAPACITY, dtype=torch.int32, device=device)

    def slice_of_ones() -> torch.Tensor:
        return metadata.kv_last_page_len[:num_seqs]

    def ones_and_copy() -> torch.Tensor:
        rebuilt[:num_seqs].copy_(torch.ones(num_seqs, dtype=torch.int32, device=device), non_blocking=True)
        return rebuilt[:num_seqs]

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 4097, (num_seqs,), generator=generator, dtype=torch.int32).to(device)
    table = torch.randperm(num_seqs * 64, generator=generator, dtype=torch.int32).view(num_seqs, 64).to(device)
    metadata.update(table, lengths)
    if not torch.equal(slice_of_ones(), ones_and_copy()):
        raise SystemExit("the two disagree: nothing was timed")
    return (
        time_step(slice_of_ones, device, steps=5000),
        time_step(ones_and_copy, device, steps=5000),
        time_step(lambda: metadata.update(table, lengths), device, steps=20),
    )


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    json: Annotated[Path | None, typer.Option(help="write the figures there")] = None,
) -> None:
    """Prints a table, a row for each number of sequences."""
    try:
        Target.detect(device)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    console = Console()
    table = Table(title=machine_line(device))
    for heading in ("sequences", "slice of ones, us", "ones + copy, us", "ratio", "whole metadata step, us"):
        table.add_column(heading, justify="right")
    rows = []
    for num_seqs in (1, 16, 128, CAPACITY):
        kept, rebuilt, whole = measure(device, num_seqs)
        rows.append({
            "num_seqs": num_seqs,
            "slice_of_ones_us": kept.median_us,
            "ones_and_copy_us": rebuilt.median_us,
            "ratio": rebuilt.median_us / kept.median_us,
            "metadata_step_us": whole.median_us,
        })
        table.add_row(str(num_seqs), *(f"{value:.2f}" for value in list(rows[-1].values())[1:]))
    console.print(table)
    console.print(f"torch {torch.__version__}; medians of 7 rounds; launch overhead included, the device waited for")
    if json is not None:
        write_result(json, {"capacity_num_seqs": CAPACITY, "rows": rows}, device)


if __name__ == "__main__":
    typer.run(main)
