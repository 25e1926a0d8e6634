"""A step over the engine's own tables: what the host says of it, and that nothing is done for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import arguments, check, make_batch, same_bits
from hypothesis import given
from hypothesis import strategies as st
from integrations.vllm.runner import Runner, layer_queries
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagedmla.contract.errors import PlanMismatch, Unsupported
from pagedmla.contract.kv_layout import layout_of_dtype
from pagedmla.contract.problem import BatchBounds, DecodeProblem
from pagedmla.integrations.vllm.capacity import step_bounds
from pagedmla.integrations.vllm.step import DecodeStep, StepBuffers, query_lengths


@pytest.mark.parametrize(
    ("starts", "num_tokens", "expected"),
    [
        ([0, 1, 2, 3], 3, (1, True)),
        ([0, 4, 8], 8, (4, True)),
        # padded for a graph: rows of nobody at the end
        ([0, 1, 2, 2, 2], 4, (1, True)),
        ([0, 4, 4], 8, (4, True)),
        # rows are missing, or too many
        ([0, 4, 4], 4, (4, False)),
        ([0, 1, 2], 4, (1, False)),
        # ragged, also by one that has none in the middle
        ([0, 1, 4], 4, (3, False)),
        ([0, 2, 2, 4], 6, (2, False)),
        ([0, 3, 4], 6, (3, False)),
        # nobody has any; no sequence at all
        ([0, 0, 0], 2, (1, True)),
        ([0], 0, (1, True)),
        # what a dummy run left behind
        ([0, 4, 2, 1], 8, (4, False)),
    ],
)
def test_what_the_host_says_of_query_tokens(
    starts: list[int], num_tokens: int, expected: tuple[int, bool]
) -> None:
    assert query_lengths(starts, num_tokens) == expected


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 8))
def test_even_is_said_only_where_the_rows_are_the_same_ones(lengths: list[int], padding: int) -> None:
    starts = [sum(lengths[:end]) for end in range(len(lengths) + 1)]
    num_tokens = starts[-1] + padding
    most, even = query_lengths(starts, num_tokens)
    assert most == max(1, *lengths)
    if even:
        # the kernels then give row t to sequence t // most
        owners = [owner for owner, length in enumerate(lengths) for _ in range(length)]
        assert owners == [row // most for row in range(starts[-1])]
        assert num_tokens == most * len(lengths)


def _buffers(call: dict[str, Any], max_num_seqs: int, max_q_len: int, page_size: int) -> StepBuffers:
    problem = DecodeProblem(
        num_heads=call["q"].shape[1],
        softmax_scale=1.0,
        kv_lora_rank=call["kv_lora_rank"],
        qk_rope_head_dim=call["q"].shape[2] - call["kv_lora_rank"],
        page_size=page_size,
        q_dtype=call["q"].dtype,
        kv_layout=layout_of_dtype(call["kv_cache"].dtype).name,
        max_q_len=max_q_len,
    )
    bounds = step_bounds(
        max_num_seqs=max_num_seqs,
        max_q_len=max_q_len,
        max_model_len=256,
        page_size=page_size,
        block_size=page_size,
    )
    return StepBuffers(problem, bounds)


def _step(buffers: StepBuffers, runner: Runner, num_reqs: int, num_tokens: int) -> DecodeStep:
    return buffers.step(
        runner.block_table[:num_reqs],
        runner.seq_lens[:num_reqs],
        runner.query_starts[: num_reqs + 1],
        runner.query_starts_on_host[: num_reqs + 1],
        num_tokens,
    )


def _attend(
    seq_lens: Sequence[int],
    q_lens: Sequence[int],
    page_size: int,
    num_reqs: int,
    num_tokens: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Runs a step and holds it against the oracle; returns (out, lse) with the rows of padding."""
    batch = make_batch(seq_lens, q_lens, num_heads=3, **options)
    call = arguments(batch, page_size)
    runner = Runner(num_reqs, 270 // page_size + 1)
    runner.write(call, q_lens, num_reqs)
    buffers = _buffers(call, num_reqs, max(1, *q_lens), page_size)
    for memory in (buffers.out, buffers.lse):
        memory.fill_(torch.nan)
    step = _step(buffers, runner, num_reqs, num_tokens)
    q = layer_queries(call["q"], num_tokens, batch.kv_lora_rank)
    out, lse = step.attend(q, call["kv_cache"], batch.softmax_scale)
    tokens = sum(q_lens)
    check((out[:tokens], lse[:tokens]), call)
    return out[tokens:], lse[tokens:]


CASES = {
    "one token each": ((65, 1, 0, 127), (1, 1, 1, 1), 4, 4),
    "padded graph": ((65, 131, 16), (1, 1, 1), 8, 8),
    "drafts": ((65, 4, 131), (4, 4, 4), 3, 12),
    "drafts, padded graph": ((65, 131), (4, 4), 4, 16),
    "ragged drafts": ((65, 131, 3, 64), (1, 4, 2, 3), 4, 10),
    "ragged, rows of nobody": ((65, 131, 3), (1, 4, 2), 4, 11),
    "more queries than keys": ((2, 1), (4, 4), 2, 8),
}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dims", [(512, 64), (256, 64)], ids=["576", "320"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", list(CASES))
def test_values(case: str, dtype: torch.dtype, dims: tuple[int, int], page_size: int) -> None:
    seq_lens, q_lens, num_reqs, num_tokens = CASES[case]
    out, lse = _attend(seq_lens, q_lens, page_size, num_reqs, num_tokens, dims=dims, q_dtype=dtype)
    # rows that nobody owns; what q holds there, and what the buffers held, is NaN
    assert out.shape[0] == num_tokens - sum(q_lens)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


