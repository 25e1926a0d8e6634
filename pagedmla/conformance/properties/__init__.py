"""The properties: one module for each kind of fault."""

from __future__ import annotations

import importlib

from pagedmla.conformance.properties.property import Property
from pagedmla.contract.errors import InvalidArgument

KINDS = {
    "PAGE": "paged metadata and page sizes",
    "WIDTH": "address width",
    "EMPTY": "empty, padded and fully masked rows",
    "GRAPH": "capture and replay",
    "SPLIT": "split keys and their reduction",
    "LSE": "log-sum-exp and merging of states",
    "MEM": "memory that a row does not own",
    "QLEN": "several query tokens of a sequence",
    "SHAPE": "head counts and latent dimensions",
    "MODEL": "softmax scale and rotated part",
    "FP8": "fp8 caches: format and scale",
    "VIEW": "strides and offsets",
    "DCP": "keys that are sharded over ranks",
    "SYNC": "races: the same bits every time",
    "NUM": "precision and batch invariance",
    "ARCH": "refusals instead of aborts or garbage",
    "PERF": "waits and allocations in a step",
}
"""Kind of fault -> what it is about."""


def properties_of(kind: str) -> tuple[Property, ...]:
    """The properties of a kind.

    Raises:
        InvalidArgument: there is no such kind.
    """
    if kind not in KINDS:
        raise InvalidArgument("kind", "kind", "one of " + ", ".join(KINDS), repr(kind))
    module = importlib.import_module(f"pagedmla.conformance.properties.{kind.lower()}")
    found: tuple[Property, ...] = module.PROPERTIES
    return found
