"""A function with ``pagedmla.decode``'s signature, or an adapter of somebody's own, named as ``module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedmla.conformance.adapters.adapter import (
    FEATURES,
    Adapter,
    Conventions,
    Options,
    Prepared,
    PreparedCall,
)
from pagedmla.conformance.adapters.modules import refusing
from pagedmla.conformance.adapters.software import first_line, version_of
from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec
from pagedmla.contract.errors import InvalidArgument

_DEFAULTS: dict[str, object] = {
    "cu_seqlens_q": None,
    "causal": True,
    "kv_lora_rank": 512,
    "q_scale": None,
    "kv_scale": None,
}
"""Of ``pagedmla.decode``: what a function need not have, it is not asked for."""


class FunctionAdapter(Adapter):
    """A function with ``pagedmla.decode``'s signature and conventions.

    What it can be asked for, its signature tells: with ``out`` and ``lse`` it has the feature "out", with ``batch_invariant``
    "invariant", and ``num_kv_splits`` is one more way of calling it.  Without ``cu_seqlens_q``, ``causal``, ``kv_lora_rank`` or
    a scale it is not given batches that need them.  A NotImplementedError says that it does not take a batch.  Attributes of
    the function say more, where they are set: ``features`` (what it claims besides, of ``FEATURES``), ``options`` (its ways of
    being called) and ``conventions``.
    """

    def __init__(self, function: Callable[..., Any], name: str, version: str = "") -> None:
        """Args:
        function: to be called as ``pagedmla.decode`` is.
        name: as it was named, ``module:attribute``.
        version: of its package.

        Raises:
            InvalidArgument: it claims a feature that there is not.
        """
        self.name, self.version = name, version
        self._function = function
        self._takes = _parameters(function)
        claimed = frozenset(getattr(function, "features", ()))
        if not claimed <= FEATURES.keys():
            wanted = "some of " + ", ".join(FEATURES)
            raise InvalidArgument(
                "features", f"{name}.features", wanted, ", ".join(sorted(map(str, claimed)))
            )
        if self._names("out", "lse"):
            claimed |= {"out"}
        if self._names("batch_invariant"):
            claimed |= {"invariant"}
        self.features = claimed
        self.conventions = getattr(function, "conventions", Conventions())
        ways: list[Options] = [{"num_kv_splits": 3}, {"batch_invariant": True}]
        self.options = getattr(function, "options", ({}, *[way for way in ways if self._names(*way)]))

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        """What its signature has no word for."""
        needs = {
            "cu_seqlens_q": spec.ragged,
            "causal": not spec.causal,
            "kv_lora_rank": spec.kv_lora_rank != _DEFAULTS["kv_lora_rank"],
            "q_scale": spec.q_dtype.itemsize == 1,
            "kv_scale": spec.cache_dtype.itemsize == 1,
        }
        missing = [name for name, needed in needs.items() if needed and not self._accepts(name)]
        return f"has no argument {' and no '.join(missing)}" if missing else None

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        """Every run is the call."""
        given = {
            name: value
            for name, value in call.semantics().items()
            if self._accepts(name) or value != _DEFAULTS.get(name)
        }
        given |= options
        given |= {name: tensor for name, tensor in (("out", out), ("lse", lse)) if tensor is not None}

        def run() -> tuple[Tensor, Tensor | None]:
            found = self._function(call.q, call.kv_cache, call.block_table, call.seq_lens, **given)
            if not isinstance(found, (tuple, list)) or len(found) != 2:
                raise TypeError(f"{self.name} returned {type(found).__name__} where (out, lse) is right")
            return found[0], found[1]

        return PreparedCall(refusing(run))

    def lines(self, options: Options) -> str:
        """The call."""
        module, _, attribute = self.name.partition(":")
        given = {
            name: f"call.{name}"
            for name in ("softmax_scale", *_DEFAULTS)
            if name == "softmax_scale" or self._accepts(name)
        }
        given |= {name: repr(value) for name, value in options.items()}
        words = ", ".join(f"{name}={value}" for name, value in given.items())
        return (
            f"from {module} import {attribute}\n"
            f"out, lse = {attribute}(\n"
            f"    call.q, call.kv_cache, call.block_table, call.seq_lens,\n"
            f"    {words},\n"
            ")"
        )

    def _names(self, *parameters: str) -> bool:
        return self._takes is not None and all(name in self._takes for name in parameters)

    def _accepts(self, parameter: str) -> bool:
        if self._takes is None or parameter in self._takes:
            return True
        return any(kind is inspect.Parameter.VAR_KEYWORD for kind in self._takes.values())


def adapter_of(name: str) -> Adapter:
    """The function, or the adapter (a class or an object), that ``module:attribute`` names.

    The current folder is looked into after everything else on the module path, where it stays.

    Raises:
        InvalidArgument: the module is named as a file, does not import, has no such attribute, or the attribute is neither.
    """
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py") or "/" in module_name:
        wanted = f"a module name such as {Path(module_name).stem or 'my_kernels'}, not a file"
        raise InvalidArgument("impl", "impl", wanted, repr(module_name))
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever somebody's module raises
        got = f"{first_line(error)}{_place(error)}"
        raise InvalidArgument("impl", "impl", f"a module {module_name} that imports", got) from error
    missing = object()
    found = getattr(module, attribute, missing)
    if found is missing:
        wanted = f"an attribute of {module_name}"
        raise InvalidArgument("impl", "impl", wanted, f"{attribute!r}, which it does not have")
    if isinstance(found, type) and issubclass(found, Adapter):
        try:
            found = found()
        except TypeError as error:
            raise InvalidArgument(
                "impl", "impl", "an adapter without arguments", first_line(error)
            ) from error
    if isinstance(found, Adapter):
        found.name = found.name or name
        return found
    if not callable(found):
        wanted = "a function with pagedmla.decode's signature, or an Adapter"
        raise InvalidArgument("impl", "impl", wanted, f"{attribute}, a {type(found).__name__}")
    return FunctionAdapter(found, name, version_of(module_name))


def _place(error: Exception) -> str:
    """Where an import failed, such as " (my_kernels.py, line 3)"; empty when no file was run: there is no such module."""
    if isinstance(error, SyntaxError):
        # what does not parse has no frame, and its message says the place
        return ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename not in (__file__, importlib.__file__) and not frame.filename.startswith("<frozen"):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def _parameters(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Name -> kind; None where Python cannot tell, and everything has to be tried."""
    try:
        return {name: found.kind for name, found in inspect.signature(function).parameters.items()}
    except (TypeError, ValueError):
        return None
