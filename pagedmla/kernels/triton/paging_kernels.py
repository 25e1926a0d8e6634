"""What ``pagedmla.paging`` runs on a GPU; it finds this module by name (``pagedmla.paging.device_kernels``)."""

from pagedmla.kernels.triton.append import append
from pagedmla.kernels.triton.csr import block_table_to_csr

__all__ = ["append", "block_table_to_csr"]
