"""Whether Triton interprets kernels in this process (TRITON_INTERPRET=1) instead of compiling them."""

from __future__ import annotations

from triton import knobs

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""Read once, as Triton itself reads it: when a kernel is declared."""
