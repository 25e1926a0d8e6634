"""``pagedmla generate``: a model writes text through the paged latent cache."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedmla.cli.console import EXIT_FAILED, fail, usable_device, user_errors

if TYPE_CHECKING:
    import torch

    from pagedmla.cli.generation import Request, Run
    from pagedmla.cli.model_directory import LoadedModel

_DEFAULT_PROMPT = "The two sisters walked to the village after breakfast, and"


class DType(str, Enum):
    """Precisions that a model can be run in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")] = _DEFAULT_PROMPT,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of an MLA model.  [default: the package's own]"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Most new tokens.")] = 131,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...  [default: cuda if there is one]")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Kernel backend.  [default: the best that fits]")
    ] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="[default: fp32 on a CPU and with --compare, else bf16]")
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page of the cache.")] = 64,
    compare: Annotated[
        bool, typer.Option("--compare", help="Stock Transformers too, in fp32; exit 1 if a token differs.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws, when the temperature is above 0.")] = 0,
) -> None:
    """Write text with an MLA model through pagedmla's paged latent cache."""
    if compare and dtype not in (None, DType.FP32):
        fail("--compare runs in fp32, where equal tokens mean something: leave --dtype out")
    with user_errors():
        from pagedmla.cli.generate_report import print_report
        from pagedmla.cli.generation import Request, Sampling
        from pagedmla.contract.support import check_backend_name

        check_backend_name(backend)
        loaded = _load(model, usable_device(device), dtype, compare)
        request = Request(
            prompt, Sampling(tokens, temperature, seed), page_size, backend, keep_logits=compare
        )
        ours, stock = _runs(loaded, request, compare)
        agree = print_report(loaded, request, ours, stock)
    if not agree:
        raise typer.Exit(EXIT_FAILED)


def _load(model: Path | None, device: torch.device, dtype: DType | None, compare: bool) -> LoadedModel:
    import torch

    from pagedmla import embedded
    from pagedmla.cli.model_directory import load_model

    if dtype is None:
        dtype = DType.FP32 if compare or device.type == "cpu" else DType.BF16
    torch_dtype = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}[dtype]
    return load_model(embedded.model_dir() if model is None else model, device, torch_dtype)


def _runs(loaded: LoadedModel, request: Request, compare: bool) -> tuple[Run, Run | None]:
    from pagedmla.cli.generation import run_paged, run_stock

    typer.echo(request.prompt, nl=False)
    ours = run_paged(loaded, request, show=True)
    return ours, run_stock(loaded, request) if compare else None
