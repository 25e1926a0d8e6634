"""The table that ``pagedmla generate`` ends with."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pagedmla.cli.comparison import Comparison, compare_runs
from pagedmla.cli.devices import device_line
from pagedmla.cli.generation import Request, Run
from pagedmla.cli.latent_shape import chosen_backend, decompressed_bytes_per_token
from pagedmla.cli.model_directory import LoadedModel


def print_report(loaded: LoadedModel, request: Request, ours: Run, stock: Run | None) -> bool:
    """Prints what was run, how fast, and what its cache costs; with ``stock``, whether the tokens agree.

    Returns:
        False when ``stock`` is given and differs in a token.
    """
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    backend = chosen_backend(loaded.model, request.page_size, request.backend)
    table = Table(show_header=False)
    table.add_row(
        "model", f"{loaded.directory.resolve().name}, {dtype} on {device_line(loaded.model.device)}"
    )
    table.add_row("backend", f"{backend}, pages of {request.page_size} tokens")
    table.add_row("tokens", f"{len(ours.token_ids)}, the first after {ours.first_token_s:.2f} s")
    table.add_row("tokens per second", _rates(ours, stock))
    table.add_row("cache bytes per token", _cache_cost(loaded, ours))
    comparison = None if stock is None else compare_runs(ours, stock)
    if comparison is not None:
        table.add_row("stock Transformers", _verdict(loaded, comparison))
        table.add_row("max |log-prob difference|", f"{comparison.max_log_prob_difference:.1e}")
    # text and names are what they are: a bracket in them is no markup
    Console(markup=False).print(table)
    return comparison is None or comparison.agree


def _cache_cost(loaded: LoadedModel, ours: Run) -> str:
    latent, decompressed = ours.cache_bytes_per_token or 0, decompressed_bytes_per_token(loaded.model)
    ratio = f", {decompressed / latent:.1f}x" if latent else ""
    return f"{latent:,} (keys and values, decompressed: {decompressed:,}{ratio})"


def _rates(ours: Run, stock: Run | None) -> str:
    own = f"{ours.tokens_per_s:.1f}"
    return own if stock is None else f"{own} (stock Transformers: {stock.tokens_per_s:.1f})"


def _verdict(loaded: LoadedModel, comparison: Comparison) -> str:
    if comparison.agree:
        return f"the same {comparison.num_tokens} tokens"
    ours, stock = (
        "the end" if token is None else f"{token} {loaded.decode([token])!r}"
        for token in (comparison.ours, comparison.stock)
    )
    where = f"token {comparison.first_difference} of {comparison.num_tokens}"
    return f"DIFFERS first at {where}: {ours} here, {stock} in stock"
