"""The Gluon backend: NVIDIA Hopper's own instructions, for batches with more than 16 rows a sequence.

layouts.py       sizes, layouts, and the signals between a program's three partitions
segments.py      what a segment of the plan says to them
softmax.py       scores, softmax and products of a pair of key blocks
halves.py        the two warpgroups that compute
loader.py        the warp that copies queries and keys
many_heads.py    the decode kernel
tensors.py       what the copy engine takes of the given tensors
launch.py        puts the kernel between the plan and the merge of ``split_kv``
variants.py, offline.py   what there is to compile, where no GPU is
"""

from pagedmla.kernels.gluon.launch import decode, workspace_size
from pagedmla.kernels.gluon.tensors import refuses_tensors

__all__ = ["decode", "refuses_tensors", "workspace_size"]
