"""Where a pass keeps its large intermediates: in the caller's workspace if there is one, else in fresh torch memory."""

from __future__ import annotations

import math

import torch

from pagedmla.contract.errors import InvalidArgument

ALIGNMENT = 64  # bytes; a cache line, and what vectorised products like best


class Scratch:
    """Hands out uninitialised tensors.  What the memory held before never matters: everything is written before it is read.

    With a workspace it is a bump allocator over it; ``reset`` starts again at the beginning, which ends the life of every
    tensor handed out before.
    """

    def __init__(self, workspace: torch.Tensor | None, device: torch.device) -> None:
        self._workspace = workspace
        self._device = device
        self._offset = 0

    def reset(self) -> None:
        """Makes the whole workspace free again."""
        self._offset = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised, contiguous tensor.

        Raises:
            InvalidArgument: the workspace is too small.
        """
        if self._workspace is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        start = self._offset + (-(self._workspace.data_ptr() + self._offset)) % ALIGNMENT
        num_bytes = math.prod(shape) * dtype.itemsize
        if start + num_bytes > self._workspace.numel():
            wanted = f"at least {start + num_bytes} bytes (workspace_size tells how many)"
            raise InvalidArgument("workspace", "workspace", wanted, f"{self._workspace.numel()} bytes")
        self._offset = start + num_bytes
        return self._workspace[start : start + num_bytes].view(dtype).view(shape)
