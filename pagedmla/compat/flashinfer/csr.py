"""The batch as ``plan`` gets it: starts, page ids and lengths, checked, read once on the host, and made a block table."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from pagedmla.contract.arguments import expect
from pagedmla.contract.errors import InvalidArgument


class CSR(NamedTuple):
    """A batch as ``plan`` gets it; also the buffers that are reserved for graphs.

    ``qo_indptr`` i32 [batch_size + 1], ``kv_indptr`` i32 [batch_size + 1], ``kv_indices`` i32 [at least kv_indptr[-1]], page
    ids, and ``kv_len_arr`` i32 [batch_size], tokens.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor


def csr(*given: torch.Tensor | None, device: torch.device | None = None) -> CSR:
    """The four tensors, after a look at what can be seen without reading them; on ``device``, where one is given.

    Raises:
        InvalidArgument: one is missing, or its dtype, rank, size or device is another.
    """
    for name, tensor in zip(CSR._fields, given, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument("type", name, "an int32 tensor", type(tensor).__name__)
        expect(tensor, name, (None,), (torch.int32,), None)
        if device is not None and tensor.device != device:
            raise InvalidArgument("device", name, f"a buffer on {device}", f"one on {tensor.device}")
    batch = CSR(*given)  # type: ignore[arg-type]
    for name in ("qo_indptr", "kv_indptr"):
        expect(getattr(batch, name), name, (batch.kv_len_arr.shape[0] + 1,), (torch.int32,), None)
    return batch


def read(batch: CSR, page_size: int) -> tuple[list[int], list[int]]:
    """Query tokens of each sequence, and the pages that its length needs; checks every number but the page ids.

    Raises:
        InvalidArgument: names the tensor and the sequence.
    """
    parts = (batch.qo_indptr, batch.kv_indptr, batch.kv_len_arr)
    # joined first: one copy to the host, so one wait
    numbers = torch.cat([part.to(parts[0].device) for part in parts]).cpu()
    q_starts, page_starts, lengths = (part.tolist() for part in numbers.split([len(part) for part in parts]))
    _check_starts("qo_indptr", q_starts)
    _check_starts("kv_indptr", page_starts, most=batch.kv_indices.shape[0])
    for sequence, (length, (start, stop)) in enumerate(zip(lengths, pairwise(page_starts), strict=True)):
        if not 0 <= length <= (stop - start) * page_size:
            wanted = f"0..{(stop - start) * page_size} tokens, for {stop - start} pages in kv_indptr"
            raise InvalidArgument("seq_len", "kv_len_arr", wanted, f"{length} for sequence {sequence}")
    q_lens = [stop - start for start, stop in pairwise(q_starts)]
    return q_lens, [-(-length // page_size) for length in lengths]


def block_table(batch: CSR, width: int) -> torch.Tensor:
    """i32 [batch_size, width]; past a sequence's pages stand others', which nobody looks at."""
    cells = batch.kv_indptr[:-1, None] + torch.arange(width, device=batch.kv_indptr.device)
    return batch.kv_indices[cells.clamp_(max=max(0, batch.kv_indices.shape[0] - 1))]


def _check_starts(name: str, starts: list[int], most: int | None = None) -> None:
    if starts[0] != 0:
        raise InvalidArgument(name, name, "0 for sequence 0", str(starts[0]))
    wanted = "starts that never fall"
    if most is not None:
        wanted += f", nor pass the end of kv_indices at {most}"
    for sequence, (start, stop) in enumerate(pairwise(starts)):
        if stop < start or (most is not None and stop > most):
            raise InvalidArgument(name, name, wanted, f"{start}..{stop} for sequence {sequence}")
