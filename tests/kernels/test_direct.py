"""Launches straight to Triton's launcher: what it is handed, and when it is not used at all.

The launcher is a stand-in; that a card does the same through it as through Triton, tests/device/test_direct.py shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.backends.nvidia import driver as nvidia

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.slots import SLOTS, tensors_of
from pagedmla.kernels.split_kv import direct
from pagedmla.kernels.split_kv.direct import DirectLaunches, Launch, launch, repeatable

STREAM, FUNCTION = 0x77, 0x1234
TILE = {"swizzle": 3, "elem_size": 2, "elem_type": 5, "block_size": [64, 64], "fp4_padded": False}


class Kernel:
    """A kernel as declared, and what Triton would compile."""

    arg_names = ("x", "desc", "n", "part", "scale", "SIZE")

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.pre_run_hooks, self.seen = compiled, [], []  # type: ignore[var-annotated]

    def __getitem__(self, programs: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            self.seen.append((programs, arguments, named))
            return self.compiled

        return run


class Launched(list):
    """What the launcher was called with."""

    def __call__(self, *given: Any) -> None:
        self.append(given)


def make_launcher(launched: Launched, **changes: Any) -> Any:
    launcher = object.__new__(nvidia.CudaLauncher)

    def outer(launcher: Any) -> Any:
        def inner(*given: Any) -> None:
            launcher(*given, "through the wrapper")

        return inner

    fields = {
        "launch": outer(launched), "global_scratch_size": 0, "profile_scratch_size": 0,
        "launch_cooperative_grid": True, "launch_pdl": False,
    }  # fmt: skip
    launcher.__dict__.update(fields | changes)
    return launcher


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Device None, as CPU tensors say, is the current one; descriptors are what they are made of."""
    monkeypatch.setattr(direct, "_current", lambda: (lambda: None, lambda device: STREAM))
    utils = SimpleNamespace(fill_tma_descriptor=lambda *given: given)
    monkeypatch.setattr(direct, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    direct._is_known_triton.cache_clear()
    yield
    direct._is_known_triton.cache_clear()


class Case:
    """A call with one launch, of everything that an argument can be."""

    def __init__(self, **changes: Any) -> None:
        self.launched = Launched()
        metadata = SimpleNamespace(tensordesc_meta=[TILE])
        run = make_launcher(self.launched, **changes)
        compiled = SimpleNamespace(function=FUNCTION, packed_metadata=(4, 1, 99), metadata=metadata, run=run)
        self.kernel = Kernel(compiled)
        self.args, self.out, self.lse = self.make()
        self.workspace = torch.zeros(256, dtype=torch.uint8)
        self.part = self.workspace[64:128].view(torch.float32)
        self.x: Tensor = self.args.seq_lens

    @staticmethod
    def make() -> tuple[DecodeArguments, Tensor, Tensor]:
        q, cache = torch.zeros(2, 3, 64).half(), torch.zeros(4, 64, 64).half()
        lens, table = torch.ones(2).int(), torch.zeros(2, 2).int()
        args = DecodeArguments(q, None, cache, table, lens, None, 0.1, True, 32)
        return args, torch.zeros(2, 3, 32).half(), torch.zeros(2, 3)

    def run(self) -> DirectLaunches | None:
        desc = SimpleNamespace(
            base=self.args.kv_cache, shape=[256, 64], strides=[64, 1], block_shape=[64, 64], padding="zero"
        )
        one = launch(
            self.kernel, (7, 2), (self.x, desc, 5, self.part, 0.5), {"SIZE": 64}, launch_cooperative_grid=True
        )
        return repeatable([one], self.args, self.out, self.lse, self.workspace, [(self.part, self.workspace)])


def test_the_first_launch_is_triton_s_own() -> None:
    case = Case()
    assert case.run() is not None
    ((programs, arguments, named),) = case.kernel.seen
    assert (programs, named) == ((7, 2), {"SIZE": 64, "launch_cooperative_grid": True})
    assert arguments[0] is case.args.seq_lens
    assert case.launched == []


def test_a_repeated_launch_has_other_addresses_and_nothing_else() -> None:
    case = Case()
    work = case.run()
    assert work is not None
    assert work.ready()
    assert work.workspace_bytes == 256
    args, out, lse = Case.make()
    workspace = torch.zeros(256, dtype=torch.uint8)
    places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors_of(args, out, lse, workspace)]
    work.launch(work.bind(places))
    encoded = (
        args.kv_cache.data_ptr(),
        3,
        2,
        nvidia.TMA_DTYPE_DEVICE_TO_HOST[5],
        [64, 64],
        [256, 64],
        [64, 1],
        0,
    )
    wanted = (
        7, 2, 1, STREAM, FUNCTION, True, False, None, None, (4, 1, 99), None, None, None,
        args.seq_lens.data_ptr(), encoded, 256, 64, 64, 1, 5, workspace.data_ptr() + 64, 0.5, 64,
    )  # fmt: skip
    assert case.launched == [wanted]


