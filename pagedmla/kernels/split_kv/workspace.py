"""What a decode keeps in memory: the work plan, and the partial states of row tiles that are cut.

The plan's parts are laid out in schedule.py.  Of a slot's state, which a decode kernel writes and merge.py reads:

    partial_out f32 [slots, BLOCK_M, BLOCK_D]   normalised; partial_lse f32 [slots, BLOCK_M], base 2; without keys -inf
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagedmla.contract.errors import InvalidArgument

ALIGNMENT = 16
"""Bytes; the widest load a kernel makes."""

_SEGMENT_BYTES = 8 * 4  # the fields of schedule.py, i32


class Workspace(NamedTuple):
    """Parts of a workspace, and the ``memory`` that they are of."""

    memory: torch.Tensor
    shares: torch.Tensor
    segments: torch.Tensor
    row_pieces: torch.Tensor
    partial_lse: torch.Tensor
    partial_out: torch.Tensor

    @property
    def views(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each part with the memory."""
        return [(part, self.memory) for part in self[1:]]


@dataclass(frozen=True)
class WorkspaceLayout:
    """Sizes of the parts.

    Attributes:
        programs: of the decode kernel.
        segments: that may be noted down.
        num_rows: query tokens * heads.
        places: rows of partial states: slots * rows of a row tile.
        columns: value columns of a row, padded to the kernel's block.
    """

    programs: int
    segments: int
    num_rows: int
    places: int
    columns: int

    @property
    def num_bytes(self) -> int:
        """Bytes that ``carve`` takes at most, whatever the workspace's address."""
        return sum(_aligned(size) for size, _ in self._parts()) + ALIGNMENT

    def carve(self, workspace: torch.Tensor | None, device: torch.device) -> Workspace:
        """The parts, in ``workspace`` or in fresh memory of torch's.

        Raises:
            InvalidArgument: the workspace is too small.
        """
        if workspace is None:
            workspace = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        elif workspace.numel() < self.num_bytes:
            wanted = f"at least {self.num_bytes} bytes (workspace_size tells how many)"
            raise InvalidArgument("workspace", "workspace", wanted, f"{workspace.numel()} bytes")
        elif workspace.untyped_storage().data_ptr() % 4:
            # torch gives no view of wider numbers into such memory
            wanted = "memory whose storage begins at a multiple of 4 bytes"
            raise InvalidArgument(
                "workspace", "workspace", wanted, hex(workspace.untyped_storage().data_ptr())
            )
        start = -workspace.data_ptr() % ALIGNMENT
        parts = []
        for size, dtype in self._parts():
            parts.append(workspace[start : start + size].view(dtype))
            start += _aligned(size)
        return Workspace(workspace, *parts)

    def _parts(self) -> tuple[tuple[int, torch.dtype], ...]:
        return (
            (self.programs * 8, torch.int32),
            (self.segments * _SEGMENT_BYTES, torch.int32),
            (self.num_rows * 8, torch.int32),
            (self.places * 4, torch.float32),
            (self.places * self.columns * 4, torch.float32),
        )


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT
