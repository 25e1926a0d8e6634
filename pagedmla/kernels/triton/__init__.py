"""The Triton backend: one source for every GPU that Triton reaches.

pages.py         the only code that reads the cache
attend.py        one row tile against KV tiles: the online softmax
decode.py        the decode kernel: a share of the plan, segment by segment
launch.py        puts it between the plan and the merge of ``split_kv``
merge_states.py, append.py, csr.py   the kernels around decode; paging_kernels.py, where paging finds them
variants.py, offline.py   what there is to compile, for GPUs that are not here
"""

from pagedmla.kernels.triton.launch import decode, workspace_size
from pagedmla.kernels.triton.merge_states import merge_states

__all__ = ["decode", "merge_states", "workspace_size"]
