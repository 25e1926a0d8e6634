"""Where a pass keeps its large intermediates: the caller's workspace, memory kept for the thread, or fresh torch memory."""

from __future__ import annotations

import math
import threading

import torch

from pagedmla.contract.errors import InvalidArgument

ALIGNMENT = 64  # bytes; a cache line, and what vectorised products like best

_kept = threading.local()


class Scratch:
    """Hands out uninitialised tensors.  What the memory held before never matters: everything is written before it is read.

    With a workspace it is a bump allocator over it; ``reset`` starts again at the beginning, which ends the life of every
    tensor handed out before.  Without one, a CPU keeps the memory of each calling thread for its next call: blocks of
    megabytes come from the system and go back to it each time, and touching fresh pages takes longer than the attention.
    A pass is bounded, so what is kept is too (``TorchDecodeConfig``).
    """

    def __init__(self, workspace: torch.Tensor | None, device: torch.device) -> None:
        self._workspace = workspace
        self._device = device
        self._offset = 0
        self._taken = 0

    def reset(self) -> None:
        """Makes all memory free again."""
        self._offset = 0
        self._taken = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised, contiguous tensor.

        Raises:
            InvalidArgument: the workspace is too small.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._workspace is not None:
            return self._from_workspace(self._workspace, num_bytes).view(dtype).view(shape)
        if self._device.type == "cpu":
            return self._from_thread(num_bytes).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _from_workspace(self, workspace: torch.Tensor, num_bytes: int) -> torch.Tensor:
        start = self._offset + (-(workspace.data_ptr() + self._offset)) % ALIGNMENT
        if start + num_bytes > workspace.numel():
            wanted = f"at least {start + num_bytes} bytes (workspace_size tells how many)"
            raise InvalidArgument("workspace", "workspace", wanted, f"{workspace.numel()} bytes")
        self._offset = start + num_bytes
        return workspace[start : start + num_bytes]

    def _from_thread(self, num_bytes: int) -> torch.Tensor:
        # the n-th tensor of a pass always is the same intermediate, so each place grows to that one's largest size
        places: list[torch.Tensor] = _kept.__dict__.setdefault("places", [])
        if self._taken == len(places):
            places.append(_new_place(num_bytes))
        elif places[self._taken].numel() < num_bytes:
            places[self._taken] = _new_place(num_bytes)
        self._taken += 1
        return places[self._taken - 1][:num_bytes]


def _new_place(num_bytes: int) -> torch.Tensor:
    # an ordinary tensor even inside inference_mode: the next call may come from outside and write into it
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
