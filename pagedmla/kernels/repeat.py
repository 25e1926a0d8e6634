"""Calls that were made before: what makes two calls the same but for their addresses, and the launches of the first.

Checking a call, choosing its kernels and letting Triton look at their arguments takes the host longer than a small decode
takes the device.  All of it follows from shapes, strides, dtypes, devices, options and the alignment of addresses.  So a call
is remembered by these, with the launches that it came to.  A later one only fills in its own addresses, and of those one thing
must still be asked: whether what is written lies on something else.

No tensor is kept: numbers, shapes and compiled kernels only.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from pagedmla.contract.slots import ALIGNMENT, LSE, OUT, WORKSPACE

Tensors = Sequence[Tensor | None]

# slots of queries, keys and outputs, which come first
_NUM_VALUES = LSE + 1
# bytes of the widest numbers that a backend views a workspace as
_WIDEST = 8


class Repeatable(Protocol):
    """All that a backend did on the device for one call, to be done again at other addresses.

    Attributes:
        workspace_bytes: what a call without a workspace must be given.
    """

    workspace_bytes: int

    def ready(self) -> bool:
        """Whether it may be repeated now: false while somebody wants to see each launch."""

    def bind(self, addresses: Sequence[int]) -> Any:
        """The launches at these addresses, in the order of ``SLOTS``."""

    def launch(self, bound: Any) -> None:
        """Does what ``bind`` prepared, on the current stream of the tensors' device."""


class Call(NamedTuple):
    """A call as the memo sees it.

    Attributes:
        key: equal where calls differ in addresses alone.
        addresses: of its tensors, 0 for those left out.
    """

    key: Hashable
    addresses: list[int]


def is_plain() -> bool:
    """Whether an operator would come straight to its implementation: nobody traces, transforms, profiles or looks on."""
    c = torch._C
    return not (
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or c._are_functorch_transforms_active()
        or c._autograd._profiler_enabled()
        or c._get_tracing_state() is not None
    )


def identify(tensors: Tensors, options: tuple[Any, ...]) -> Call | None:
    """What tells a call from others, or None where a tensor is not plain memory.

    Args:
        tensors: in the order of ``SLOTS``, all or the first of them.
        options: everything else that the call depends on.
    """
    wants_gradients = torch.is_grad_enabled()
    addresses: list[int] = []
    kinds: list[Any] = []
    low = 0
    try:
        for tensor in tensors:
            if tensor is None:
                addresses.append(0)
                kinds.append(None)
                continue
            # a subclass may mean anything by a call, a lazy view is not what its memory holds, and a gradient is refused
            if (
                type(tensor) is not Tensor
                or (wants_gradients and tensor.requires_grad)
                # tables are integers, which torch has no lazy views of
                or (
                    len(addresses) < _NUM_VALUES
                    and not _is_memory(torch._C._dispatch_keys(tensor).raw_repr(), tensor.device)
                )
            ):
                return None
            address = tensor.data_ptr()
            addresses.append(address)
            low |= address
            kinds.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    except RuntimeError:
        # without memory of its own, as a sparse tensor
        return None
    workspace = tensors[WORKSPACE] if len(tensors) > WORKSPACE else None
    key = (
        options,
        # True equals 1, and 512.0 equals 512: the one is refused where the other is taken
        tuple(map(type, options)),
        low % ALIGNMENT and tuple([address % ALIGNMENT for address in addresses]),
        # torch views bytes as wider numbers from some offsets only
        0 if workspace is None else workspace.storage_offset() % _WIDEST,
        *kinds,
    )
    return Call(key, addresses)


@lru_cache(maxsize=256)
def _is_memory(keys: int, device: torch.device) -> bool:
    """Whether a tensor with these dispatch keys is what its memory holds: no lazy negation, no stand-in for zeros, no trace.

    Tensors that were made in inference mode have others than those that were not.
    """
    for inference in (False, True):
        with torch.inference_mode(inference):
            if torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr() == keys:
                return True
    return False


@dataclass(slots=True)
class _Known:
    """A call that was made.

    Attributes:
        work: its launches.
        out, lse: shape and dtype of its outputs.
        device: of all its tensors.
        workspace_bytes: what it makes, where it makes one.
        pairs: of slots that must lie apart, each with its bytes from the first to the last.
        makes: slots that the caller leaves out and the call makes.
        kept: addresses of the last slots, where they are not among the call's own.
        bound: launches by addresses.
    """

    work: Repeatable
    out: tuple[torch.Size, torch.dtype]
    lse: tuple[torch.Size, torch.dtype]
    device: torch.device
    workspace_bytes: int
    pairs: tuple[tuple[int, int, int, int], ...]
    makes: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    bound: dict[tuple[int, ...], Any] = field(default_factory=dict)


