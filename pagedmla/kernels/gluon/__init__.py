"""The Gluon backend: NVIDIA Hopper's own instructions, in one kernel for few rows a sequence and one for many.

choice.py        which of the two decodes a call
few_heads/       the kernel for few rows, which is a decode by itself
many_heads.py    the kernel for many rows, and what it is made of:
  layouts.py     sizes, layouts, and the signals between a program's three partitions
  segments.py    what a segment of the plan says to them
  softmax.py     scores, softmax and products of a pair of key blocks
  halves.py      the two warpgroups that compute
  loader.py      the warp that copies queries and keys
tensors.py       what the copy engine takes of the given tensors
launch.py        launches the one, or the other between the plan and the merge of ``split_kv``
variants.py, offline.py   what there is to compile, where no GPU is
"""

from pagedmla.kernels.gluon.launch import decode, workspace_size
from pagedmla.kernels.gluon.tensors import refuses_tensors

__all__ = ["decode", "refuses_tensors", "workspace_size"]
