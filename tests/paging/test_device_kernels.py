"""Paging with kernels: where they are found, what goes to them, and that the front functions' results do not change.

On a machine without a GPU the kernels run on CPU tensors under Triton's interpreter.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from pagedmla import BatchBounds
from pagedmla.contract.errors import InvalidArgument
from pagedmla.paging import device_kernels
from pagedmla.paging.kv_cache import append
from pagedmla.paging.metadata import DecodeMetadata

TRITON = "pagedmla.kernels.triton.paging_kernels"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Calls:
    """The kernels, and the names of those that were called."""

    def __init__(self) -> None:
        self.kernels: Any = importlib.import_module(TRITON)
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(self.kernels, name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    recorder = Calls()
    monkeypatch.setitem(device_kernels.MODULES, "cpu", TRITON)
    monkeypatch.setattr(device_kernels, "_load", lambda name: recorder)
    return recorder


def test_a_cpu_has_no_kernels_and_a_gpu_has_triton_s() -> None:
    assert device_kernels.kernels_for(torch.device("cpu")) is None
    assert device_kernels.kernels_for(torch.device("meta")) is None
    assert device_kernels.MODULES["cuda"] == TRITON
    assert device_kernels._load(TRITON) is importlib.import_module(TRITON)


@pytest.mark.parametrize("missing", ["triton", "triton.language", None])
def test_what_cannot_be_imported_is_none(missing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError("libtriton.so: cannot open shared object file", name=missing)

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert device_kernels._load.__wrapped__(TRITON) is None


def test_a_fault_of_our_own_is_not_taken_for_a_missing_dependency() -> None:
    with pytest.raises(ModuleNotFoundError):
        device_kernels._load("pagedmla.kernels.triton.no_such_module")


@pytest.mark.parametrize("k_pe_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.bfloat16, torch.float16, torch.float32])
def test_append_gives_torch_s_bits(layout: torch.dtype, k_pe_dtype: torch.dtype, calls: Calls) -> None:
    generator = torch.Generator().manual_seed(0)
    latent, k_pe = (
        torch.randn(6, 32, generator=generator),
        torch.randn(6, 8, generator=generator).to(k_pe_dtype),
    )
    slots = torch.tensor([7, -1, 0, 20, 19, 3])
    cache = torch.full((5, 4, 40), torch.nan, dtype=layout, device=DEVICE)
    append(cache, latent.to(DEVICE), k_pe.to(DEVICE), slots.to(DEVICE))
    assert calls.names == ["append"]
    wanted = torch.cat([latent, k_pe.float()], -1).to(layout)
    rows = cache.cpu().view(20, 40)
    for token, slot in ((0, 7), (2, 0), (4, 19), (5, 3)):
        assert torch.equal(rows[slot], wanted[token])
    assert int(rows.isfinite().all(-1).sum()) == 4


@pytest.mark.parametrize(("cache_dtype", "dtype"), [("float8_e4m3fn", "float32"), ("bfloat16", "float64")])
def test_other_dtypes_take_torch_s_way(cache_dtype: str, dtype: str, calls: Calls) -> None:
    cache = torch.zeros(2, 4, 10, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    if cache_dtype == "bfloat16":
        cache = torch.zeros(2, 4, 10, dtype=torch.bfloat16, device=DEVICE)
    ones = torch.ones(1, 10, dtype=getattr(torch, dtype), device=DEVICE)
    append(cache, ones[:, :8], ones[:, 8:], torch.tensor([5], device=DEVICE))
    assert calls.names == []
    assert bool((cache[1, 1].float() == 1).all())
    assert int(cache.float().sum()) == 10


def test_what_append_refuses_reaches_no_kernel(calls: Calls) -> None:
    cache, ones = torch.zeros(2, 4, 10, device=DEVICE), torch.ones(1, 9, device=DEVICE)
    for slots in (torch.tensor([0], device=DEVICE), torch.tensor([0.0], device=DEVICE)):
        with pytest.raises(InvalidArgument):
            append(cache, ones[:, :7], ones[:, 7:], slots)
    append(cache, torch.ones(0, 8, device=DEVICE), torch.ones(0, 2, device=DEVICE), slots[:0].long())
    assert calls.names == []


@pytest.mark.parametrize("kernel_page_size", [1, 16, 64])
def test_metadata_is_what_the_host_makes(kernel_page_size: int, calls: Calls) -> None:
    bounds = BatchBounds(max_num_seqs=6, max_pages_per_seq=3)
    on_device = DecodeMetadata(bounds, 64, kernel_page_size=kernel_page_size, device=DEVICE)
    assert calls.names == ["block_table_to_csr"], "compiled when it is made, not while a graph is captured"
    device_kernels.MODULES.pop("cpu", None)
    on_host = DecodeMetadata(bounds, 64, kernel_page_size=kernel_page_size)
    names = ("block_table", "kv_indptr", "kv_indices", "kv_last_page_len", "seq_lens", "cu_seqlens_q")
    addresses = [getattr(on_device, name).data_ptr() for name in names]
    for seed, lengths in enumerate(([192] * 6, [127, 0, 131, 1], [], [64, 65, 63], [10**6, -3, 5])):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randperm(18, generator=generator, dtype=torch.int32).view(6, 3)[: len(lengths)]
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        on_host.update(table, seq_lens)
        on_device.update(table.to(DEVICE), seq_lens.to(DEVICE))
        used = int(on_host.kv_indptr[-1])
        for name in names:
            found, wanted = getattr(on_device, name).cpu(), getattr(on_host, name)
            stop = used if name == "kv_indices" else None
            assert torch.equal(found[:stop], wanted[:stop]), name
    assert [getattr(on_device, name).data_ptr() for name in names] == addresses
    assert set(calls.names) == {"block_table_to_csr"}
    assert len(calls.names) == 6


def test_the_buffer_of_ones_is_never_written(calls: Calls) -> None:
    metadata = DecodeMetadata(BatchBounds(3, 8), 1, device=DEVICE)
    metadata.kv_last_page_len.fill_(-9)
    metadata.update(
        torch.zeros(1, 8, dtype=torch.int32, device=DEVICE),
        torch.tensor([7], dtype=torch.int32, device=DEVICE),
    )
    assert metadata.kv_last_page_len.tolist() == [-9] * 3
    assert calls.names == ["block_table_to_csr"] * 2
