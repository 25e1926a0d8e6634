"""Paged decode attention for Multi-head Latent Attention, under one written contract.

Importing this imports torch and nothing else, and touches no device.
"""

from pagedmla import reference
from pagedmla.contract.errors import InvalidArgument, PagedMLAError, PlanMismatch, Unsupported
from pagedmla.contract.explain import Explanation, explain
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.contract.support import Refusal, refusals
from pagedmla.contract.target import Target
from pagedmla.decode import decode, merge_states, workspace_size
from pagedmla.plan import DecodePlan

__version__ = "0.1.0"

__all__ = [
    "BatchBounds",
    "DecodePlan",
    "DecodeProblem",
    "Explanation",
    "InvalidArgument",
    "PagedMLAError",
    "PlanMismatch",
    "Refusal",
    "Target",
    "Unsupported",
    "decode",
    "explain",
    "merge_states",
    "reference",
    "refusals",
    "workspace_size",
]
