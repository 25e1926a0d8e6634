"""The Gluon backend: NVIDIA Hopper's own instructions, in one kernel for few rows a sequence and one for many.

choice.py        which of the two decodes a call, and how many programs of it
few_heads/       the kernel for few rows: one warpgroup that computes; keys of any page size
many_heads/      the kernel for many rows: two warpgroups with half of the values each; likewise
  kernel.py      what is launched: shared memory, and who does what
  layouts.py     sizes, register and shared-memory layouts
  loader.py      the warps that copy queries and keys (many_heads/gather.py: token by token)
shares.py        which keys each program takes, worked out by the programs themselves
addresses.py     where tokens lie of pages that hold no whole tile
pieces.py        what becomes of a row tile that several programs share
layouts.py       sizes and records of both kernels
barriers.py      how both use barriers in shared memory
opaque.py        what keeps the compiler from holding too much in registers
workspace.py     where programs leave what others are to unite
tensors.py       what the copy engine takes of the given tensors
launch.py        one cooperative launch of either kernel
variants.py, offline.py   what there is to compile, where no GPU is
"""

from pagedmla.kernels.gluon.launch import decode, workspace_size
from pagedmla.kernels.gluon.tensors import refuses_tensors

__all__ = ["decode", "refuses_tensors", "workspace_size"]
