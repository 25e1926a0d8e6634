"""A call that was made before: the same checks, and this call's addresses.

That real launches are right, tests/device/test_direct.py shows.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in_backend import (
    HEADS,
    PAGE,
    RANK,
    ROPE,
    TOKENS,
    WORKSPACE_BYTES,
    StandIn,
    addresses,
    decode,
    make_call,
)
from stand_in_backend import make_backend as make_backend
from torch import Tensor

from pagedmla import InvalidArgument, Unsupported
from pagedmla.contract.slots import OUT, SLOTS
from pagedmla.kernels.repeat import MEMO, Memo, identify


def test_a_repeated_call_is_launched_with_its_own_addresses(backend: StandIn) -> None:
    first = make_call()
    decode(first)
    assert (backend.decoded, backend.launched) == (1, [])
    calls = [make_call() for _ in range(3)]
    for call in [*calls, first]:
        out, lse = decode(call)
        assert out is call["out"]
        assert lse is call["lse"]
    assert backend.decoded == 1
    assert backend.launched == [addresses(call) for call in [*calls, first]]


@pytest.mark.parametrize(
    "left_out", [("out",), ("lse",), ("workspace",), ("out", "lse"), ("out", "lse", "workspace")]
)
def test_what_a_caller_leaves_out_is_made(backend: StandIn, left_out: tuple[str, ...]) -> None:
    call = make_call() | dict.fromkeys(left_out)
    decode(call)
    out, lse = decode(call)
    assert backend.decoded == 1
    assert (out.shape, out.dtype) == ((TOKENS, HEADS, RANK), torch.float32)
    assert (lse.shape, lse.dtype) == ((TOKENS, HEADS), torch.float32)
    made = addresses(call | {"out": out, "lse": lse})
    (bound,) = backend.launched
    assert bound[:-1] == made[:-1]
    assert bound[-1] != 0
    assert decode(call)[0] is not out or "out" not in left_out


def test_a_pair_and_the_operators_themselves(backend: StandIn) -> None:
    call = make_call()
    call["q"] = tuple(part.contiguous() for part in call["q"].split([RANK, ROPE], -1))
    decode(call)
    decode(call)
    given = (
        *call["q"], call["kv_cache"], call["block_table"], call["seq_lens"], call["cu_seqlens_q"], 0.1, True, RANK,
        None, None, None, None, None, None, None, False, call["workspace"], None, False,
    )  # fmt: skip
    torch.ops.pagedmla.decode_out(*given, call["out"], call["lse"])
    assert backend.decoded == 1
    assert backend.launched == [addresses(call)] * 2


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _moved(tensor: Tensor) -> Tensor:
    """The same numbers 4 bytes further."""
    room = torch.zeros(tensor.numel() * tensor.element_size() + 68, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + 4
    view = room[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
    return view.copy_(tensor)


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "shape": lambda c: {"kv_cache": torch.randn(8, PAGE, RANK + ROPE)},
    "stride of q": lambda c: {"q": _transposed(c["q"])},
    "stride of lse": lambda c: {"lse": _transposed(c["lse"])},
    "alignment of q": lambda c: {"q": _moved(c["q"])},
    "alignment of seq_lens": lambda c: {"seq_lens": _moved(c["seq_lens"])},
    "dtypes": lambda c: {
        name: c[name].half() for name in ("q", "kv_cache", "out")
    },
    "no cu_seqlens_q": lambda c: {"cu_seqlens_q": None},
    "pair": lambda c: {"q": tuple(part.contiguous() for part in c["q"].split([RANK, ROPE], -1))},
    "workspace": lambda c: {"workspace": torch.empty(WORKSPACE_BYTES + 1, dtype=torch.uint8)},
    "softmax_scale": lambda c: {"softmax_scale": 0.2},
    "causal": lambda c: {"causal": False},
    "backend": lambda c: {"backend": "torch"},
    "num_kv_splits": lambda c: {"num_kv_splits": 2},
    "batch_invariant": lambda c: {"batch_invariant": True},
    "max_q_len": lambda c: {"max_q_len": 1},
    "validate": lambda c: {"validate": True},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_goes_the_whole_way(backend: StandIn, change: str) -> None:
    call = make_call()
    decode(call)
    decode(call | CHANGES[change](call))
    assert (backend.decoded, backend.launched) == (2, [])


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    # all of these compare equal to what is right, or are as long
    "causal 1": lambda c: {"causal": 1},
    "batch_invariant 0": lambda c: {"batch_invariant": 0},
    "rank as a float": lambda c: {"kv_lora_rank": float(RANK)},
    "splits True": lambda c: {"num_kv_splits": True},
    "validate 0": lambda c: {"validate": 0},
    "backend in a list": lambda c: {"backend": ["torch"]},
    "seq_lens": lambda c: {"seq_lens": c["seq_lens"].long()},
    "seq_lens on another device": lambda c: {"seq_lens": c["seq_lens"].to("meta")},
    "out": lambda c: {"out": c["out"].double()},
    "out on q": lambda c: {"out": c["q"][..., :RANK]},
    "out a number into q": lambda c: {"out": c["q"].view(-1)[4 : 4 + c["out"].numel()].view(c["out"].shape)},
    "lse on seq_lens' memory": lambda c: _sharing("seq_lens", "lse", c),
    "workspace on out": lambda c: {"workspace": c["out"].view(torch.uint8).view(-1)[:WORKSPACE_BYTES]},
    "out on itself": lambda c: {"out": c["out"][:1].expand(TOKENS, HEADS, RANK)},
}


def _sharing(read: str, written: str, call: dict[str, Any]) -> dict[str, Any]:
    """Both begin at the same address of one buffer, each with the shape that it had."""
    room = torch.zeros(4096, dtype=torch.uint8)
    found = {}
    for name in (read, written):
        old = call[name]
        found[name] = room[: old.numel() * old.element_size()].view(old.dtype).view(old.shape)
    return found


@pytest.mark.parametrize("wrong", WRONG)
def test_a_call_that_is_refused_is_refused_each_time(backend: StandIn, wrong: str) -> None:
    call = make_call()
    splits = {"num_kv_splits": 1} if wrong == "splits True" else {}
    for _ in range(2):
        decode(call, **splits)
    for _ in range(3):
        with pytest.raises(InvalidArgument):
            decode(call | splits | WRONG[wrong](call))
    decode(call, **splits)
    assert (backend.decoded, len(backend.launched)) == (1, 2)


def test_outputs_that_only_interleave_are_taken(backend: StandIn) -> None:
    """From the first to the last byte, out and lse cross; no byte is in both: what is known is not enough, and right."""
    call = make_call()
    room = torch.empty(TOKENS, HEADS, RANK + 4)
    call["out"], call["lse"] = room[..., :RANK], room[..., RANK]
    for _ in range(3):
        decode(call)
    assert (backend.decoded, backend.launched) == (3, [])
    apart = call | {"out": torch.empty_like(room)[..., :RANK], "lse": torch.empty_like(room)[..., RANK]}
    decode(apart)
    assert backend.launched == [addresses(apart)]


def test_a_gradient_is_refused_on_a_known_call(backend: StandIn) -> None:
    call = make_call()
    decode(call)
    call["q"].requires_grad_()
    with pytest.raises(Unsupported, match="requires_grad"):
        decode(call)
    with torch.no_grad():
        decode(call)
    assert (backend.decoded, len(backend.launched)) == (1, 1)


def test_a_lazily_negated_output_is_left_to_torch(backend: StandIn) -> None:
    call = make_call()
    complex_lse = torch.zeros(TOKENS, HEADS, dtype=torch.complex64)
    decode(call | {"lse": complex_lse.imag})
    decode(call | {"lse": complex_lse.imag})
    assert (backend.decoded, len(backend.launched)) == (1, 1)
    negated = complex_lse.conj().imag
    assert negated.is_neg()
    # torch's fallback for such views does not take an operator's arguments that are None
    with pytest.raises(RuntimeError, match="None"):
        decode(call | {"lse": negated})
    assert len(backend.launched) == 1


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": torch._neg_view,
    "zeros that are nowhere": lambda q: torch._efficientzerotensor(q.shape),
    "functional": torch._to_functional_tensor,
}


@pytest.mark.parametrize("name", LAZY)
def test_queries_that_are_not_what_their_memory_holds_are_left_to_torch(backend: StandIn, name: str) -> None:
    call = make_call()
    decode(call)
    decode(call)
    assert len(backend.launched) == 1
    # torch may refuse such a tensor, or make memory of it; nothing is launched on the memory behind it
    with suppress(RuntimeError, NotImplementedError, InvalidArgument):
        decode(call | {"q": LAZY[name](call["q"])})
    assert {bound[0] for bound in backend.launched[1:]}.isdisjoint({0, call["q"].data_ptr()})


def test_it_goes_the_whole_way_while_somebody_wants_to_see_launches(backend: StandIn) -> None:
    call = make_call()
    decode(call)
    backend.is_ready = False
    decode(call)
    assert (backend.decoded, backend.launched) == (2, [])


def test_what_cannot_be_repeated_is_not(backend: StandIn) -> None:
    backend.repeats = False
    for _ in range(3):
        decode(make_call())
    assert (backend.decoded, len(MEMO)) == (3, 0)


def test_nothing_of_the_caller_is_kept(backend: StandIn) -> None:
    call = make_call()
    decode(call)
    decode(call)
    watched = [weakref.ref(value) for value in call.values()]
    del call
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_the_memo_is_bounded() -> None:
    memo, work = Memo(most_calls=3, most_bound=4), StandIn()
    tensors = [make_call().get(name) for name in SLOTS]
    tensors[SLOTS.index("q_pe")] = None
    for number in range(10):
        call = identify(tensors, (number,))
        assert call is not None
        memo.remember(call, work, tensors)
        assert len(memo) == min(number + 1, 3)
    # the oldest are forgotten
    known = [memo.again(identify(tensors, (number,)), None, None) is not None for number in range(10)]  # type: ignore[arg-type]
    assert known == [False] * 7 + [True] * 3
    for _ in range(20):
        tensors[OUT] = torch.empty(TOKENS, HEADS, RANK)
        assert memo.again(identify(tensors, (9,)), tensors[OUT], tensors[SLOTS.index("lse")]) is not None  # type: ignore[arg-type]
        assert sum(len(known.bound) for known in memo._known.values()) <= 4


def test_threads_launch_their_own_addresses(backend: StandIn) -> None:
    decode(make_call())
    own = threading.local()
    seen: dict[int, list[tuple[list[int], Sequence[int]]]] = {}
    backend.launch = lambda bound: setattr(own, "bound", bound)  # type: ignore[method-assign]
    start = threading.Barrier(4)

    def work(number: int) -> None:
        calls = [make_call() for _ in range(5)]
        start.wait()
        pairs = []
        for turn in range(200):
            call = calls[turn % 5]
            decode(call)
            pairs.append((addresses(call), own.bound))
        seen[number] = pairs

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [0, 1, 2, 3]
    assert all(list(wanted) == list(got) for pairs in seen.values() for wanted, got in pairs)
    assert backend.decoded == 1


def test_tensors_without_memory_are_not_known() -> None:
    assert identify([torch.eye(3).to_sparse()], ()) is None
    assert identify([torch.nn.Parameter(torch.eye(3))], ()) is None
    assert identify([SimpleNamespace(shape=(3,))], ()) is None  # type: ignore[list-item]
    assert identify([torch.eye(3)], ()) is not None


def test_bytes_that_torch_would_not_view_as_numbers_are_another_workspace() -> None:
    """At one address, as parts of a storage that begins there and of one that begins a byte before."""
    room = bytearray(64)
    storages = [torch.frombuffer(room, dtype=torch.uint8, offset=offset) for offset in (0, 1)]
    calls = [
        identify([None] * (len(SLOTS) - 1) + [storage[5 - offset :][:50]], ())
        for offset, storage in enumerate(storages)
    ]
    assert calls[0].addresses == calls[1].addresses  # type: ignore[union-attr]
    assert calls[0].key != calls[1].key  # type: ignore[union-attr]
