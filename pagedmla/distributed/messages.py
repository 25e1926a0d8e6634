"""States (out, lse) as bytes: one collective carries both, and the decode writes straight into what is sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# a kernel is compiled for addresses that are multiples of 16 bytes, or for any: the views start at such
_ALIGNMENT = 16


@dataclass(frozen=True)
class StateMessage:
    """The layout of one rank's state: ``out``, then ``lse``, each from a multiple of 16 bytes on.

    Attributes:
        num_tokens, num_heads, width: out is [num_tokens, num_heads, width].
        dtype: of out; lse is f32 [num_tokens, num_heads].
    """

    num_tokens: int
    num_heads: int
    width: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one state, padding included."""
        return self._out_bytes + _padded(4 * self.num_tokens * self.num_heads)

    def empty(self, num_states: int, device: torch.device) -> Tensor:
        """uint8 [num_states, num_bytes], not initialised."""
        return torch.empty(num_states, self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """The states in ``messages``, uint8 [n, num_bytes]: out [n, T, H, width] and lse [n, T, H], the same memory."""
        rows = (messages.shape[0], self.num_tokens, self.num_heads)
        out = messages[:, : self._numbers * self.dtype.itemsize].view(self.dtype)
        lse = messages[:, self._out_bytes :][:, : 4 * rows[1] * rows[2]].view(torch.float32)
        return out.view(*rows, self.width), lse.view(rows)

    @property
    def _numbers(self) -> int:
        return self.num_tokens * self.num_heads * self.width

    @property
    def _out_bytes(self) -> int:
        return _padded(self._numbers * self.dtype.itemsize)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
