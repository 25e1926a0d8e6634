"""The ``pagedmla`` application: its commands.  No model and no device is loaded before a command asks."""

from __future__ import annotations

from typing import Annotated

import typer

import pagedmla
from pagedmla.cli.bench import bench
from pagedmla.cli.check import check
from pagedmla.cli.compile import compile
from pagedmla.cli.generate import generate
from pagedmla.cli.info import info

app = typer.Typer(
    name="pagedmla",
    help="Paged decode attention for Multi-head Latent Attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(info)
app.command()(check)
app.command()(bench)
app.command()(compile)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(pagedmla.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Paged decode attention for Multi-head Latent Attention."""
