"""The kernel for many rows a sequence: row tiles of 64, and two warpgroups that have half of the values each.

layouts.py    sizes, layouts, and what lies in shared memory
loader.py     the warp that copies queries and keys
gather.py     four warps that do so token by token, where a page holds no whole tile
pair.py       scores, softmax and products of a pair of KV tiles
halves.py     the warpgroups that compute: a program's share from its first segment to its last
kernel.py     the kernel
"""
