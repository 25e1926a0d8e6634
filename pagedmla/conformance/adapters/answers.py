"""What conventions become under an option, or for a batch with rows that others know nothing of."""

from __future__ import annotations

import math
from dataclasses import replace

from pagedmla.conformance.adapters.adapter import Conventions, Options
from pagedmla.conformance.spec import BatchSpec


def wants_lse(options: Options) -> bool:
    """Whether lse is looked at: ``return_lse``, an option of every adapter of another project.  A benchmark turns it off."""
    return bool(options.get("return_lse", True))


def answer(conventions: Conventions, spec: BatchSpec, options: Options) -> Conventions:
    """``conventions`` without lse where it is not wanted, and silent about rows of no sequence where ``spec`` has such.

    Those rows are ours: who writes only what query starts name leaves them as they were.  The rows without keys of a batch are
    then unspecified all together.
    """
    if not wants_lse(options):
        conventions = replace(conventions, lse_base=None)
    if spec.rows_before or spec.rows_after:
        conventions = replace(conventions, empty_lse=math.nan, empty_out=math.nan)
    return conventions
