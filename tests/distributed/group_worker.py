"""What each process of a gloo group runs: every scenario once, results and errors written to a file for the tests to read."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from batches import Batch, make_batch
from distributed.shards import OWNERS, local_call

from pagedmla.contract.errors import PagedMLAError
from pagedmla.distributed import ContextParallel, KeySharding

LENS = [0, 1, 127, 131, 16, 17, 32, 3]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}
PATIENCE = 2.0
"""Seconds that a check waits where a rank stays away."""


def values() -> list[tuple[str, str, str]]:
    """(layout, heads, dtype) of every call whose result is compared with the oracle."""
    calls = [(layout, "replicated", dtype) for layout in OWNERS for dtype in ("float32", "bfloat16")]
    return calls + [("interleaved(3)", "sharded", dtype) for dtype in DTYPES]


def batch_of(dtype: str) -> Batch:
    """Ragged lengths with one to four query tokens, more than some sequences have tokens; 4 heads."""
    kind = DTYPES[dtype]
    return make_batch(LENS, [1, 2, 3, 4, 4, 3, 2, 4], num_heads=4, q_dtype=kind)


def heads_of(rank: int, num_ranks: int) -> slice:
    """The heads of a rank under tensor parallelism."""
    each = 4 // num_ranks
    return slice(rank * each, (rank + 1) * each)


def spawn(num_ranks: int, folder: Path, tcp: bool) -> list[dict[str, Any]]:
    """Runs a group of ``num_ranks`` processes; the results of each."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if tcp else None
    mp.spawn(_work, (num_ranks, str(folder), store.port if store else None), nprocs=num_ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]


