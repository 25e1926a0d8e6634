"""Checks of what the host knows about AITER-style arguments, and our errors under AITER's argument names."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagedmla.contract.errors import InvalidArgument, PagedMLAError, Unsupported, check_type

# what ``pagedmla.decode`` calls an argument, and what a caller of AITER's functions called it
_AITER_NAMES = {
    "kv_cache": "kv_buffer",
    "block_table": "kv_indices",
    "seq_lens": "kv_last_page_lens",
    "cu_seqlens_q": "qo_indptr",
    "max_q_len": "max_seqlen_q",
    "softmax_scale": "sm_scale",
    "kv_lora_rank": "o",
    "out": "o",
}


@contextmanager
def aiter_names() -> Iterator[None]:
    """Errors that leave the block name AITER's arguments instead of ours."""
    try:
        yield
    except PagedMLAError as error:
        name = _AITER_NAMES.get(error.argument)
        if name is None:
            raise
        described = (error.code, name, error.wanted, error.got)
        if isinstance(error, Unsupported):
            raise Unsupported(*described, error.refusals) from None
        raise type(error)(*described) from None


def whole(name: str, value: object, least: int) -> int:
    """Returns a whole number, numpy's included.

    Raises:
        InvalidArgument: it is none, or below ``least``; a tensor, which would have to be read.
    """
    if not isinstance(value, (bool, torch.Tensor)) and hasattr(value, "__index__"):
        number = operator.index(value)
        if number >= least:
            return number
    raise InvalidArgument(name, name, f"a whole number >= {least}", _described(value))


def flag(name: str, value: object) -> bool:
    """Returns a bool; raises InvalidArgument for anything else."""
    check_type(name, value, bool)
    return bool(value)


def tensor(
    name: str, value: object, rank: int, dtypes: tuple[torch.dtype, ...], device: torch.device | None
) -> torch.Tensor:
    """Returns a tensor of ``rank`` dimensions and one of ``dtypes`` on ``device`` (None: any).

    Raises:
        InvalidArgument: it is something else.
    """
    if not isinstance(value, torch.Tensor):
        raise InvalidArgument("type", name, "a tensor", _described(value))
    if value.dim() != rank:
        raise InvalidArgument("rank", name, f"{rank} dimensions", f"{value.dim()}: {list(value.shape)}")
    if value.dtype not in dtypes:
        raise InvalidArgument("dtype", name, " or ".join(str(dtype) for dtype in dtypes), str(value.dtype))
    if device is not None and value.device != device:
        raise InvalidArgument("device", name, f"a tensor on {device}", f"one on {value.device}")
    return value


def vector(name: str, value: object, least: int, device: torch.device | None) -> torch.Tensor:
    """Returns an i32 tensor [at least ``least``] on ``device``; raises InvalidArgument for anything else."""
    found = tensor(name, value, 1, (torch.int32,), device)
    if found.shape[0] < least:
        raise InvalidArgument("shape", name, f"[{least}] or more", str(list(found.shape)))
    return found


def matrix(name: str, value: object, least: int, columns: int, device: torch.device) -> torch.Tensor:
    """Returns an i32 tensor [at least ``least``, ``columns``] on ``device``; raises InvalidArgument for anything else."""
    found = tensor(name, value, 2, (torch.int32,), device)
    if found.shape[0] < least or found.shape[1] != columns:
        raise InvalidArgument("shape", name, f"[{least} or more, {columns}]", str(list(found.shape)))
    return found


def _described(value: object) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)
