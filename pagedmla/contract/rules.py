"""What a rule of the support table is, and the rules that several backends share."""

from __future__ import annotations

from collections.abc import Callable

from pagedmla.contract.problem import DecodeProblem
from pagedmla.contract.target import Target

Answer = tuple[str, str, str, str]
"""Why not: (code, argument, wanted, got)."""

Rule = Callable[[DecodeProblem, Target], Answer | None]
"""Looks at one field of a problem on a target, and says nothing or why not."""

_MOST_SPLITS = 65535


def invariant_splits(problem: DecodeProblem, target: Target) -> Answer | None:
    """The invariant mode owns the split size: a count would make it depend on the row's length."""
    if not problem.batch_invariant or problem.num_kv_splits is None:
        return None
    return "num_kv_splits", "num_kv_splits", "None together with batch_invariant", str(problem.num_kv_splits)


def equal_shares(problem: DecodeProblem, target: Target) -> Answer | None:
    """The persistent schedule cuts keys into equal shares: no number of splits, and not the same cuts in any batch."""
    if problem.schedule != "persistent":
        return None
    if problem.num_kv_splits is not None:
        wanted = "None or 'split' together with num_kv_splits: equal shares are no count"
        return "schedule", "schedule", wanted, "'persistent'"
    if problem.batch_invariant:
        wanted = "None or 'split' together with batch_invariant: equal shares depend on the whole batch"
        return "schedule", "schedule", wanted, "'persistent'"
    return None


def most_splits(problem: DecodeProblem, target: Target) -> Answer | None:
    """Plans on the device count the programs of a grid in i32."""
    if problem.num_kv_splits is None or problem.num_kv_splits <= _MOST_SPLITS:
        return None
    return "num_kv_splits", "num_kv_splits", f"at most {_MOST_SPLITS}", str(problem.num_kv_splits)
