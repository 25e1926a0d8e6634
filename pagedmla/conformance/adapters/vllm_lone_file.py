"""vLLM's ``triton_decode_attention.py`` run as a file alone, where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

LONE_MODULE = "pagedmla_peer_vllm_triton"
"""The name that the file's module gets."""


def run_lone_file(path: Path) -> ModuleType:
    """The file at ``path`` as a module, with stand-ins for the two vLLM modules that it names."""
    spec = importlib.util.spec_from_file_location(LONE_MODULE, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not a module")
    module = importlib.util.module_from_spec(spec)
    with _vllm_stand_ins():
        spec.loader.exec_module(module)
    # kept under a name of its own: Triton looks a kernel's module up by name
    sys.modules[LONE_MODULE] = module
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
