"""On cards: virtual ranks of a model's size on one, a group of two under NCCL.  Without two, its worker runs on CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import make_batch, same_bits
from distributed import card_worker
from distributed.card_worker import CALLS, GROWN, LENS, batch_of
from distributed.shards import OWNERS, difference, virtual

CARDS = torch.cuda.device_count() if torch.cuda.is_available() else 0
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return card_worker.spawn(2, tmp_path_factory.mktemp("cards"), "cuda" if CARDS >= 2 else "cpu")


@pytest.mark.parametrize(("layout", "heads"), CALLS)
def test_two_ranks_are_one_pass(found: Found, layout: str, heads: str) -> None:
    results, batch, owner = [rank[f"{layout} {heads}"] for rank in found], batch_of(LENS), OWNERS[layout][1]
    if heads == "replicated":
        assert same_bits(*results)
        assert difference(results[0], batch, owner, 2, torch.bfloat16) == ""
        return
    for rank, result in enumerate(results):
        mine = replace(batch, queries=tuple(rows.chunk(2, dim=1)[rank] for rows in batch.queries))
        assert difference(result, mine, owner, 2, torch.bfloat16) == ""


def test_a_rank_that_differs_is_named(found: Found) -> None:
    for rank in found:
        assert (rank["differs"]["code"], rank["differs"]["argument"]) == ("ranks_differ", "q")
        assert rank["differs"]["got"].endswith("on rank 1")
        assert rank["differs"]["seconds"] < 20


@pytest.mark.skipif(CARDS < 2, reason="needs two CUDA devices")
def test_a_captured_graph_is_right_for_other_lengths(found: Found) -> None:
    results = [rank["graph"] for rank in found]
    assert same_bits(*results)
    owner = OWNERS["round_robin"][1]
    assert difference(results[0], batch_of(GROWN), owner, 2, torch.bfloat16) == ""


@pytest.mark.skipif(CARDS < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("layout", OWNERS)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_virtual_ranks_of_a_models_size(layout: str, num_ranks: int) -> None:
    batch = make_batch(
        [0, 1, 127, 131, 2000, 64], [1, 2, 3, 4, 2, 1], num_heads=16, dims=(512, 64), q_dtype=torch.bfloat16
    )
    result = virtual(batch, layout, num_ranks, 64, device="cuda", backend=None)
    assert difference(result, batch, OWNERS[layout][1], num_ranks, torch.bfloat16) == ""
