"""What only a GPU can show of the backend that is chosen there: no host sync, no allocation in a metadata step, replay of a
captured graph.

The value tests run on the CPU; ``pagedmla check --device cuda`` runs them on a card.  Here is the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import pagedmla
from pagedmla import BatchBounds, DecodePlan, DecodeProblem
from pagedmla.conformance import numerics
from pagedmla.paging.kv_cache import append
from pagedmla.paging.metadata import DecodeMetadata

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RANK, ROPE, HEADS, PAGE, WIDTH = 512, 64, 16, 64, 5
SCALE = 0.07


def i32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@contextmanager
def no_sync() -> Iterator[None]:
    """Any wait for the device in here is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_batch(
    lengths: list[int], seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, kv_cache, block_table, seq_lens) on the card, NaN wherever nobody owns a token."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.full((8 * WIDTH + 3, PAGE, RANK + ROPE), torch.nan)
    table = torch.randperm(8 * WIDTH, generator=generator, dtype=torch.int32).view(8, WIDTH)
    for row, length in enumerate(lengths):
        for column in range(-(-length // PAGE)):
            here = min(PAGE, length - column * PAGE)
            cache[table[row, column], :here] = torch.randn(here, RANK + ROPE, generator=generator)
        table[row, -(-length // PAGE) :] = 2**31 - 1
    q = torch.randn(8, HEADS, RANK + ROPE, generator=generator)
    return tuple(
        t.cuda() for t in (q.bfloat16(), cache.bfloat16(), table, torch.tensor(lengths, dtype=torch.int32))
    )


def check(out: torch.Tensor, lse: torch.Tensor, q, cache, table, lengths) -> None:  # type: ignore[no-untyped-def]
    """Within the derived bound of the oracle, for a kernel that rounds softmax weights to the cache's dtype."""
    rows = lengths.shape[0]
    expected = numerics.expect(
        q[:rows].cpu(),
        cache.cpu(),
        table[:rows].cpu(),
        lengths.cpu(),
        softmax_scale=SCALE,
        out_dtype=torch.bfloat16,
        p_dtype=torch.bfloat16,
    )
    comparison = numerics.compare(out[:rows].cpu(), lse[:rows].cpu(), expected)
    assert comparison.passed, comparison.detail


@pytest.mark.parametrize("kernel_page_size", [1, 16, 64])
def test_a_metadata_step_neither_waits_nor_allocates(kernel_page_size: int) -> None:
    metadata = DecodeMetadata(BatchBounds(8, WIDTH), 64, kernel_page_size=kernel_page_size, device="cuda")
    lengths = [127, 0, 131, 320]
    table = torch.randperm(4 * WIDTH, dtype=torch.int32).view(4, WIDTH).cuda()
    seq_lens, starts = i32(lengths), i32([0, 1, 1, 4, 5])
    metadata.update(table, seq_lens, starts)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_sync():
        for _ in range(10):
            metadata.update(table, seq_lens, starts)
            metadata.update(table, seq_lens)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    on_cpu = DecodeMetadata(BatchBounds(8, WIDTH), 64, kernel_page_size=kernel_page_size)
    on_cpu.update(table.cpu(), seq_lens.cpu())
    for name in ("kv_indptr", "kv_last_page_len", "seq_lens", "cu_seqlens_q"):
        assert torch.equal(getattr(metadata, name).cpu(), getattr(on_cpu, name)), name
    used = int(on_cpu.kv_indptr[-1])
    assert torch.equal(metadata.kv_indices[:used].cpu(), on_cpu.kv_indices[:used])


def test_appending_tokens_does_not_wait() -> None:
    cache = torch.full((4, 16, RANK + ROPE), torch.nan, device="cuda", dtype=torch.bfloat16)
    latent, k_pe = torch.randn(3, RANK, device="cuda"), torch.randn(3, ROPE, device="cuda")
    slots = torch.tensor([5, -1, 63], device="cuda")
    append(cache, latent, k_pe, slots)
    cache.fill_(torch.nan)
    with no_sync():
        append(cache, latent, k_pe, slots)
    expected = torch.cat([latent, k_pe], -1).bfloat16()
    assert torch.equal(cache[0, 5], expected[0])
    assert torch.equal(cache[3, 15], expected[2])
    assert int(torch.isfinite(cache).all(-1).sum()) == 2


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_decode_does_not_wait(batch_invariant: bool) -> None:
    given = make_batch([127, 0, 131, 1, 64, 65, 320, 63], seed=0)
    out, lse = (
        torch.full((8, HEADS, RANK), torch.nan).bfloat16().cuda(),
        torch.full((8, HEADS), torch.nan).cuda(),
    )
    options = {"softmax_scale": SCALE, "out": out, "lse": lse, "batch_invariant": batch_invariant}
    pagedmla.decode(*given, **options)
    with no_sync():
        pagedmla.decode(*given, **options)
    check(out, lse, *given)


def test_a_captured_plan_replays_right_for_every_later_length() -> None:
    problem = DecodeProblem(HEADS, SCALE, RANK, ROPE, PAGE)
    plan = DecodePlan(problem, BatchBounds(max_num_seqs=8, max_pages_per_seq=WIDTH), "cuda")
    q, cache, table, lengths = make_batch([1] * 8, seed=1)
    out, lse = torch.empty(8, HEADS, RANK, device="cuda").bfloat16(), torch.empty(8, HEADS, device="cuda")
    plan.update(table, lengths)
    plan.run(q, cache, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(q, cache, out=out, lse=lse)
    capacity = WIDTH * PAGE
    for seed, now in enumerate([[0] * 8, [capacity] * 8, [127, 0, 131, 1], [64, 65, 63, 0, 320], []]):
        fresh = make_batch(now, seed)
        q.copy_(fresh[0])
        cache.copy_(fresh[1])
        if now:
            plan.update(fresh[2][: len(now)], fresh[3])
        else:
            plan.update(torch.empty(0, WIDTH, dtype=torch.int32, device="cuda"), i32([]))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        plan.workspace.fill_(0xFF)
        graph.replay()
        check(out, lse, q, cache, fresh[2], fresh[3])
        assert (out[len(now) :] == 0).all()
        assert (lse[len(now) :] == -torch.inf).all()


def test_the_device_is_the_tensors_device_whatever_is_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    given = [t.to("cuda:1") for t in make_batch([127, 0, 131, 1], seed=3)]
    with torch.cuda.device(0):
        out, lse = pagedmla.decode(given[0][:4], given[1], given[2][:4], given[3], softmax_scale=SCALE)
    assert out.device == torch.device("cuda:1")
    check(out, lse, *given)


def test_tensors_on_two_devices_are_refused() -> None:
    q, cache, table, lengths = make_batch([5] * 8, seed=4)
    with pytest.raises(pagedmla.InvalidArgument) as caught:
        pagedmla.decode(q, cache, table.cpu(), lengths, softmax_scale=SCALE)
    assert caught.value.argument == "block_table"
    with pytest.raises(pagedmla.InvalidArgument):
        DecodePlan(DecodeProblem(HEADS, SCALE), BatchBounds(1, 1), "cuda:64")
