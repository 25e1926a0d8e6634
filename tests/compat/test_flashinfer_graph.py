"""FlashInfer's wrapper with ``use_cuda_graph``: buffers of fixed addresses, replays that stay right, and plans that cannot."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import check
from compat.flashinfer_calls import NATURAL, NO_WORKSPACE, call_of, csr, inputs, record_decodes, statics
from torch import Tensor

import pagedmla
from pagedmla.compat.flashinfer import BatchMLAPagedAttentionWrapper, wrapper
from pagedmla.contract.errors import InvalidArgument, PlanMismatch, Unsupported

NUM_SEQS, NUM_PAGES = 4, 60


def for_graphs() -> tuple[BatchMLAPagedAttentionWrapper, dict[str, Tensor]]:
    """A wrapper for graphs, and its reserved buffers, full of rubbish."""
    sizes = {
        "qo_indptr": NUM_SEQS + 1,
        "kv_indptr": NUM_SEQS + 1,
        "kv_indices": NUM_PAGES,
        "kv_len_arr": NUM_SEQS,
    }
    buffers = {name: torch.full((size,), -7, dtype=torch.int32) for name, size in sizes.items()}
    return BatchMLAPagedAttentionWrapper(NO_WORKSPACE, True, **buffers), buffers


STEPS = [
    ([16, 17, 40, 1], [2, 2, 2, 2]),
    ([131, 3, 16, 200], [1, 3, 0, 3]),
    ([0, 0, 0, 0], [2, 2, 2, 2]),
    ([15, 32, 0, 520], [3, 3, 1, 1]),
    ([1, 0, 127, 33], [0, 1, 0, 1]),
]


def test_a_captured_run_is_right_for_every_later_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's replay is the captured call on the captured addresses: here its arguments, called again."""
    decodes = record_decodes(monkeypatch)
    made, buffers = for_graphs()
    first = call_of([9, 9, 9, 9], [3, 3, 3, 3], layout={"spare_pages": 60})
    pool, queries = first["kv_cache"], first["q"]
    made.plan(**csr(first), **statics(first))
    out, lse = torch.full((12, 4, 32), math.nan, dtype=torch.bfloat16), torch.full((12, 4), math.nan)
    made.run(**inputs(first), out=out, lse=lse, return_lse_base_on_e=True)
    tensors, options = decodes[-1]
    for step, (lens, q_lens) in enumerate(STEPS):
        call = call_of(lens, q_lens, seed=step, layout={"layout_seed": step})
        rows = sum(q_lens)
        pool[: call["kv_cache"].shape[0]] = call["kv_cache"]
        queries[:rows], queries[rows:] = call["q"], math.nan
        made.plan(**csr(call, over=step % 3), **statics(call))
        options["workspace"].fill_(0xFF)
        pagedmla.decode(*tensors, **options)
        check((out[:rows], lse[:rows]), call)
        assert bool((out[rows:] == 0).all())
        assert bool((lse[rows:] == -math.inf).all())
        for name, tensor in csr(call, over=step % 3).items():
            assert torch.equal(buffers[name][: len(tensor)], tensor), name
    made.run(**inputs(first))
    later, later_options = decodes[-1]
    assert [part.data_ptr() for part in later[1:]] == [part.data_ptr() for part in tensors[1:]]
    for name in ("cu_seqlens_q", "workspace"):
        assert later_options[name].data_ptr() == options[name].data_ptr()


def test_a_sequence_may_have_all_pages_of_the_graph_s_buffer() -> None:
    made, _ = for_graphs()
    call = call_of([0, NUM_PAGES * 16, 0, 0])
    made.plan(**csr(call), **statics(call))
    check(made.run(**inputs(call), **NATURAL), call)


