"""A module with FlashMLA's Python interface: DeepSeek's own package, or another project's under the same names.

``get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k)`` and ``flash_mla_with_kvcache(q, k_cache, block_table,
cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal)``: what every generation of
deepseek-ai/FlashMLA, flash_mla/flash_mla_interface.py, takes; see ``flash_mla`` for its conventions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pagedmla.conformance.adapters import limits
from pagedmla.conformance.adapters.adapter import Adapter, Conventions, Options, Prepared, PreparedCall
from pagedmla.conformance.adapters.answers import answer, wants_lse
from pagedmla.conformance.adapters.flash_mla import CONVENTIONS, by_token, flash_mla_refuses
from pagedmla.conformance.adapters.layouts import by_sequence
from pagedmla.conformance.adapters.modules import OUR_MODULES, our_p_dtype, our_refusal, refusing
from pagedmla.conformance.adapters.software import import_software, version_of
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec

_NAMES = ("get_mla_metadata", "flash_mla_with_kvcache")
_DEEPSEEKS = ("flash_mla", "vllm")
"""Packages that have DeepSeek's kernels, and take what those take."""


class FlashMLAModule(Adapter):
    """The two functions of FlashMLA's interface, out of a module."""

    conventions = CONVENTIONS

    def __init__(self, module: str) -> None:
        package = module.split(".")[0]
        self.name = f"flash_mla:{module}"
        self.version = ""
        self._module_name = module
        self._ours, self._deepseeks = package in OUR_MODULES, package in _DEEPSEEKS
        # of others nobody has said that a captured call stays right
        self.features = frozenset({"graph"}) if self._ours else frozenset()
        self._module: ModuleType | None = None

    def load(self, folder: Path | None = None) -> str | None:
        """Imports the module."""
        found = import_software(self._module_name, folder)
        if isinstance(found, str):
            return found
        self._module, self.version = found, version_of(self._module_name)
        missing = [name for name in _NAMES if not hasattr(found, name)]
        return f"{self._module_name} has no {' and no '.join(missing)}" if missing else None

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        """DeepSeek's: what its kernels do not take.  Ours: what the support table says.  Others: what a call cannot ask for."""
        if self._deepseeks:
            return flash_mla_refuses(spec, device)
        cannot = (
            limits.no_queries(spec)
            or limits.uneven_queries(spec)
            or limits.other_dtypes(spec, (*limits.SIXTEEN_BITS, torch.float32))
        )
        return cannot or (our_refusal(spec, device) if self._ours else None)

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        """Ours writes -inf for a row without keys; the rest is FlashMLA's."""
        conventions = self.conventions
        if self._ours:
            conventions = replace(conventions, empty_lse=-math.inf, p_dtype=our_p_dtype(spec, device))
        return answer(conventions, spec, options)

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        """Metadata is made here and in ``refresh``: tensors are written over, an object gives way to a new one."""
        if self._module is None:
            raise RuntimeError(f"{self.name} is not loaded")
        module = self._module
        q, cache = by_sequence(call), call.kv_cache.unsqueeze(2)  # one KV head
        with_lse = wants_lse(options)

        def metadata() -> list[Any]:
            return list(module.get_mla_metadata(call.seq_lens, q.shape[1] * q.shape[2], 1))

        kept = refusing(metadata)()

        def run() -> tuple[Tensor, Tensor | None]:
            found, found_lse = module.flash_mla_with_kvcache(
                q,
                cache,
                call.block_table,
                call.seq_lens,
                call.kv_lora_rank,
                *kept,
                softmax_scale=call.softmax_scale,
                causal=call.causal,
            )
            return found.flatten(0, 1), by_token(found_lse) if with_lse else None

        def refresh() -> None:
            for place, newer in enumerate(metadata()):
                if isinstance(newer, Tensor):
                    kept[place].copy_(newer)
                else:
                    kept[place] = newer

        return PreparedCall(refusing(run), refresh)

    def lines(self, options: Options) -> str:
        """The two calls."""
        return f"""\
from {self._module_name} import flash_mla_with_kvcache, get_mla_metadata
q = call.q.unflatten(0, (len(call.seq_lens), -1))
metadata, splits = get_mla_metadata(call.seq_lens, q.shape[1] * q.shape[2], 1)
out, lse = flash_mla_with_kvcache(
    q, call.kv_cache.unsqueeze(2), call.block_table, call.seq_lens, call.kv_lora_rank, metadata, splits,
    softmax_scale=call.softmax_scale, causal=call.causal,
)
out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)"""
