"""The kernel for few rows a sequence: tokens on the matrix unit's M side, so that no row of a 64-row tile is wasted.

layouts.py    sizes, layouts, and what lies in shared memory
shares.py     the schedule, made by each program for itself from the lengths: equal shares of all KV tiles
loader.py     the warp that copies queries and keys
tiles.py      scores, softmax and products of one KV tile
pieces.py     partial states of cut row tiles: published, waited for, united
consumer.py   the warpgroup that computes: a program's share from its first segment to its last
kernel.py     the kernel
launch.py     its workspace and its launch: one, cooperative, and nothing before or after it
"""