def _work(rank: int, num_ranks: int, folder: str, port: int | None) -> None:
    torch.set_num_threads(1)
    store: dist.Store = (
        dist.FileStore(f"{folder}/store", num_ranks)
        if port is None
        else dist.TCPStore("127.0.0.1", port, is_master=False)
    )
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    found: dict[str, Any] = {}
    for layout, heads, dtype in values():
        found[f"{layout} {heads} {dtype}"] = _value(layout, heads, dtype, rank, num_ranks)
    for check in (True, False):
        found[f"check {check}"] = _value("round_robin", "replicated", "float32", rank, num_ranks, check=check)
    found["pair"] = _pair(rank, num_ranks)
    found["given"] = _given(rank, num_ranks)
    found["no tokens"] = _no_tokens(rank, num_ranks)
    found["keys"] = _store_keys(rank, num_ranks)
    for name, change in DIFFERENT.items():
        found[name] = _differs(change, rank, num_ranks)
    found["sharding"] = _other_layout(rank, num_ranks)
    found["absent"] = _absent(rank, num_ranks)
    if num_ranks == 4:
        found["subgroup"] = _subgroup(rank)
    dist.barrier()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _value(
    layout: str, heads: str, dtype: str, rank: int, num_ranks: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    sharding, owner = OWNERS[layout]
    parallel = ContextParallel(sharding, heads=heads, timeout=20, **options)
    assert (parallel.rank, parallel.num_ranks) == (rank, num_ranks)
    call = local_call(batch_of(dtype), owner, rank, num_ranks)
    if heads == "sharded":
        call["q"] = call["q"][:, heads_of(rank, num_ranks)]
    return parallel.decode(**call, backend="torch")


def _call(rank: int, num_ranks: int) -> dict[str, Any]:
    return local_call(batch_of("float32"), OWNERS["round_robin"][1], rank, num_ranks) | {"backend": "torch"}


def _pair(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sharded heads, the query as (q_nope, q_pe)."""
    call = _call(rank, num_ranks)
    q = call["q"][:, heads_of(rank, num_ranks)]
    pair = (q[..., :32], q[..., 32:])
    return ContextParallel(KeySharding.round_robin(), heads="sharded").decode(**(call | {"q": pair}))


def _given(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Into tensors of the caller's, each twice as wide as needed."""
    call = _call(rank, num_ranks)
    rows = call["q"].shape[:2]
    out, lse = torch.full((*rows, 64), torch.nan)[..., :32], torch.full((*rows, 2), torch.nan)[..., 0]
    result = ContextParallel(KeySharding.round_robin()).decode(**call, out=out, lse=lse)
    assert result[0] is out
    assert result[1] is lse
    return out, lse


def _no_tokens(rank: int, num_ranks: int) -> list[int]:
    call = _call(rank, num_ranks)
    starts = torch.zeros_like(call["cu_seqlens_q"])
    result = ContextParallel(KeySharding.round_robin()).decode(
        **(call | {"q": call["q"][:0], "cu_seqlens_q": starts})
    )
    return list(result[0].shape)


def _store_keys(rank: int, num_ranks: int) -> list[int]:
    """Keys in the group's store after some calls and after more."""
    parallel = ContextParallel(KeySharding.round_robin(), check=True)
    call, counts = _call(rank, num_ranks), []
    store = dist.group.WORLD.get_group_store()
    for _ in range(3):
        for _ in range(4):
            parallel.decode(**call)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


Change = Callable[[dict[str, Any]], dict[str, Any]]
DIFFERENT: dict[str, Change] = {
    "heads": lambda call: {"q": call["q"][:, :3]},
    "tokens": lambda call: {"q": call["q"][:-1], "cu_seqlens_q": call["cu_seqlens_q"].clamp(max=22)},
    "dtype": lambda call: {"q": call["q"].half(), "kv_cache": call["kv_cache"].half()},
    "width": lambda call: {"q": call["q"][..., :36], "kv_cache": call["kv_cache"][..., :36]},
    "sequences": lambda call: (
        {name: call[name][:7] for name in ("block_table", "seq_lens")}
        | {"cu_seqlens_q": call["cu_seqlens_q"][:8]}
    ),
    "scale": lambda call: {"softmax_scale": 0.25},
    "causal": lambda call: {"causal": False},
    "refused": lambda call: {"kv_cache": call["kv_cache"][..., :36]},
    "not a tensor": lambda call: {"seq_lens": LENS},
    "backend": lambda call: {"backend": "no such"},
}
"""How the call of rank 1 differs from the others'."""


def _differs(change: Change, rank: int, num_ranks: int) -> dict[str, Any]:
    """A good call, one in which rank 1 differs, and a good one of the same object."""
    parallel = ContextParallel(KeySharding.round_robin(), timeout=20)
    call = _call(rank, num_ranks)
    before = parallel.decode(**call)
    answer = answer_of(lambda: parallel.decode(**(call | (change(call) if rank == 1 else {}))))
    after = parallel.decode(**call)
    return answer | {"usable": torch.equal(before[0], after[0])}


def _other_layout(rank: int, num_ranks: int) -> dict[str, Any]:
    sharding = KeySharding.interleaved(2) if rank == 1 else KeySharding.round_robin()
    parallel = ContextParallel(sharding, timeout=20)
    return answer_of(lambda: parallel.decode(**_call(rank, num_ranks)))


def _absent(rank: int, num_ranks: int) -> dict[str, Any]:
    """The last rank never calls."""
    parallel = ContextParallel(KeySharding.round_robin(), timeout=PATIENCE)
    call = _call(rank, num_ranks)
    dist.barrier()
    answer = {} if rank == num_ranks - 1 else answer_of(lambda: parallel.decode(**call))
    dist.barrier()
    return answer


def _subgroup(rank: int) -> Any:
    """Ranks 1 and 3 are a group of two; the others are told that they are not in it."""
    group = dist.new_group([1, 3])
    made: dict[str, Any] = {}

    def make() -> None:
        made["parallel"] = ContextParallel(KeySharding.round_robin(), group)

    if rank in (0, 2):
        return answer_of(make)
    make()
    assert made["parallel"].rank == (rank - 1) // 2
    return made["parallel"].decode(**_call((rank - 1) // 2, 2))


def answer_of(call: Callable[[], Any]) -> dict[str, Any]:
    """What error ``call`` raises, and after how long."""
    began = time.monotonic()
    try:
        call()
    except PagedMLAError as error:
        fields = {"code": error.code, "argument": error.argument, "got": error.got, "text": str(error)}
        return fields | {"type": type(error).__name__, "seconds": time.monotonic() - began}
    return {"code": "no error", "argument": "", "got": "", "text": "", "type": "", "seconds": 0.0}
