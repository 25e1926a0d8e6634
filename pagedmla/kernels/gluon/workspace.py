"""The workspace of a launch: partial states of cut row tiles, and the flags that say they are there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pagedmla.contract.errors import InvalidArgument
from pagedmla.kernels.split_kv.workspace import ALIGNMENT

_FLAG_BYTES = 8


class Parts(NamedTuple):
    """Parts of a workspace, and the ``memory`` that they are of; see ``layouts.Partials``."""

    memory: Tensor
    flags: Tensor
    partial_lse: Tensor
    partial_out: Tensor

    @property
    def views(self) -> list[tuple[Tensor, Tensor]]:
        """Each part with the memory."""
        return [(part, self.memory) for part in self[1:]]


@dataclass(frozen=True)
class PartialsLayout:
    """Sizes of the parts.  Nothing of them is cleared before a launch.

    Attributes:
        teams: that share out work, each for itself; one team's memory follows another's.
        programs: of a team; each has two slots for partial states, and each slot a flag for every program.
        rows, columns: of a partial state.
    """

    teams: int
    programs: int
    rows: int
    columns: int

    @cached_property
    def num_bytes(self) -> int:
        """Bytes that ``carve`` takes at most, whatever the workspace's address."""
        return sum(size for size, _ in self._parts) + ALIGNMENT

    def carve(self, workspace: Tensor | None, device: torch.device) -> Parts:
        """The parts, in ``workspace`` or in fresh memory of torch's.

        Raises:
            InvalidArgument: the workspace is too small.
        """
        if workspace is None:
            workspace = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
        elif workspace.numel() < self.num_bytes:
            wanted = f"at least {self.num_bytes} bytes (workspace_size tells how many)"
            raise InvalidArgument("workspace", "workspace", wanted, f"{workspace.numel()} bytes")
        elif (address := workspace.untyped_storage().data_ptr()) % _FLAG_BYTES:
            # torch gives no view of wider numbers into such memory
            wanted = f"memory whose storage begins at a multiple of {_FLAG_BYTES} bytes"
            raise InvalidArgument("workspace", "workspace", wanted, hex(address))
        start = -workspace.data_ptr() % ALIGNMENT
        parts = []
        for size, dtype in self._parts:
            parts.append(workspace[start : start + size].view(dtype))
            start += size
        return Parts(workspace, *parts)

    @cached_property
    def _parts(self) -> tuple[tuple[int, torch.dtype], ...]:
        # every size is a multiple of ALIGNMENT: a slot's part is, but for the flags, of which there is an even number
        slots = 2 * self.teams * self.programs
        return (
            (slots * self.programs * _FLAG_BYTES, torch.int64),
            (slots * self.rows * 4, torch.float32),
            (slots * self.rows * self.columns * 4, torch.float32),
        )