def test_queries_of_all_ranks_come_as_one_tensor_with_other_heads() -> None:
    batch = make_batch((65, 0, 7), num_heads=6, dims=(512, 64))
    call = arguments(batch, 16)
    runner = Runner(3, 20)
    runner.write(call, (1, 1, 1), 3)
    out, lse = _step(_buffers(call, 3, 1, 16), runner, 3, 3).attend(
        call["q"], call["kv_cache"], batch.softmax_scale
    )
    check((out, lse), call)
    # a rank that holds no key: nothing, and no NaN for vLLM's merge to multiply by 0
    assert bool((out[1] == 0).all())
    assert bool((lse[1] == -torch.inf).all())


def test_a_step_stays_right_when_the_engine_writes_its_buffers_again() -> None:
    """As a captured graph is replayed: the same tensors, other numbers, fewer requests, longer and shorter ones."""
    runner, width = Runner(4, 20), 20
    first = arguments(make_batch((3, 4, 5, 6), num_heads=2, dims=(512, 64)), 16)
    buffers = _buffers(first, 4, 1, 16)
    runner.write(first, (1, 1, 1, 1), 4)
    step = _step(buffers, runner, 4, 4)
    for seed, seq_lens in enumerate([(3, 4, 5, 6), (131, 1, 64), (200,), (0, 17, 127, 65)]):
        batch = make_batch(seq_lens, num_heads=2, dims=(512, 64), seed=seed)
        call = arguments(batch, 16, layout_seed=seed)
        assert call["block_table"].shape[1] <= width
        runner.write(call, (1,) * len(seq_lens), 4)
        q = layer_queries(call["q"], 4, 512)
        out, lse = step.attend(q, call["kv_cache"], batch.softmax_scale)
        count = len(seq_lens)
        check((out[:count], lse[:count]), call)
        assert bool((out[count:] == 0).all())
        assert bool((lse[count:] == -torch.inf).all())


