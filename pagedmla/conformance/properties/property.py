"""What a property is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from pagedmla.conformance.adapters.adapter import Adapter
from pagedmla.conformance.configurations import Configuration
from pagedmla.conformance.inputs import POISONS
from pagedmla.conformance.subject import Subject


@dataclass(frozen=True)
class Scope:
    """What an example is drawn for.

    Attributes:
        adapter: its options and features.
        configuration: the fixed fields of its batches.
        device: where it will run.
    """

    adapter: Adapter
    configuration: Configuration
    device: torch.device

    def options(self) -> st.SearchStrategy[Any]:
        """One of the adapter's ways of being called."""
        return st.sampled_from(self.adapter.options)

    def poisons(self) -> st.SearchStrategy[str]:
        """What may lie around the tokens: where nan there is known to spoil everything (MEM), finite numbers only."""
        return st.just("finite") if self.configuration.is_calm else st.sampled_from(POISONS)


@dataclass(frozen=True)
class Property:
    """A promise that holds for every example, not for a list of them.

    Attributes:
        kind: the kind of fault that breaks it, a key of ``KINDS``.
        name: of this property, unique, in lower case with dashes.
        promise: what is promised, a sentence.
        examples: the strategy that draws examples for a scope; their repr says what they are.
        test: raises ``Broken`` when an example breaks the promise; ``Refused`` (by ``Subject.run``) drops the example.
        needs: features of an adapter without which there is nothing to ask.
        device_types: where it can be asked; empty: everywhere.
        share: examples in proportion to the others': slow ones take fewer.
    """

    kind: str
    name: str
    promise: str
    examples: Callable[[Scope], st.SearchStrategy[Any]]
    test: Callable[[Subject, Any], None]
    needs: frozenset[str] = frozenset()
    device_types: frozenset[str] = frozenset()
    share: float = 1.0

    def objection(self, adapter: Adapter, device: torch.device) -> str | None:
        """Why the property is not applied to ``adapter`` on ``device``, or None."""
        missing = sorted(self.needs - adapter.features)
        if missing:
            return "does not claim " + ", ".join(missing)
        if self.device_types and device.type not in self.device_types:
            return f"is asked on {', '.join(sorted(self.device_types))} only"
        return None
