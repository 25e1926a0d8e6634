"""Backends by name, loaded when first used.

A backend is a module with the functions of ``Backend``, and may have that of ``Choosy`` or of ``Merging``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Literal, Protocol, cast

import torch

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.errors import InvalidArgument, Unsupported
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.support import Refusal
from pagedmla.contract.target import Target
from pagedmla.kernels.repeat import Repeatable

MODULES: dict[str, str] = {
    "gluon": "pagedmla.kernels.gluon",
    "triton": "pagedmla.kernels.triton",
    "torch": "pagedmla.kernels.torch",
}


class Backend(Protocol):
    """What a backend's module offers."""

    def decode(
        self, args: DecodeArguments, problem: DecodeProblem, out: torch.Tensor, lse: torch.Tensor
    ) -> Repeatable | None:
        """Writes every row of ``out`` and ``lse``; returns what that took on the device, where it can be repeated."""

    def workspace_size(self, problem: DecodeProblem, bounds: BatchBounds, target: Target) -> int:
        """Bytes of workspace that calls within ``bounds`` use on ``target``."""


class Choosy(Backend, Protocol):
    """A backend that takes a problem, and not every tensor that says the same numbers."""

    def refuses_tensors(self, args: DecodeArguments) -> Refusal | None:
        """Why it cannot read the tensors of a call, by their strides and addresses, or None."""


class Merging(Backend, Protocol):
    """A backend that merges states, too."""

    def merge_states(
        self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merges states, in the order given."""


@cache
def load(name: str) -> Backend:
    """The module of the backend called ``name``.

    Raises:
        InvalidArgument: no backend has this name.
        Unsupported: its module cannot be imported here; the import's own message is kept.
    """
    if name not in MODULES:
        raise InvalidArgument("backend", "backend", "one of " + ", ".join(MODULES), repr(name))
    try:
        return cast(Backend, importlib.import_module(MODULES[name]))
    except ImportError as error:
        raise Unsupported(
            "import", "backend", f"a machine where {MODULES[name]} can be imported", str(error)
        ) from error


def load_merging(name: Literal["triton", "torch"]) -> Merging:
    """The module of a backend that merges states."""
    return cast(Merging, load(name))


def is_choosy(name: str) -> bool:
    """Whether the backend called ``name`` may refuse tensors."""
    return hasattr(load(name), "refuses_tensors")


def refusal_of_tensors(name: str, args: DecodeArguments) -> Refusal | None:
    """Why the backend called ``name``, which takes the problem, cannot read the tensors of this call, or None."""
    return cast(Choosy, load(name)).refuses_tensors(args) if is_choosy(name) else None
