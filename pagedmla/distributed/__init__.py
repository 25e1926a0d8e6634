"""Decode over keys that are sharded across the ranks of a torch.distributed group: docs/context_parallel.md."""

from pagedmla.distributed.context_parallel import ContextParallel
from pagedmla.distributed.local_decode import LocalRows, decode_local, local_rows
from pagedmla.distributed.sharding import KeySharding

__all__ = ["ContextParallel", "KeySharding", "LocalRows", "decode_local", "local_rows"]