class Memo:
    """Calls by their keys.  Bounded: of too many calls the oldest are forgotten."""

    def __init__(self, most_calls: int = 512, most_bound: int = 4096) -> None:
        """Args: most_calls: that differ in more than addresses.  most_bound: in addresses, of all calls together."""
        self._known: dict[Hashable, _Known] = {}
        self._most_calls, self._most_bound, self._num_bound = most_calls, most_bound, 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Forgets everything; for whoever changes what a call leads to, as tests and tuning do."""
        with self._lock:
            self._known.clear()
            self._num_bound = 0

    def again(self, call: Call, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Makes a call that is known, and returns its outputs; None: nothing was done, and it must go the whole way."""
        known = self._find(call.key)
        if known is None or not known.work.ready():
            return None
        addresses = [*call.addresses, *known.kept]
        workspace = None
        for slot in known.makes:
            if slot == OUT:
                out = torch.empty(known.out[0], dtype=known.out[1], device=known.device)
                addresses[OUT] = out.data_ptr()
            elif slot == LSE:
                lse = torch.empty(known.lse[0], dtype=known.lse[1], device=known.device)
                addresses[LSE] = lse.data_ptr()
            else:
                workspace = torch.empty(known.workspace_bytes, dtype=torch.uint8, device=known.device)
                addresses[WORKSPACE] = workspace.data_ptr()
        places = tuple(addresses)
        bound = known.bound.get(places)
        if bound is None and (bound := self._bind(known, places)) is None:
            return None
        known.work.launch(bound)
        return cast(Tensor, out), cast(Tensor, lse)

    def remember(self, call: Call, work: Repeatable, tensors: Tensors) -> None:
        """Takes down a call that went the whole way.

        Args:
            call: with an address for each slot, 0 for what the caller left out.
            work: what it came to.
            tensors: all slots, with the outputs that it made.
        """
        out, lse = cast(Tensor, tensors[OUT]), cast(Tensor, tensors[LSE])
        if (out.data_ptr() | lse.data_ptr()) % ALIGNMENT and not (
            call.addresses[OUT] and call.addresses[LSE]
        ):
            # an allocator that aligns less than torch's: nothing is known of what it gives next
            return
        sizes = [0 if tensor is None else _extent(tensor) for tensor in tensors]
        makes = [slot for slot in (OUT, LSE) if not call.addresses[slot]]
        if tensors[WORKSPACE] is None and work.workspace_bytes:
            makes.append(WORKSPACE)
            sizes[WORKSPACE] = work.workspace_bytes
        known = _Known(
            work,
            (out.shape, out.dtype),
            (lse.shape, lse.dtype),
            out.device,
            sizes[WORKSPACE],
            _pairs(sizes),
            makes=tuple(makes),
        )
        self._store(call.key, known)

    def also(self, call: Call, same: Call, kept: Sequence[int] = ()) -> None:
        """Lets ``call`` lead to what ``same`` leads to, if that is known.

        Args:
            call: the same call in fewer words: outputs left out, or the last slots, whose addresses stay.
            kept: the addresses of the last slots.
        """
        known = self._find(same.key)
        if known is None or call.key == same.key:
            return
        left_out = [slot for slot in (OUT, LSE) if not call.addresses[slot] and slot not in known.makes]
        if any(same.addresses[slot] % ALIGNMENT for slot in left_out):
            return
        makes = (*left_out, *known.makes)
        self._store(call.key, replace(known, makes=makes, kept=tuple(kept), bound={}))

    def _find(self, key: Hashable) -> _Known | None:
        try:
            return self._known.get(key)
        except TypeError:
            # an option that has no hash is none that is taken
            return None

    def _store(self, key: Hashable, known: _Known) -> None:
        with self._lock:
            while len(self._known) >= self._most_calls:
                del self._known[next(iter(self._known))]
            self._known[key] = known

    def _bind(self, known: _Known, addresses: tuple[int, ...]) -> Any | None:
        """The launches at addresses that were not seen yet, or None where these need a closer look."""
        if any(addresses[slot] % ALIGNMENT for slot in known.makes) or not _apart(addresses, known.pairs):
            return None
        bound = known.work.bind(addresses)
        with self._lock:
            if self._num_bound >= self._most_bound:
                for other in self._known.values():
                    other.bound.clear()
                self._num_bound = 0
            known.bound[addresses] = bound
            self._num_bound += 1
        return bound


MEMO = Memo()
"""Of this process: a call's key names its device."""


def _extent(tensor: Tensor) -> int:
    """Bytes from the first to the last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _pairs(sizes: Sequence[int]) -> tuple[tuple[int, int, int, int], ...]:
    """(slot, other, bytes, the other's bytes): what is written must lie on nothing else.  A slot without bytes lies nowhere."""
    written = (OUT, LSE, WORKSPACE)
    return tuple(
        (slot, other, sizes[slot], sizes[other])
        for slot in written
        for other in range(len(sizes))
        # two that are both written are one pair
        if sizes[slot] and sizes[other] and other != slot and not (other in written and other < slot)
    )


def _apart(addresses: Sequence[int], pairs: Sequence[tuple[int, int, int, int]]) -> bool:
    """Whether no pair has a byte between the first and the last of both."""
    for slot, other, size, other_size in pairs:
        first, other_first = addresses[slot], addresses[other]
        if first < other_first + other_size and other_first < first + size:
            return False
    return True
