"""The torch backend: plain torch operations, for CPUs and for any device that has no kernel of its own.

bounded.py     lengths and query starts as the kernel may trust them
work_items.py  what is attended to: (query tile, key range) items, grouped so that they fit one pass
pages.py       the only code that reads the cache
streaming.py   one pass: keys block by block through an online softmax
invariant.py   the same in fixed shapes, so that a row's bits depend on that row alone
merge.py       the union of softmax states over disjoint keys
scratch.py     intermediates, from the caller's workspace, or kept for the thread
launch.py      puts them together
"""

from pagedmla.kernels.torch.launch import decode, workspace_size
from pagedmla.kernels.torch.merge import merge_states

__all__ = ["decode", "merge_states", "workspace_size"]
