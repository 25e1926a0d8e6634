"""A call that was made before is still seen by whoever wants to see the operator: modes, profilers, subclasses, compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stand_in_backend import StandIn, decode, make_call
from stand_in_backend import make_backend as make_backend
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pagedmla.kernels.repeat import is_plain


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class WatchFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Watch, WatchFunctions])
def test_a_mode_sees_the_operator_of_a_known_call(backend: StandIn, mode: type) -> None:
    call = make_call()
    for _ in range(2):
        decode(call)
    with mode() as watching:
        assert not is_plain()
        decode(call)
    assert any("pagedmla.decode_out" in name for name in watching.seen)
    assert is_plain()


def test_a_profiler_sees_the_operator_of_a_known_call(backend: StandIn) -> None:
    call = make_call()
    for _ in range(2):
        decode(call)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        decode(call)
    assert "pagedmla::decode_out" in {event.key for event in profile.key_averages()}


def test_a_subclass_sees_the_operator_of_a_known_call(backend: StandIn) -> None:
    seen = []

    class Mine(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    call = make_call()
    for _ in range(2):
        decode(call)
    decode(call | {"kv_cache": call["kv_cache"].as_subclass(Mine)})
    assert any("pagedmla.decode_out" in name for name in seen)


def test_a_traced_call_is_in_the_graph_though_it_is_known(backend: StandIn) -> None:
    call = make_call()
    for _ in range(2):
        decode(call)
    graphs = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch.compiler.reset()
    torch.compile(lambda call: decode(call), fullgraph=True, backend=keep)(call)
    assert any("pagedmla" in str(node.target) for node in graphs[0].graph.nodes)
