"""Modules with another project's call signature: what can be known of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from pagedmla.conformance.adapters.ours import Ours
from pagedmla.conformance.adapters.software import first_line
from pagedmla.conformance.spec import BatchSpec

Returned = TypeVar("Returned")

OUR_MODULES = ("pagedmla",)
"""Packages whose modules take what our support table takes, and answer by our contract."""

_OURS = Ours()


def our_refusal(spec: BatchSpec, device: torch.device) -> str | None:
    """What the support table says to ``spec``, or None."""
    return _OURS.refuses(spec, {}, device)


def our_p_dtype(spec: BatchSpec, device: torch.device) -> torch.dtype | None:
    """The dtype that our chosen backend rounds softmax weights to."""
    return _OURS.conventions_for(spec, {}, device).p_dtype


def refusing(function: Callable[[], Returned]) -> Callable[[], Returned]:
    """``function``, in which a NotImplementedError, our Unsupported among them, says that a batch is not taken.

    For implementations of which nothing is known beforehand: that is no fault; any other error still counts against them.
    """

    def call() -> Returned:
        try:
            return function()
        except NotImplementedError as error:
            # not at the top: ``subject`` imports the adapters
            from pagedmla.conformance.subject import Refused

            raise Refused(first_line(error)) from error

    return call
