"""One timed run of ``model.generate``: through pagedmla's paged latent cache, or stock."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from pagedmla.cli.model_directory import LoadedModel
from pagedmla.cli.streaming import TextPrinter, stdout_printer


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        tokens: most new tokens; the model's end-of-text ends a run earlier.
        temperature: 0 takes the likeliest token, above 0 draws from the whole distribution.
        seed: seeds torch before each run.
    """

    tokens: int
    temperature: float = 0.0
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """These choices as keywords of ``model.generate``."""
        chosen: dict[str, Any] = {"max_new_tokens": self.tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            chosen |= {"temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        return chosen


@dataclass(frozen=True)
class Request:
    """What is to be generated, and through what.

    Attributes:
        prompt: the text to go on from.
        sampling: how tokens are chosen.
        page_size: tokens in a page of the latent cache.
        backend: kernel backend, None for the best that fits.
        keep_logits: keep every step's raw scores, for a comparison.
    """

    prompt: str
    sampling: Sampling
    page_size: int
    backend: str | None
    keep_logits: bool


@dataclass(frozen=True)
class Run:
    """What one run made.

    Attributes:
        token_ids: the new tokens.
        logits: [num_new_tokens, vocabulary] of the raw scores, or None when they were not kept.
        first_token_s: seconds from the call to the first token, which is the prompt's pass.
        tokens_per_s: rate of the tokens after the first; 0 when there is only one.
        cache_bytes_per_token: what the paged cache says that it took; None for a stock run.
    """

    token_ids: list[int]
    logits: torch.Tensor | None
    first_token_s: float
    tokens_per_s: float
    cache_bytes_per_token: int | None = None


def encode_prompt(loaded: LoadedModel, prompt: str) -> torch.Tensor:
    """Token ids [1, num_prompt_tokens] of ``prompt`` on the model's device.

    An empty prompt becomes the model's begin-of-text token, since a model must be given something.
    """
    ids = list(loaded.encode(prompt))
    if not ids:
        start = loaded.model.config.get_text_config().bos_token_id
        ids = [0 if start is None else int(start)]
    return torch.tensor([ids], device=loaded.model.device)


def run_paged(loaded: LoadedModel, request: Request, show: bool) -> Run:
    """Generates through pagedmla with a fresh paged cache; the model is stock again afterwards.

    Args:
        loaded: the model and its tokenizer.
        request: what to generate.
        show: print the text while it is made.
    """
    from pagedmla.integrations import transformers as integration

    cache = integration.PagedLatentCache(loaded.model.config, page_size=request.page_size)
    integration.enable(loaded.model, backend=request.backend)
    try:
        printer = stdout_printer(loaded.decode) if show else TextPrinter(loaded.decode)
        run = _run(loaded, request, printer, **{_cache_keyword(loaded.model): cache})
    finally:
        integration.disable(loaded.model)
    return replace(run, cache_bytes_per_token=cache.bytes_per_token())


def run_stock(loaded: LoadedModel, request: Request) -> Run:
    """The same call without pagedmla and with Transformers' own cache."""
    return _run(loaded, request, TextPrinter(loaded.decode))


def _cache_keyword(model: Any) -> str:
    """The name that ``generate`` takes a cache under: Transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def _run(loaded: LoadedModel, request: Request, printer: TextPrinter, **cache: Any) -> Run:
    prompt_ids = encode_prompt(loaded, request.prompt)
    torch.manual_seed(request.sampling.seed)
    began = time.perf_counter()
    result = loaded.model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        streamer=printer,
        return_dict_in_generate=True,
        output_logits=request.keep_logits,
        **request.sampling.arguments(),
        **cache,
    )
    times = printer.token_times
    span = times[-1] - times[0]
    return Run(
        token_ids=result.sequences[0, prompt_ids.shape[1] :].tolist(),
        logits=torch.cat(result.logits) if request.keep_logits else None,
        first_token_s=times[0] - began,
        tokens_per_s=(len(times) - 1) / span if span > 0 else 0.0,
    )
