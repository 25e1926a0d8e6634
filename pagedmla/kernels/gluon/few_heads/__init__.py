"""The kernel for few rows a sequence: tokens on the matrix unit's M side, so that no row of a 64-row tile is wasted.

layouts.py    sizes, layouts, and what lies in shared memory
loader.py     the four warps that copy queries and keys, row by row from where they lie
tiles.py      scores, softmax and products of one KV tile
consumer.py   the warpgroup that computes: a program's share from its first segment to its last
kernel.py     the kernel
"""
