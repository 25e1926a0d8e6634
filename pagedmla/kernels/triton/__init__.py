"""The Triton backend: one source for every GPU that Triton reaches.

schedule.py      which program attends to what, found on the device
pages.py         the only code that reads the cache
attend.py        one row tile against KV tiles: the online softmax
decode.py        the two decode kernels, persistent and split
merge.py         unites their partial states
grid.py          how many programs and partial states
workspace.py     where the partial states lie
launch.py        puts them together
merge_states.py, append.py, csr.py   the kernels around decode
"""

from pagedmla.kernels.triton.launch import decode, workspace_size
from pagedmla.kernels.triton.merge_states import merge_states

__all__ = ["decode", "merge_states", "workspace_size"]
