"""What a rule of the support table is, and the rules that several backends share."""

from __future__ import annotations

from collections.abc import Callable

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.target import Target

Answer = tuple[str, str, str, str]
"""Why not: (code, argument, wanted, got)."""

Rule = Callable[[DecodeProblem, Target], Answer | None]
"""Looks at one field of a problem on a target, and says nothing or why not."""


def invariant_splits(problem: DecodeProblem, target: Target) -> Answer | None:
    """The invariant mode owns the split size: a count would make it depend on the row's length."""
    if not problem.batch_invariant or problem.num_kv_splits is None:
        return None
    return "num_kv_splits", "num_kv_splits", "None together with batch_invariant", str(problem.num_kv_splits)
