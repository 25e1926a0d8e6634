"""Launches of kernels that Triton compiled, first through Triton and then straight to the driver.

``kernel[grid](...)`` looks at every argument anew: which are aligned, which are 1, which compilation that makes.  Where that is
known to be as before, the compiled kernel's own launcher takes addresses as numbers and does nothing but launch.  It is
Triton's, and no part of what Triton promises: it is used for the versions named here and on NVIDIA GPUs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from pagedmla.contract.arguments import DecodeArguments
from pagedmla.contract.slots import ALIGNMENT, tensors_of

VERSIONS = ("3.6",)
"""Of Triton, whose launchers are known."""


class Launch(NamedTuple):
    """A launch that was made.

    Attributes:
        kernel: as declared.
        compiled: what Triton made of it for these arguments; None where it is interpreted.
        programs: the grid.
        arguments: all of them, by name.
    """

    kernel: Any
    compiled: Any
    programs: tuple[int, ...]
    arguments: dict[str, Any]


def launch(
    kernel: Any,
    programs: tuple[int, ...],
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    **options: Any,
) -> Launch:
    """Launches a kernel on the current device.

    Args:
        programs: the grid.
        arguments: the first ones, by position.
        constants: the other ones, which make another compilation each.
        options: of the compilation and the launch, as ``num_warps`` or ``launch_cooperative_grid``.
    """
    compiled = kernel[programs](*arguments, **constants, **options)
    # a stand-in in a test need not have the names
    names = kernel.arg_names if compiled is not None else ()
    return Launch(kernel, compiled, programs, dict(zip(names, arguments, strict=False)) | dict(constants))


class DirectLaunches:
    """The launches of one decode, to be made again at other addresses; see ``pagedmla.kernels.repeat.Repeatable``."""

    def __init__(self, launches: list[_Template], device: int, workspace_bytes: int) -> None:
        """Args: launches: in their order.  device: its index.  workspace_bytes: that they use."""
        self.workspace_bytes = workspace_bytes
        self._launches = launches
        self._device = device
        self._hooks = [one.hooks for one in launches]
        self._current_device, self._current_stream = _current()

    def ready(self) -> bool:
        """Whether nobody hooked himself into Triton's launches or asked for other compilations since."""
        runtime = knobs.runtime
        return not (
            _is_hooked(runtime.launch_enter_hook)
            or _is_hooked(runtime.launch_exit_hook)
            or runtime.debug
            or knobs.compilation.instrumentation_mode
            or any(self._hooks)
        )

    def bind(self, addresses: Sequence[int]) -> list[tuple[Any, ...]]:
        """What to call for each launch, with these addresses."""
        return [one.bind(addresses) for one in self._launches]

    def launch(self, bound: list[tuple[Any, ...]]) -> None:
        """Makes the launches of ``bind``."""
        if self._current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.launch(bound)
        stream = self._current_stream(self._device)
        for run, x, y, z, rest in bound:
            run(x, y, z, stream, *rest)
        return None


def repeatable(
    launches: Iterable[Launch],
    args: DecodeArguments,
    out: Tensor,
    lse: Tensor,
    workspace: Tensor | None = None,
    views: Iterable[tuple[Tensor, Tensor]] = (),
) -> DirectLaunches | None:
    """The launches of a decode without its tensors, or None where they cannot be repeated.

    They must be all that was done on the device.  An argument that is a tensor is one of the call's or one of ``views``: any
    other, as a copy that was made first, says that there was more.

    Args:
        launches: in their order.
        args, out, lse: the call's.
        workspace: what served as such, given or not; None: nothing did.
        views: tensors that begin somewhere in one of the call's, and that one.
    """
    tensors = tensors_of(args, out, lse, workspace)
    owned = [(tensor, slot) for slot, tensor in enumerate(tensors) if tensor is not None]
    if len({id(tensor) for tensor, _ in owned}) != len(owned):
        # one tensor in two places: another call will have two
        return None
    if args.workspace is None and workspace is not None and workspace.data_ptr() % ALIGNMENT:
        return None
    places = {id(tensor): (slot, 0) for tensor, slot in owned}
    for view, tensor in views:
        slot, _ = places[id(tensor)]
        places.setdefault(id(view), (slot, view.data_ptr() - tensor.data_ptr()))
    templates = []
    for one in launches:
        if (template := _template(one, places)) is None:
            return None
        templates.append(template)
    return DirectLaunches(templates, out.device.index, workspace.numel() if workspace is not None else 0)


