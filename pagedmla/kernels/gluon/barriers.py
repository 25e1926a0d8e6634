"""Barriers in shared memory, as both kernels use them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def open_barriers(barriers, COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Makes the first COUNT of ``barriers``, each complete after ARRIVALS arrivals."""
    for barrier in gl.static_range(COUNT):
        mbarrier.init(barriers.index(barrier), count=ARRIVALS)


@gluon.jit
def arrive(barrier):
    """Arrives for the whole warpgroup: one of its threads does, after all of them have come here."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)