class _Operations(TorchDispatchMode):
    """Notes down every operation that comes to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("q_lens", [(1, 1), (4, 4), (1, 4)])
def test_a_step_launches_copies_and_allocates_nothing(q_lens: tuple[int, int]) -> None:
    call = arguments(make_batch((65, 131), q_lens, num_heads=2, dims=(512, 64)), 16)
    runner = Runner(4, 20)
    runner.write(call, q_lens, 2)
    buffers = _buffers(call, 4, 4, 16)
    with _Operations() as operations:
        step = buffers.step(
            runner.block_table[:2],
            runner.seq_lens[:2],
            runner.query_starts[:3],
            runner.query_starts_on_host[:3],
            sum(q_lens),
        )
    # views; the number of a cell is read of the host's starts alone, which the next test shows
    assert operations.names <= {"slice", "select", "_local_scalar_dense"}
    assert step.block_table.data_ptr() == runner.block_table.data_ptr()
    assert step.seq_lens.data_ptr() == runner.seq_lens.data_ptr()
    assert step.out.data_ptr() == buffers.out.data_ptr()
    assert step.lse.data_ptr() == buffers.lse.data_ptr()
    if q_lens == (1, 4):
        assert step.cu_seqlens_q is not None
        assert step.cu_seqlens_q.data_ptr() == runner.query_starts.data_ptr()
    else:
        assert step.cu_seqlens_q is None


def test_no_number_of_the_device_is_read() -> None:
    call = arguments(make_batch((65, 131), num_heads=2, dims=(512, 64)), 16)
    # a meta tensor has no numbers: whoever asks for one gets an error
    table, lengths, starts = (
        torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((2, 20), (2,), (3,))
    )
    step = _buffers(call, 4, 4, 16).step(table, lengths, starts, torch.tensor([0, 1, 4]), 4)
    assert step.block_table is table
    assert step.cu_seqlens_q is starts
    assert step.max_q_len == 3


def test_layers_write_the_same_memory_and_steps_too() -> None:
    call = arguments(make_batch((65, 131), num_heads=2, dims=(512, 64)), 16)
    runner = Runner(4, 20)
    runner.write(call, (1, 1), 2)
    buffers = _buffers(call, 4, 1, 16)
    results = [
        _step(buffers, runner, 2, 2).attend(call["q"], call["kv_cache"], scale) for scale in (0.13, 0.013)
    ]
    assert len({out.data_ptr() for out, _ in results}) == 1
    # the first result is the second's by now: both layers' scores differ, and the memory holds the last
    assert same_bits(results[0], results[1])
    check(results[1], call | {"softmax_scale": 0.013})


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_a_layer_hands_to_the_decode(monkeypatch: pytest.MonkeyPatch, batch_invariant: bool) -> None:
    """Promises that change no value, only which kernel runs; and that nothing is joined or copied on the way."""
    call = arguments(make_batch((65, 131), (1, 4), num_heads=2, dims=(512, 64)), 16)
    runner = Runner(4, 20)
    runner.write(call, (1, 4), 2)
    made = _buffers(call, 4, 4, 16)
    buffers = StepBuffers(replace(made.problem, batch_invariant=batch_invariant), made.bounds)
    step = _step(buffers, runner, 2, 5)
    q = layer_queries(call["q"], 5, 512)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        "pagedmla.integrations.vllm.step.decode", lambda *args, **kwargs: seen.append((args, kwargs))
    )
    step.attend(q, call["kv_cache"], 0.13)
    ((args, kwargs),) = seen
    assert args[0] is q
    assert args[1] is call["kv_cache"]
    assert args[2].data_ptr() == runner.block_table.data_ptr()
    assert args[3].data_ptr() == runner.seq_lens.data_ptr()
    assert kwargs["workspace"] is buffers.workspace
    assert kwargs["out"].data_ptr() == buffers.out.data_ptr()
    assert kwargs["lse"].data_ptr() == buffers.lse.data_ptr()
    assert (kwargs["max_q_len"], kwargs["batch_invariant"]) == (4, batch_invariant)


def test_capacities_and_shapes_are_held() -> None:
    call = arguments(make_batch((65, 131), num_heads=2, dims=(512, 64)), 16)
    runner = Runner(8, 20)
    runner.write(call, (1, 1), 2)
    buffers = _buffers(call, 4, 1, 16)
    with pytest.raises(PlanMismatch, match="seq_lens: wanted at most 4 sequences, got 5"):
        _step(buffers, runner, 5, 2)
    with pytest.raises(PlanMismatch, match="q: wanted at most 4 query tokens, got 6"):
        _step(buffers, runner, 2, 6)
    step = _step(buffers, runner, 2, 2)
    with pytest.raises(PlanMismatch, match=r"as the step, got \[2, 1\]"):
        step.attend(call["q"][:, :1], call["kv_cache"], 0.13)


def test_buffers_for_a_problem_that_no_kernel_takes() -> None:
    problem = DecodeProblem(num_heads=2, softmax_scale=1.0, q_dtype=torch.bfloat16, kv_layout="fp16")
    with pytest.raises(Unsupported, match="dtype_pair"):
        StepBuffers(problem, BatchBounds(2, 2))


@pytest.mark.parametrize("max_model_len", [1, 255, 256, 4096, 163840])
@pytest.mark.parametrize(("block_size", "page_size"), [(1, 1), (16, 16), (64, 64), (128, 64), (544, 16)])
@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_bounds_hold_what_vllms_table_can_name(
    max_model_len: int, block_size: int, page_size: int, num_shards: int
) -> None:
    bounds = step_bounds(
        max_num_seqs=7,
        max_q_len=4,
        max_model_len=max_model_len,
        page_size=page_size,
        block_size=block_size,
        num_shards=num_shards,
    )
    # v1/worker/gpu_model_runner.py:6594, then v1/worker/block_table.py:263 and 68
    blocks = -(-max_model_len // (block_size * num_shards))
    if block_size <= 128:
        together = 128 // block_size
        blocks = -(-blocks // together) * together
    assert bounds.max_pages_per_seq >= blocks * (block_size // page_size)
    assert (bounds.max_num_seqs, bounds.max_num_tokens) == (7, 28)
