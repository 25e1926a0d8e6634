"""Adapters: how the kit calls an implementation."""

from __future__ import annotations

from collections.abc import Callable

import pagedmla
from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.adapters.aiter import Aiter
from pagedmla.conformance.adapters.fa3 import FlashAttention3
from pagedmla.conformance.adapters.flash_mla import FlashMLA
from pagedmla.conformance.adapters.flash_mla_module import FlashMLAModule
from pagedmla.conformance.adapters.flashinfer import FlashInfer
from pagedmla.conformance.adapters.function import adapter_of
from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.adapters.vllm_triton import VLLMTriton
from pagedmla.contract.errors import InvalidArgument

_FACTORIES: dict[str, Callable[[], Adapter]] = {
    "pagedmla": Ours,
    "pagedmla:gluon": lambda: Ours("gluon"),
    "pagedmla:torch": lambda: Ours("torch"),
    "pagedmla:triton": lambda: Ours("triton"),
    "flash_mla": FlashMLA,
    "flashinfer_fa2": lambda: FlashInfer("fa2"),
    "flashinfer_fa3": lambda: FlashInfer("fa3"),
    "vllm_triton": VLLMTriton,
    "fa3": FlashAttention3,
    "aiter": Aiter,
}

_OF_A_MODULE: dict[str, Callable[[str], Adapter]] = {
    "aiter": Aiter,
    "flash_mla": FlashMLAModule,
    "flashinfer": lambda module: FlashInfer(module=module),
}
"""Call signature -> adapter of a module that has it."""

ADAPTER_NAMES = tuple(_FACTORIES)


def make_adapter(name: str) -> Adapter:
    """The adapter called ``name``, not loaded yet.

    Args:
        name: one of ``ADAPTER_NAMES``; "aiter:module", "flash_mla:module" or "flashinfer:module" for a module with that
            project's interface; or "module:attribute", a function with ``pagedmla.decode``'s signature, an ``Adapter``, or a
            class of them.

    Raises:
        InvalidArgument: there is none of this name, with the known ones; or what "module:attribute" names cannot be used.
    """
    if name in _FACTORIES:
        return _FACTORIES[name]()
    prefix, colon, rest = name.partition(":")
    if not (prefix and colon and rest):
        ways = [f"{project}:module" for project in _OF_A_MODULE]
        wanted = "one of " + ", ".join((*ADAPTER_NAMES, *ways)) + ", or module:function"
        raise InvalidArgument("impl", "impl", wanted, repr(name))
    if prefix == "pagedmla" and not hasattr(pagedmla, rest):
        return Ours(rest)  # a backend, or an error that names them
    if prefix in _OF_A_MODULE:
        return _OF_A_MODULE[prefix](rest)
    return adapter_of(name)
