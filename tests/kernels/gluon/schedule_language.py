"""A small stand-in for Gluon's language: kernels' functions as plain Python, over numpy's int32 and float32."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from functools import lru_cache
from types import CodeType, ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from triton.experimental.gluon import language as gluon_language

# no program of these batches reads as many numbers, unless it runs for ever
_MOST_LOADS = 20_000


class Number(np.ndarray):
    """A kernel's number or vector; integers wrap as they do there.

    Attributes:
        ulps: by so many units in the last place a quotient of floats is off, as it may be on a card by 2.
    """

    ulps: ClassVar[int] = 0

    def to(self, dtype: Any) -> Number:
        return self.astype(dtype)

    def __truediv__(self, other: Any) -> Any:
        quotient = super().__truediv__(other)
        for _ in range(abs(self.ulps)):
            quotient = np.nextafter(quotient, np.float32(np.copysign(np.inf, self.ulps)))
        return quotient

    # a kernel's variables are names of values: an assignment changes no other name's value
    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other


def number(value: Any, dtype: Any = np.int32) -> Number:
    return np.asarray(value, dtype=dtype).view(Number)


class Pointer(NamedTuple):
    """``data`` from ``offset`` on; reading outside of it is an error."""

    data: np.ndarray
    offset: Any = 0

    def __add__(self, other: Any) -> Pointer:  # type: ignore[override]
        return Pointer(self.data, self.offset + other)


class Language:
    """What the schedule uses of Gluon's language.

    Attributes:
        loads: numbers or vectors that were read; who runs another program puts 0 there.
    """

    int32, int64, float32 = np.int32, np.int64, np.float32
    static_range = range

    def __init__(self) -> None:
        self.loads = 0

    def thread_barrier(self) -> None:
        """A program is one thread here."""

    def load(self, pointer: Pointer) -> Number:
        self.loads += 1
        assert self.loads < _MOST_LOADS, "a program runs for ever"
        offset = np.asarray(pointer.offset)
        assert np.all((offset >= 0) & (offset < len(pointer.data))), "a load outside of a tensor"
        return number(pointer.data[offset])

    @staticmethod
    def arange(start: int, end: int, layout: Any) -> Number:
        return number(np.arange(start, end))

    @staticmethod
    def zeros(shape: Any, dtype: Any, layout: Any) -> Number:
        # one number stands for all: they are states, which nobody looks at here
        return number(0, dtype)

    @staticmethod
    def full(shape: Any, value: Any, dtype: Any, layout: Any) -> Number:
        return number(value, dtype)

    @staticmethod
    def convert_layout(a: Any, layout: Any) -> Any:
        return a

    # a vector's layout, which has no meaning here
    @staticmethod
    def SliceLayout(axis: int, layout: Any) -> None:
        return None

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Number:
        return np.where(condition, a, b).view(Number)

    @staticmethod
    def minimum(a: Any, b: Any) -> Number:
        return np.asarray(np.minimum(a, b)).view(Number)

    @staticmethod
    def maximum(a: Any, b: Any) -> Number:
        return np.asarray(np.maximum(a, b)).view(Number)

    @staticmethod
    def sum(a: Number, axis: int) -> Number:
        return number(np.sum(a, axis, dtype=a.dtype), a.dtype)

    @staticmethod
    def max(a: Number, axis: int) -> Number:
        return number(np.max(a, axis), a.dtype)

    @staticmethod
    def min(a: Number, axis: int) -> Number:
        return number(np.min(a, axis), a.dtype)

    @staticmethod
    def associative_scan(a: Number, axis: int, combine: Any) -> Number:
        step = 1
        while step < len(a):
            a = np.concatenate([a[:step], combine(a[:-step], a[step:])]).view(Number)
            step *= 2
        return a


class Mutant(NamedTuple):
    """A kernel with a fault.

    Attributes:
        function: its module, within the kernels' folder, and name.
        text, instead: some text of it, and what stands there instead.
    """

    function: str
    text: str
    instead: str


@lru_cache(maxsize=1000)
def _code(module: ModuleType, name: str, mutant: Mutant | None) -> CodeType:
    source = textwrap.dedent(inspect.getsource(getattr(module, name).fn))
    source = source[source.index("def ") :]
    if mutant is not None:
        assert source.count(mutant.text) == 1, f"{name} has {source.count(mutant.text)} of {mutant.text!r}"
        source = source.replace(mutant.text, mutant.instead)
    # annotations there are instructions to Gluon's compiler
    flags = __future__.annotations.compiler_flag
    return compile(source, f"{module.__name__}.{name}", "exec", flags=flags)


def functions(
    module: ModuleType, wanted: tuple[str, ...], names: dict[str, Any], mutant: Mutant | None = None
) -> dict[str, Any]:
    """``wanted`` of a module's Gluon functions as plain ones that see its names, ``names`` before them, and themselves."""
    constexpr = gluon_language.constexpr
    found = {
        name: value.value if isinstance(value, constexpr) else value for name, value in vars(module).items()
    }
    found |= names
    for name in wanted:
        is_mutant = mutant is not None and f"{module.__name__}.{name}".endswith(f".gluon.{mutant.function}")
        exec(_code(module, name, mutant if is_mutant else None), found)
    return {name: found[name] for name in wanted}
