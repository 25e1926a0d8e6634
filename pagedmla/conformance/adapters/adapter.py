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
    "one_kernel": "the same kernel runs, and gives the same bits, whatever the strides and addresses of the tensors",
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
        lse_of_rounded_weights: its lse is the logarithm of the sum of weights rounded to ``p_dtype``, each weight relative to
            the largest score so far; step 5 in ``numerics`` says how far from the right one that may be.
    """

    lse_base: float | None = math.e
    lse_dtype: torch.dtype = torch.float32
    empty_lse: float = -math.inf
    empty_out: float = 0.0
    out_dtype: torch.dtype | None = None
    p_dtype: torch.dtype | None = None
    lse_of_rounded_weights: bool = False

    @property
    def lse_rounding(self) -> float:
        """Unit roundoff of the lse; 0 for float32, which its tolerance knows of."""
        return 0.0 if self.lse_dtype == torch.float32 else torch.finfo(self.lse_dtype).eps / 2

    @property
    def lse_limit(self) -> float:
        """The largest lse that its dtype holds, as a natural logarithm."""
        return torch.finfo(self.lse_dtype).max * math.log(self.lse_base or math.e)

    def deviations(self) -> tuple[str, ...]:
        """What of the answer is not as in ``pagedmla.decode``'s contract, in words: it is judged by that, and not blamed."""
        if self.lse_base is None:
            said = ["no lse is returned"]
        else:
            said = [] if self.lse_base == math.e else [f"lse has base {self.lse_base:g}"]
            if self.lse_dtype != torch.float32:
                said.append(f"lse is {str(self.lse_dtype).removeprefix('torch.')}")
            if self.lse_of_rounded_weights:
                dtype = (
                    "the queries' dtype" if self.p_dtype is None else str(self.p_dtype).removeprefix("torch.")
                )
                said.append(f"lse is of the sum of weights that were rounded to {dtype}")
        for name, came, right in (("lse", self.empty_lse, -math.inf), ("out", self.empty_out, 0.0)):
            if came != right and not (name == "lse" and self.lse_base is None):
                what = "unspecified" if math.isnan(came) else f"{came:g}"
                said.append(f"{name} of a row that sees no key is {what}")
        if self.out_dtype is not None:
            said.append(f"out is {str(self.out_dtype).removeprefix('torch.')}")
        return tuple(said)


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
        """``conventions``; to be overridden where they depend on the batch.  Asked only for what ``refuses`` takes."""
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
