"""What the kit must know of an implementation: what it takes, how it is called, and by which conventions it answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pagedmla.conformance.builder import Call
from pagedmla.conformance.spec import BatchSpec

Options = Mapping[str, object]
"""A way of being called: keyword arguments of the implementation's own, such as a number of splits."""

FEATURES = {
    "out": "writes the out and lse that it is given",
    "graph": "a prepared call may be captured in a CUDA graph, or run again, after its tensors changed in place",
    "strides": "honours the strides of q, the cache, the table and out",
    "q_pair": "takes the queries as two tensors, latent and rotated",
    "invariant": "has an option batch_invariant, in which a row's bits depend on nothing but the row",
    "bounded": "a live page id outside the pool, or a length past the table, never leads to a read outside the tensors",
    "validates": "answers arguments that it does not take with an exception, before anything is launched",
    "no_sync": "run() of a prepared call with out and lse given neither waits for the device nor allocates there",
}
"""What an adapter may claim, and is then held to.  A property that needs one is not applied to those without it."""


@dataclass(frozen=True)
class Conventions:
    """How an implementation answers.

    Attributes:
        lse_base: base of the logarithm of its lse; None: it returns none.
        lse_dtype: of its lse: one that is rounded to 16 bits is held to 16 bits.
        empty_lse: lse of a row that sees no key; nan: unspecified.
        empty_out: out of such a row; nan: unspecified.
        out_dtype: of its out; None: the queries', and bfloat16 for fp8 queries.
        p_dtype: dtype that softmax weights are rounded to before they meet the values; None: the queries' dtype.
    """

    lse_base: float | None = math.e
    lse_dtype: torch.dtype = torch.float32
    empty_lse: float = -math.inf
    empty_out: float = 0.0
    out_dtype: torch.dtype | None = None
    p_dtype: torch.dtype | None = None

    @property
    def lse_rounding(self) -> float:
        """Unit roundoff of the lse; 0 for float32, which its tolerance knows of."""
        return 0.0 if self.lse_dtype == torch.float32 else torch.finfo(self.lse_dtype).eps / 2


class Prepared(Protocol):
    """A call whose metadata is made and whose tensors have fixed addresses."""

    def run(self) -> tuple[Tensor, Tensor | None]:
        """(out [T, H, kv_lora_rank], lse [T, H] or None), by the implementation's own conventions.

        What launches kernels; it may be captured in a graph when the adapter has the feature "graph".
        """

    def refresh(self) -> None:
        """What an engine does between steps, after the content of the call's tensors changed: metadata, plans.

        Runs outside of a graph, must leave every address as it was, and may wait for the device.
        """


class Adapter:
    """Base of all adapters.  A subclass sets the attributes and overrides ``prepare``, mostly ``refuses``, ``load`` too.

    Attributes:
        name: what ``--impl`` takes.
        version: of the software; known after ``load``.
        conventions: how it answers.
        features: keys of ``FEATURES``.
        options: the ways of being called that are all to be checked; the first is the default.
    """

    name: str = ""
    version: str = ""
    conventions: Conventions = Conventions()
    features: frozenset[str] = frozenset()
    options: tuple[Options, ...] = ({},)

    def load(self, folder: Path | None = None) -> str | None:
        """Loads the software, installed or out of the user's ``folder``; returns why it is not here, or None."""
        return None

    def refuses(self, spec: BatchSpec, options: Options, device: torch.device) -> str | None:
        """Why the implementation does not take such a batch, in words; None when it does, and is then held to it."""
        return None

    def conventions_for(self, spec: BatchSpec, options: Options, device: torch.device) -> Conventions:
        """``conventions``; to be overridden where they depend on the batch."""
        return self.conventions

    def prepare(
        self, call: Call, options: Options, out: Tensor | None = None, lse: Tensor | None = None
    ) -> Prepared:
        """Makes metadata for ``call``, whose tensors it keeps.

        Args:
            call: tensors, in the contract's terms.
            options: one of ``self.options``, or what a property asks for by a feature.
            out, lse: where to write; given only to adapters with the feature "out".

        Raises:
            NotImplementedError: here or in ``run``: a refusal, for what ``refuses`` cannot tell.
        """
        raise TypeError(f"{type(self).__name__} has no prepare()")

    def lines(self, options: Options) -> str:
        """Python that calls the implementation on a ``call`` and leaves ``out`` and ``lse``, for a reproducer.

        math and torch are imported before it.  It may not import pagedmla, unless pagedmla is what is checked.  Empty: the
        reproducer names the adapter instead.
        """
        return ""


@dataclass(frozen=True)
class PreparedCall:
    """A ``Prepared`` of two functions.

    Attributes:
        run_call: launches the kernels.
        refresh_call: makes metadata anew; None: there is none to make.
    """

    run_call: Callable[[], tuple[Tensor, Tensor | None]]
    refresh_call: Callable[[], None] | None = None

    def run(self) -> tuple[Tensor, Tensor | None]:
        """See ``Prepared``."""
        return self.run_call()

    def refresh(self) -> None:
        """See ``Prepared``."""
        if self.refresh_call is not None:
            self.refresh_call()
