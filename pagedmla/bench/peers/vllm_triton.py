"""vLLM's Triton decode (its TRITON_MLA backend), out of an installed vLLM or as its one file alone."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pagedmla.bench.batch import SOFTMAX_SCALE, DecodeBatch
from pagedmla.bench.peers.peer import PEER_ERRORS, Software, find_software, first_line, needs_16_bits
from pagedmla.bench.shapes import KV_LORA_RANK

_FILES = (
    "v1/attention/ops/triton_decode_attention.py",
    "attention/ops/triton_decode_attention.py",  # older versions
    "vllm_triton_decode.py",  # as one saves it beside other files
)
_LONE_MODULE = "pagedmla_peer_vllm_triton"
_TOKENS_PER_SPLIT = 512
"""vLLM 0.21: one split for so many tokens of the longest sequence, rounded up to a power of two."""


class VLLMTriton:
    """One query token a sequence; one number of splits for all sequences; a merge kernel after."""

    name = "vllm_triton"

    def __init__(self) -> None:
        self.version = ""
        self._decode: Callable[..., Any] | None = None

    def load(self, folder: Path | None) -> str | None:
        """Imports the module from vLLM, or runs the lone file with stand-ins for the two vLLM modules that it names."""
        found = find_software("vllm", _FILES, folder)
        if isinstance(found, str):
            return found
        try:
            module = _import_installed(found) if found.installed else _run_lone_file(found.path)
            self._decode = module.decode_attention_fwd
        except PEER_ERRORS as error:
            return f"{found.path.name} of {found.version} does not load: {first_line(error)}"
        self.version = found.version
        return None

    def supports(self, batch: DecodeBatch) -> str | None:
        """16 bits, one query token."""
        if batch.shape.q_len != 1:
            return f"takes one query token a sequence, not {batch.shape.q_len}"
        return needs_16_bits(batch)

    def prepare(self, batch: DecodeBatch) -> Callable[[], Tensor]:
        """Buffers as vLLM makes them: lse in q's dtype, f32 partial results."""
        if self._decode is None:
            raise RuntimeError("vllm_triton is not loaded")
        decode, shape, device = self._decode, batch.shape, batch.device
        wanted = max(1, max(shape.seq_lens) // _TOKENS_PER_SPLIT)
        num_splits = min(1 << (wanted - 1).bit_length(), 2 * batch.target.compute_units)
        rows = (shape.num_seqs, shape.num_heads)
        out = torch.zeros(*rows, KV_LORA_RANK, dtype=batch.q.dtype, device=device)
        lse = torch.zeros(rows, dtype=batch.q.dtype, device=device)
        partial = torch.empty(*rows, num_splits, KV_LORA_RANK + 1, dtype=torch.float32, device=device)
        cache = batch.kv_cache.unsqueeze(2)  # one KV head
        arguments = (
            batch.q,
            cache,
            cache[..., :KV_LORA_RANK],
            out,
            lse,
            batch.block_table,
            batch.seq_lens,
            partial,
            num_splits,
            SOFTMAX_SCALE,
            batch.page_size,
        )
        newer = _newer_arguments(decode, device)

        def run() -> Tensor:
            decode(*arguments, **newer)
            return out

        return run


def _newer_arguments(decode: Callable[..., Any], device: torch.device) -> dict[str, object]:
    """What newer versions take besides: is_mla, which reads a latent once, and scales, which they else make at each call.

    Where there is no v_scale, a k_scale would turn the fp8 path on, so none is given.
    """
    takes = inspect.signature(decode).parameters
    found: dict[str, object] = {"is_mla": True} if "is_mla" in takes else {}
    if "v_scale" in takes:
        one = torch.ones((), dtype=torch.float32, device=device)
        found |= {"k_scale": one, "v_scale": one}
    return found


def _import_installed(found: Software) -> ModuleType:
    parts = found.path.with_suffix("").parts
    return importlib.import_module(".".join(parts[len(parts) - 1 - parts[::-1].index("vllm") :]))


def _run_lone_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_LONE_MODULE, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not a module")
    module = importlib.util.module_from_spec(spec)
    with _vllm_stand_ins():
        spec.loader.exec_module(module)
    # kept under a name of its own: Triton looks a kernel's module up by name
    sys.modules[_LONE_MODULE] = module
    return module


@contextmanager
def _vllm_stand_ins() -> Iterator[None]:
    """Puts ``vllm.platforms`` and ``vllm.triton_utils`` into sys.modules with what the file reads of them, for the time of
    its import; what was there before comes back."""
    import triton
    import triton.language as tl

    on_amd = torch.version.hip is not None
    platform = SimpleNamespace(
        is_rocm=lambda: on_amd,
        is_cuda=lambda: not on_amd,
        is_device_capability_family=lambda *wanted: False,
        has_device_capability=lambda *wanted: not on_amd,
    )
    stand_ins = {name: ModuleType(name) for name in ("vllm", "vllm.platforms", "vllm.triton_utils")}
    vars(stand_ins["vllm.platforms"])["current_platform"] = platform
    vars(stand_ins["vllm.triton_utils"]).update(triton=triton, tl=tl)
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
