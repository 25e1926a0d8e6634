"""The Triton backend: one source for every GPU that Triton reaches.

schedule.py      the work plan: which program attends to what, made on the device
pages.py         the only code that reads the cache
attend.py        one row tile against KV tiles: the online softmax
decode.py        the decode kernel: a share of the plan, segment by segment
merge.py         unites their partial states
grid.py          how many programs and partial states
workspace.py     where the partial states lie
launch.py        puts them together
merge_states.py, append.py, csr.py   the kernels around decode; paging_kernels.py, where paging finds them
variants.py, offline.py, resources.py   what there is to compile, for GPUs that are not here, and what it needs
"""

from pagedmla.kernels.triton.launch import decode, workspace_size
from pagedmla.kernels.triton.merge_states import merge_states

__all__ = ["decode", "merge_states", "workspace_size"]