class _Template(NamedTuple):
    """A launch with places for addresses.

    Attributes:
        run: the launcher.
        grid: three numbers.
        rest: what it takes after the grid and the stream, with nothing where an address belongs.
        pointers: (index in ``rest``, slot, bytes from the slot's address).
        descriptors: the same, and what makes a copy engine's descriptor from an address.
        hooks: Triton's list of what is to be called before a launch of the kernel.
    """

    run: Callable[..., None]
    grid: tuple[int, int, int]
    rest: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]
    descriptors: tuple[tuple[int, int, int, Callable[[int], Any]], ...]
    hooks: list[Any]

    def bind(self, addresses: Sequence[int]) -> tuple[Any, ...]:
        rest = list(self.rest)
        for index, slot, offset in self.pointers:
            rest[index] = addresses[slot] + offset
        for index, slot, offset, describe in self.descriptors:
            rest[index] = describe(addresses[slot] + offset)
        return (self.run, *self.grid, rest)


def _template(one: Launch, places: Mapping[int, tuple[int, int]]) -> _Template | None:
    run = _launcher(one.compiled)
    if run is None or any(name not in one.arguments for name in one.kernel.arg_names):
        return None
    compiled, launcher = one.compiled, one.compiled.run
    rest: list[Any] = [
        compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl,
        # no scratch memory; no metadata for hooks, and no hooks
        None, None, compiled.packed_metadata, None, None, None,
    ]  # fmt: skip
    pointers, descriptors = [], []
    shapes = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    for name in one.kernel.arg_names:
        value = one.arguments[name]
        if isinstance(value, Tensor) and value.numel() == 0:
            # nowhere, and torch says so to Triton too
            rest.append(0)
        elif isinstance(value, Tensor):
            if id(value) not in places:
                return None
            pointers.append((len(rest), *places[id(value)]))
            rest.append(None)
        elif hasattr(value, "block_shape"):
            shape = next(shapes, None)
            if id(value.base) not in places or shape is None or shape["fp4_padded"]:
                return None
            descriptors.append((len(rest), *places[id(value.base)], _describe(value, shape)))
            rest += [None, *value.shape, *value.strides]
        else:
            rest.append(value)
    x, y, z, *_ = (*one.programs, 1, 1)
    return _Template(
        run, (x, y, z), tuple(rest), tuple(pointers), tuple(descriptors), one.kernel.pre_run_hooks
    )


def _launcher(compiled: Any) -> Callable[..., None] | None:
    """The C function that launches a compiled kernel, or None where it is not known what it takes."""
    if compiled is None or not _is_known_triton():
        return None
    from triton.backends.nvidia.driver import CudaLauncher

    launcher = compiled.run
    if type(launcher) is not CudaLauncher or launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    run = launcher.launch
    if inspect.isfunction(run):
        # for kernels with descriptors it is wrapped in what makes these of their arguments
        run = inspect.getclosurevars(run).nonlocals.get("launcher")
    return run if callable(run) else None


def _describe(descriptor: Any, shape: Mapping[str, Any]) -> Callable[[int], Any]:
    """What encodes a descriptor (CUtensorMap) as Triton does, given its address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    fill = driver.active.utils.fill_tma_descriptor
    given = (
        shape["swizzle"], shape["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[shape["elem_type"]], shape["block_size"],
        list(descriptor.shape), list(descriptor.strides), 1 if descriptor.padding == "nan" else 0,
    )  # fmt: skip
    return lambda address: fill(address, *given)


@cache
def _is_known_triton() -> bool:
    return ".".join(triton.__version__.split(".")[:2]) in VERSIONS


def _current() -> tuple[Callable[[], int], Callable[[int], int]]:
    """What tells the current device, and its current stream."""
    return driver.active.get_current_device, driver.active.get_current_stream


def _is_hooked(hook: Any) -> bool:
    # Triton's own chain is always there, and mostly empty
    return bool(hook.calls) if type(hook) is knobs.HookChain else hook is not None
