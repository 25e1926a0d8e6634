"""Real processes: groups of 2 and 4 under gloo.  One start of processes for each size; see group_worker for what they run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import Batch, same_bits
from distributed import group_worker
from distributed.group_worker import DIFFERENT, PATIENCE, batch_of, heads_of, values
from distributed.shards import OWNERS, difference
from torch import Tensor

Found = list[dict[str, Any]]
"""What each rank found, by the scenario's name."""


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder: Path = tmp_path_factory.mktemp("group")
    # both kinds of stores that a group may have been made with
    return group_worker.spawn(request.param, folder, tcp=request.param == 4)


def of_heads(batch: Batch, heads: slice) -> Batch:
    return replace(batch, queries=tuple(rows[:, heads] for rows in batch.queries))


def check(results: list[tuple[Tensor, Tensor]], batch: Batch, layout: str, heads: str) -> None:
    num_ranks, owner = len(results), OWNERS[layout][1]
    if heads == "replicated":
        assert all(same_bits(results[0], other) for other in results[1:])
        assert difference(results[0], batch, owner, num_ranks) == ""
        return
    for rank, result in enumerate(results):
        assert difference(result, of_heads(batch, heads_of(rank, num_ranks)), owner, num_ranks) == ""


@pytest.mark.parametrize(("layout", "heads", "dtype"), values())
def test_every_rank_has_what_one_pass_over_all_keys_gives(
    found: Found, layout: str, heads: str, dtype: str
) -> None:
    results = [rank[f"{layout} {heads} {dtype}"] for rank in found]
    check(results, batch_of(dtype), layout, heads)


@pytest.mark.parametrize("name", ["check True", "check False", "given"])
def test_the_same_with_other_options(found: Found, name: str) -> None:
    check([rank[name] for rank in found], batch_of("float32"), "round_robin", "replicated")


def test_a_query_in_two_parts_with_sharded_heads(found: Found) -> None:
    check([rank["pair"] for rank in found], batch_of("float32"), "round_robin", "sharded")


def test_a_step_without_query_tokens(found: Found) -> None:
    assert [rank["no tokens"] for rank in found] == [[0, 4, 32]] * len(found)


def test_checks_leave_no_trail_in_the_store(found: Found) -> None:
    for rank in found:
        assert len(set(rank["keys"])) == 1


AT_FAULT = {
    "heads": (
        "q",
        "[23, 4, 40] torch.float32 on cpu on {others}; [23, 3, 40] torch.float32 on cpu on rank 1",
    ),
    "tokens": (
        "q",
        "[23, 4, 40] torch.float32 on cpu on {others}; [22, 4, 40] torch.float32 on cpu on rank 1",
    ),
    "dtype": (
        "q",
        "[23, 4, 40] torch.float32 on cpu on {others}; [23, 4, 40] torch.float16 on cpu on rank 1",
    ),
    "width": (
        "q",
        "[23, 4, 40] torch.float32 on cpu on {others}; [23, 4, 36] torch.float32 on cpu on rank 1",
    ),
    "sequences": ("seq_lens", "8 sequences on {others}; 7 sequences on rank 1"),
    "scale": ("softmax_scale", "0.13 on {others}; 0.25 on rank 1"),
    "causal": ("causal", "True on {others}; False on rank 1"),
    "sharding": ("sharding", "interleaved(1) on {others}; interleaved(2) on rank 1"),
}
"""(argument, what the error says was got) where rank 1 differs."""


@pytest.mark.parametrize("name", AT_FAULT)
def test_a_rank_that_differs_is_named_on_all_ranks(found: Found, name: str) -> None:
    argument, got = AT_FAULT[name]
    others = {2: "rank 0", 4: "ranks 0, 2, 3"}[len(found)]
    for rank in found:
        answer = rank[name]
        assert (answer["type"], answer["code"]) == ("InvalidArgument", "ranks_differ")
        assert (answer["argument"], answer["got"]) == (argument, got.format(others=others))
        assert answer["seconds"] < 10


@pytest.mark.parametrize(
    ("name", "argument"), [("refused", "kv_cache"), ("not a tensor", "seq_lens"), ("backend", "backend")]
)
def test_a_rank_that_refuses_its_arguments_says_so_and_the_others_name_it(
    found: Found, name: str, argument: str
) -> None:
    assert found[1][name]["argument"] == argument
    for number, rank in enumerate(found):
        assert rank[name]["type"] == "InvalidArgument"
        assert rank[name]["seconds"] < 10
        if number != 1:
            assert rank[name]["code"] == "rank_refused"
            assert rank[name]["got"] == f"rank 1: {found[1][name]['text']}"


@pytest.mark.parametrize("name", DIFFERENT)
def test_after_such_an_error_the_object_still_works(found: Found, name: str) -> None:
    assert all(rank[name]["usable"] for rank in found)


def test_a_rank_that_does_not_come_is_named_within_the_time_limit(found: Found) -> None:
    last = len(found) - 1
    for rank in found[:last]:
        answer = rank["absent"]
        assert (answer["type"], answer["code"], answer["argument"]) == (
            "InvalidArgument", "rank_absent", "group",
        )  # fmt: skip
        assert f"nothing from rank {last}:" in answer["text"]
        assert PATIENCE * 0.5 < answer["seconds"] < PATIENCE + 10


def test_a_group_of_some_ranks(found: Found) -> None:
    if len(found) != 4:
        pytest.skip("four ranks are needed")
    check([found[1]["subgroup"], found[3]["subgroup"]], batch_of("float32"), "round_robin", "replicated")
    for rank in (0, 2):
        assert found[rank]["subgroup"]["argument"] == "group"
        assert found[rank]["subgroup"]["type"] == "InvalidArgument"


def test_results_are_tensors_of_the_queries_dtype(found: Found) -> None:
    out, lse = found[0]["round_robin replicated bfloat16"]
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
