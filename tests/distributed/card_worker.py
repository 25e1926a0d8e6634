"""What each process of a group runs with a GPU of its own: values, a captured graph, a rank that differs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from batches import Batch, make_batch
from distributed.group_worker import answer_of
from distributed.shards import OWNERS, local_call

from pagedmla.distributed import ContextParallel

LENS = [0, 1, 127, 131, 64, 65, 700, 3]
GROWN = [9, 1, 128, 0, 70, 65, 650, 4]
"""Lengths that the captured graph is replayed with: none needs more pages on a rank than the batch has."""
CALLS = [("round_robin", "replicated"), ("interleaved(16)", "replicated"), ("contiguous(40)", "sharded")]


def batch_of(lens: list[int]) -> Batch:
    """One to four query tokens, 8 heads of a model's size, bf16."""
    return make_batch(lens, [1, 2, 3, 4, 4, 3, 2, 4], num_heads=8, dims=(512, 64), q_dtype=torch.bfloat16)


def spawn(num_ranks: int, folder: Path, device: str = "cuda") -> list[dict[str, Any]]:
    """Runs a group of ``num_ranks`` processes, under NCCL where ``device`` is cuda; the results of each."""
    mp.spawn(_work, (num_ranks, str(folder), device), nprocs=num_ranks)
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(num_ranks)]


def _work(rank: int, num_ranks: int, folder: str, kind: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    backend = "nccl" if kind == "cuda" else "gloo"
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
    found: dict[str, Any] = {}
    for layout, heads in CALLS:
        sharding, owner = OWNERS[layout]
        call = local_call(batch_of(LENS), owner, rank, num_ranks, 16, device)
        if heads == "sharded":
            call["q"] = call["q"].chunk(num_ranks, dim=1)[rank]
        parallel = ContextParallel(sharding, heads=heads, timeout=30)
        found[f"{layout} {heads}"] = parallel.decode(**call)
    found["differs"] = _differs(rank, num_ranks, device)
    if kind == "cuda":
        found["graph"] = _graph(rank, num_ranks, device)
    dist.barrier()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _differs(rank: int, num_ranks: int, device: torch.device) -> dict[str, Any]:
    sharding, owner = OWNERS["round_robin"]
    call = local_call(batch_of(LENS), owner, rank, num_ranks, 16, device)
    if rank == 1:
        call["q"] = call["q"][:, :3]
    return answer_of(lambda: ContextParallel(sharding, timeout=30).decode(**call))


def _graph(rank: int, num_ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Captured with one batch, replayed with another in the same tensors."""
    sharding, owner = OWNERS["round_robin"]
    call = local_call(batch_of(LENS), owner, rank, num_ranks, 16, device)
    later = local_call(batch_of(GROWN), owner, rank, num_ranks, 16, device)
    pages = later["kv_cache"].shape[0]
    # room for both batches
    cache = torch.full((max(pages, call["kv_cache"].shape[0]), 16, 576), torch.nan, device=device).bfloat16()
    cache[: call["kv_cache"].shape[0]] = call["kv_cache"]
    call["kv_cache"] = cache
    parallel = ContextParallel(sharding, timeout=30)
    parallel.decode(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = parallel.decode(**call)
    cache.fill_(torch.nan)
    cache[:pages] = later["kv_cache"]
    for name in ("q", "seq_lens"):
        call[name].copy_(later[name])
    call["block_table"].fill_(-1)
    width = min(call["block_table"].shape[1], later["block_table"].shape[1])
    call["block_table"][:, :width] = later["block_table"][:, :width]
    graph.replay()
    torch.cuda.synchronize()
    return out, lse