def test_triton_s_launcher_takes_what_it_is_handed() -> None:
    """The format that Triton generates for the same signature, letter by letter."""
    signature = {
        "x": "*i32", "desc": "tensordesc<fp16[64, 64],NVMMAShared>", "n": "i32", "part": "*fp32", "scale": "fp32",
        "SIZE": "constexpr",
    }  # fmt: skip
    source = nvidia.make_launcher({}, signature, [TILE])
    (format_,) = re.findall(r'PyArg_ParseTuple\(args, "(\w+)"', source)
    case = Case()
    work = case.run()
    assert work is not None
    work.launch(work.bind([4096] * len(SLOTS)))
    (given,) = case.launched
    assert len(given) == len(format_)
    kinds = {"i": int, "K": int, "L": int, "p": bool, "d": float, "O": object}
    for letter, value in zip(format_, given, strict=True):
        assert isinstance(value, kinds[letter]), (letter, value)
    names = "gridX, &gridY, &gridZ, &_stream, &_function, &launch_cooperative_grid, &launch_pdl, &global_scratch_obj"
    names += (
        ", &profile_scratch_obj, &kernel_metadata, &launch_metadata, &launch_enter_hook, &launch_exit_hook"
    )
    assert f"&{names}, &_arg0" in re.sub(r"\s+", " ", source)


def test_a_part_without_elements_is_nowhere() -> None:
    case = Case()
    case.part = case.workspace[64:64].view(torch.float32)
    work = case.run()
    assert work is not None
    work.launch(work.bind([4096] * len(SLOTS)))
    assert case.part.data_ptr() == 0
    assert case.launched[0][-3] == 0


@pytest.mark.parametrize(
    "changes",
    [{"global_scratch_size": 1}, {"profile_scratch_size": 1}, {"launch": lambda *given: None}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_launcher_that_does_more_is_not_passed_over(changes: dict[str, Any]) -> None:
    # a function without the launcher in it is no wrapper that is known
    assert Case(**changes).run() is None


def test_another_triton_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "triton", SimpleNamespace(__version__="3.7.0"))
    assert Case().run() is None
    monkeypatch.setattr(direct, "triton", SimpleNamespace(__version__="3.6.1+git1234"))
    direct._is_known_triton.cache_clear()
    assert Case().run() is not None


def test_another_vendor_s_launcher_is_left_to_itself() -> None:
    case = Case()
    case.kernel.compiled.run = SimpleNamespace(**case.kernel.compiled.run.__dict__)
    assert case.run() is None


def test_a_tensor_that_is_none_of_the_call_s_is_not_repeatable() -> None:
    case = Case()
    case.x = case.args.seq_lens.clone()
    assert case.run() is None
    # as a view, it is somebody's only when it is said whose
    case.x = case.args.seq_lens[:1]
    assert case.run() is None


def test_one_tensor_in_two_places_is_not_repeatable() -> None:
    case = Case()
    case.args = DecodeArguments(**{**case.args.__dict__, "q": case.args.kv_cache})
    assert case.run() is None


def test_a_workspace_of_the_call_s_own_must_lie_as_the_next_one_will() -> None:
    case = Case()
    start = -case.workspace.data_ptr() % 16 + 4
    case.workspace = case.workspace[start : start + 128]
    case.part = case.workspace[64:128].view(torch.float32)
    assert case.run() is None


def test_an_interpreted_kernel_is_not_repeatable() -> None:
    case = Case()
    case.kernel.compiled = None
    assert case.run() is None


def test_hooks_see_launches() -> None:
    case = Case()
    work = case.run()
    assert work is not None

    def hook(*given: Any) -> None:
        pass

    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        assert not work.ready()
        chain.remove(hook)
        assert work.ready()
    case.kernel.pre_run_hooks.append(hook)
    assert not work.ready()
    case.kernel.pre_run_hooks.clear()
    assert work.ready()


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("runtime.launch_enter_hook", print),
        ("runtime.debug", True),
        ("compilation.instrumentation_mode", "ir"),
    ],
)
def test_knobs_that_change_launches(knob: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Case().run()
    assert work is not None
    group, name = knob.split(".")
    monkeypatch.setattr(getattr(knobs, group), name, value)
    assert not work.ready()


def test_launches_are_made_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current, entered = [0], []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)
            current[0] = self.index

        def __exit__(self, *error: object) -> None:
            current[0] = 0

    monkeypatch.setattr(direct, "_current", lambda: (lambda: current[0], lambda device: STREAM + device))
    monkeypatch.setattr(torch.cuda, "device", Device)
    seen: list[Any] = []
    template = direct._Template(
        lambda *given: seen.append((current[0], given)), (1, 1, 1), (None,), ((0, 0, 8),), (), []
    )
    for device in (0, 1):
        work = DirectLaunches([template], device, 0)
        work.launch(work.bind([100]))
    assert seen == [(0, (1, 1, 1, STREAM, 108)), (1, (1, 1, 1, STREAM + 1, 108))]
    assert entered == [1]


def test_a_launch_names_its_arguments() -> None:
    case = Case()
    one = launch(case.kernel, (1,), (1, 2), {"SIZE": 8})
    assert one == Launch(case.kernel, case.kernel.compiled, (1,), {"x": 1, "desc": 2, "SIZE": 8})
