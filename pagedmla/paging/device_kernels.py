"""Kernels for the paged cache and its metadata, by device type, loaded when first used.

Paging imports the contract and nothing else, so a module with kernels is found by its name, as a backend is: ``MODULES`` is
all that is known of it here, and ``PagingKernels`` is what it must offer.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol, cast

import torch

MODULES: dict[str, str] = {
    # torch calls an AMD GPU "cuda" too
    "cuda": "pagedmla.kernels.triton.paging_kernels",
}

APPEND_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
"""Dtypes between which ``PagingKernels.append`` converts."""


class PagingKernels(Protocol):
    """What a module with paging kernels offers.  Nothing in it waits for the device or allocates."""

    def append(
        self,
        kv_cache: torch.Tensor,
        latent: torch.Tensor,
        k_pe: torch.Tensor | None,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Rounds new tokens to the cache's dtype and writes them; all dtypes are among ``APPEND_DTYPES``."""

    def block_table_to_csr(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        page_size: int,
        num_seqs: int,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_last_page_len: torch.Tensor | None,
    ) -> None:
        """Writes a step's CSR form; cells of ``kv_indices`` past kv_indptr[-1] are left alone."""


def kernels_for(device: torch.device) -> PagingKernels | None:
    """The kernels for ``device``; None where there are none, or where what they are written in cannot be imported."""
    name = MODULES.get(device.type)
    if name is None or (device.type == "cuda" and not _is_reached(device)):
        return None
    return _load(name)


@cache
def _is_reached(device: torch.device) -> bool:
    # Triton supports NVIDIA's GPUs from compute capability 8.0 on
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _load(name: str) -> PagingKernels | None:
    try:
        return cast(PagingKernels, importlib.import_module(name))
    except ImportError as error:
        if (error.name or "").split(".")[0] == __name__.split(".")[0]:
            # a fault of this package, not a missing or broken dependency
            raise
        return None
