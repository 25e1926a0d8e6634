"""Memory that outlives a call: pages read where they lie, and the intermediates that a thread keeps for its next call."""

from __future__ import annotations

import threading

import pytest
import torch

import pagedmla
from pagedmla.conformance import numerics
from pagedmla.kernels.torch import scratch
from pagedmla.kernels.torch.pages import PageReader

RANK, ROPE, HEADS, SCALE = 64, 16, 5, 0.11


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def call(cache: torch.Tensor, table: list[list[int]], lengths: list[int], q_len: int = 1, **options):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(len(lengths))
    q = torch.randn(len(lengths) * q_len, HEADS, RANK + ROPE, generator=generator)
    given = {
        "q": q,
        "kv_cache": cache,
        "block_table": torch.tensor(table, dtype=torch.int32),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "softmax_scale": SCALE,
        "kv_lora_rank": RANK,
    }
    out, lse = pagedmla.decode(**given, **options)
    comparison = numerics.compare(
        out, lse, numerics.expect(**given, out_dtype=torch.float32, causal=options.get("causal", True))
    )
    assert comparison.passed, comparison
    return out, lse


def poisoned(num_pages: int, page_size: int, owned: list[tuple[int, int]]) -> torch.Tensor:
    """A cache that is NaN except in the first ``count`` tokens of each (page, count)."""
    cache = torch.full((num_pages, page_size, RANK + ROPE), torch.nan)
    generator = torch.Generator().manual_seed(7)
    for page, count in owned:
        cache[page, :count] = torch.randn(count, RANK + ROPE, generator=generator)
    return cache


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 131, 160])
@pytest.mark.parametrize("options", [{}, {"num_kv_splits": 3}, {"batch_invariant": True}, {"causal": False}])
def test_pages_in_a_row_are_read_in_place_and_left_as_they_are(length: int, options: dict) -> None:
    count = -(-length // 16)
    cache = poisoned(14, 16, [(3 + at, min(16, length - 16 * at)) for at in range(count)])
    before = bits(cache).clone()
    call(cache, [[3 + at for at in range(count)] + [2**31 - 1, -1]], [length], **options)
    assert torch.equal(bits(cache), before)


def test_several_query_tokens_over_pages_in_a_row() -> None:
    cache = poisoned(12, 16, [(at, 16) for at in range(8)] + [(8, 3)])
    before = bits(cache).clone()
    for q_len in (2, 5, 16):
        call(cache, [list(range(9))], [131], q_len)
    assert torch.equal(bits(cache), before)


@pytest.mark.parametrize(
    "table",
    [
        [4, 5, 7],  # a gap
        [5, 4, 3],  # backwards
        [4, 4, 5],  # a page twice
        [4, 5, -1],  # no page
        [4, 5, 14],  # past the pool
        [-1, 0, 1],  # starts before the pool
        [12, 13, 14],  # runs out of the pool
    ],
)
def test_pages_not_in_a_row_are_copied(table: list[int]) -> None:
    args = pagedmla.contract.arguments.DecodeArguments(
        q=torch.zeros(1, HEADS, RANK + ROPE),
        q_pe=None,
        kv_cache=torch.zeros(14, 16, RANK + ROPE),
        block_table=torch.tensor([table], dtype=torch.int32),
        seq_lens=torch.tensor([48], dtype=torch.int32),
        cu_seqlens_q=None,
        softmax_scale=SCALE,
        causal=True,
        kv_lora_rank=RANK,
    )
    assert PageReader(args).view(0, 0, 48) is None


def test_a_cache_with_gaps_between_pages_is_copied_and_right() -> None:
    pool = torch.full((9, 3, 16, RANK + ROPE), torch.nan)
    layer = pool[:, 1]
    layer.copy_(poisoned(9, 16, [(at, 16) for at in range(8)] + [(8, 3)]))
    before = bits(pool).clone()
    call(layer, [list(range(9))], [131])
    assert torch.equal(bits(pool), before)


def test_long_and_short_sequences_in_turn_share_the_threads_memory() -> None:
    cache = torch.randn(90, 64, RANK + ROPE, generator=torch.Generator().manual_seed(1))
    for lengths in ([4500, 3], [1, 2, 3], [5000], [64, 0, 65]):
        table = [[(7 * row + at) % 90 for at in range(80)] for row in range(len(lengths))]
        call(cache, table, lengths)


def test_what_a_thread_keeps_may_hold_anything() -> None:
    cache = torch.randn(12, 16, RANK + ROPE, generator=torch.Generator().manual_seed(2))
    table = [[3, 9, 1, 0], [5, 2, 11, 4]]
    first = call(cache, table, [61, 17])
    for place in scratch._kept.places:
        place.fill_(0xFF)
    again = call(cache, table, [61, 17])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))


def test_memory_kept_from_inference_mode_serves_calls_outside_it() -> None:
    cache = torch.randn(12, 16, RANK + ROPE, generator=torch.Generator().manual_seed(3))
    failures = []

    def in_a_fresh_thread() -> None:
        with torch.inference_mode():
            call(cache, [[3, 9, 1, 0]], [61])
        try:
            call(cache, [[3, 9, 1, 0]], [61])
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=in_a_fresh_thread)
    thread.start()
    thread.join()
    assert not failures
