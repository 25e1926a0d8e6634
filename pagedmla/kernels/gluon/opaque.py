"""A zero that the compiler does not know.

What is the same in every pass of a loop, the compiler computes before the loop, and keeps: all addresses of an epilogue, and
all descriptors of tiles, far more than there are registers.  They are cheap to compute again where they are needed, which they
are if they contain such a zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def zero_here():
    """0, i32; computed where this stands."""
    zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    # the compiler may know that it is small: a sum with it does not overflow, so constants come out of addresses
    return zero & 1
