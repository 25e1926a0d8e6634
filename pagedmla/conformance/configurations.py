"""The columns of a report: model shapes and dtypes that an implementation is examined with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.spec import BatchSpec


@dataclass(frozen=True)
class Configuration:
    """Fields of ``BatchSpec`` that stay fixed while a property varies the others.

    Attributes:
        name: column heading.
        fields: of ``BatchSpec``.
        tags: words to select by.
        most_keys: most keys of a sequence, in tokens; what a property draws stays below unless it says otherwise.
    """

    name: str
    fields: dict[str, object] = field(default_factory=dict)
    tags: frozenset[str] = frozenset()
    most_keys: int = 400

    @property
    def is_calm(self) -> bool:
        """Whether finite numbers lie around the tokens, and no nan."""
        return self.fields.get("poison") == "finite"

    def calm(self) -> Configuration:
        """The same with finite numbers around the tokens: for what is known to be spoilt by a nan there."""
        return replace(self, fields={**self.fields, "poison": "finite"})

    def spec(self, seq_lens: tuple[int, ...], **fields: object) -> BatchSpec:
        """A batch of this configuration; ``fields`` win."""
        return BatchSpec(seq_lens, **{**self.fields, **fields})  # type: ignore[arg-type]


def _tags(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONFIGURATIONS = (
    Configuration("h16 p64 bf16", {"num_heads": 16}, _tags("decode bf16 few-heads")),
    Configuration("h128 p64 bf16", {"num_heads": 128}, _tags("decode bf16 many-heads"), most_keys=200),
    Configuration(
        "h16 p1 bf16", {"num_heads": 16, "page_size": 1}, _tags("decode bf16 few-heads one-token-pages")
    ),
    Configuration("h40 p16 bf16", {"num_heads": 40, "page_size": 16}, _tags("decode bf16 odd-heads")),
    Configuration("h16 p64 fp16", {"num_heads": 16, "dtype": "fp16"}, _tags("decode fp16 few-heads")),
    Configuration("h16 p64 fp32", {"num_heads": 16, "dtype": "fp32"}, _tags("decode fp32 few-heads")),
    Configuration(
        "h16 p64 bf16/e4m3fn", {"num_heads": 16, "kv_dtype": "e4m3fn"}, _tags("decode fp8 few-heads")
    ),
    Configuration(
        "h8 p32 256+64 bf16",
        {"num_heads": 8, "page_size": 32, "kv_lora_rank": 256},
        _tags("decode bf16 few-heads small-latent"),
    ),
)
"""Shapes of models that are served: DeepSeek-V2/V3 and Kimi K2 on 1 to 8 devices, GLM and MiniCPM latents."""


def configurations_for(adapter: Adapter, device: torch.device) -> list[Configuration]:
    """Those of which the adapter takes a batch of one query token each, one way or another."""
    return [
        configuration
        for configuration in CONFIGURATIONS
        if any(
            adapter.refuses(configuration.spec((127, 1)), options, device) is None
            for options in adapter.options
        )
    ]