def test_a_graph_s_table_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many indices for many sequences each may have its share, not all: a table of both would not fit a card."""
    monkeypatch.setattr(wrapper, "_ROOMY_TABLE_CELLS", 80)
    made, _ = for_graphs()
    call = call_of([20 * 16, 1, 1, 1])
    made.plan(**csr(call), **statics(call))
    check(made.run(**inputs(call), **NATURAL), call)
    longer = call_of([20 * 16 + 1, 1, 1, 1])
    with pytest.raises(PlanMismatch) as raised:
        made.plan(**csr(longer), **statics(longer))
    assert raised.value.argument == "kv_indptr"


@pytest.mark.parametrize(
    ("lens", "q_lens", "changed", "argument"),
    [
        ([5, 5, 5], [1, 1, 1], {}, "qo_indptr"),
        ([5, 5, 5, 5, 5], [1] * 5, {}, "qo_indptr"),
        ([500, 500, 1, 1], [1] * 4, {}, "kv_indices"),
        ([5, 5, 5, 5], [1, 3, 1, 1], {}, "qo_indptr"),
        ([5, 5, 5, 5], [1] * 4, {"num_heads": 5}, "num_heads"),
        ([5, 5, 5, 5], [1] * 4, {"sm_scale": 0.5}, "sm_scale"),
        ([5, 5, 5, 5], [1] * 4, {"causal": False}, "causal"),
        ([5, 5, 5, 5], [1] * 4, {"page_size": 32}, "page_size"),
        ([5, 5, 5, 5], [1] * 4, {"head_dim_ckv": 30}, "head_dim_ckv"),
        ([5, 5, 5, 5], [1] * 4, {"head_dim_kpe": 10}, "head_dim_kpe"),
        ([5, 5, 5, 5], [1] * 4, {"q_data_type": torch.float16, "kv_data_type": torch.float16}, "q_data_type"),
        ([5, 5, 5, 5], [1] * 4, {"kv_data_type": torch.float8_e4m3fn}, "kv_data_type"),
    ],
)
def test_a_graph_is_never_replayed_for_something_else(
    lens: list[int], q_lens: list[int], changed: dict[str, Any], argument: str
) -> None:
    """The plan is refused and changes nothing, so that what stands there stays right."""
    made, buffers = for_graphs()
    call = call_of([40, 0, 17, 1], [2, 1, 2, 1])
    made.plan(**csr(call), **statics(call))
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    other = call_of(lens, q_lens)
    with pytest.raises(PlanMismatch) as raised:
        made.plan(**csr(other), **statics(other) | changed)
    assert raised.value.argument == argument
    assert all(torch.equal(buffers[name], before[name]) for name in buffers)
    check(made.run(**inputs(call), **NATURAL), call)


def test_a_graph_cannot_pack() -> None:
    made, _ = for_graphs()
    call = call_of([40, 0, 17, 1])
    made.plan(**csr(call), **statics(call))
    with pytest.raises(Unsupported) as raised:
        made.run(**inputs(call, apart=True))
    assert raised.value.argument == "kpe_cache"
    assert raised.value.code == "two_caches"


def test_a_pinned_batch_is_copied_before_plan_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wait the device would read it later, when the caller may have written the next step there."""
    made, buffers = for_graphs()
    call = call_of([40, 0, 17, 1])
    copies, copy = [], Tensor.copy_

    def record(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copies.append((target.data_ptr(), non_blocking))
        return copy(target, source, non_blocking)

    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(Tensor, "copy_", record)
    made.plan(**csr(call), **statics(call))
    assert {(buffer.data_ptr(), False) for buffer in buffers.values()} <= set(copies)


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"])
@pytest.mark.parametrize(
    "value",
    [
        None,
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(5, 1, dtype=torch.int32),
        torch.zeros(5, device="meta").int(),
    ],
    ids=["none", "int64", "rank", "device"],
)
def test_buffers_for_graphs_are_looked_at(name: str, value: Tensor | None) -> None:
    buffers = for_graphs()[1] | {name: value}
    with pytest.raises(InvalidArgument) as raised:
        BatchMLAPagedAttentionWrapper(NO_WORKSPACE, True, **buffers)
    assert raised.value.argument == name
