"""Runs the few-heads kernel's own schedule on a CPU: its functions as plain Python, over numpy's int32 and float32.

What reads, computes and writes is replaced by records of what it was asked for; everything that decides who does what is the
kernel's own code, taken from its source.
"""

from __future__ import annotations
import __future__

import inspect
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from triton.experimental.gluon import language as gluon_language
from triton.runtime.jit import JITFunction

from pagedmla.kernels.gluon.few_heads import consumer, loader, pieces, shares
from pagedmla.kernels.gluon.few_heads.layouts import Batch

KEYS = shares.KEYS.value
FEW = pieces.FEW.value
SMALL_SCAN, LARGE_SCAN = shares.SMALL_SCAN.value, 256
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
    """What the schedule uses of Gluon's language, in a launch of ``programs``."""

    int32, int64, float32 = np.int32, np.int64, np.float32
    static_range = range

    def __init__(self, programs: int) -> None:
        self.programs = programs
        self.loads = 0

    def num_programs(self, axis: int) -> Number:
        return number(self.programs)

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
    def where(condition: Any, a: Any, b: Any) -> Number:
        return np.where(condition, a, b).view(Number)

    @staticmethod
    def minimum(a: Any, b: Any) -> Number:
        return np.minimum(a, b).view(Number)

    @staticmethod
    def maximum(a: Any, b: Any) -> Number:
        return np.maximum(a, b).view(Number)

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


@dataclass(frozen=True)
class Call:
    """A launch's batch.

    Attributes:
        seq_lens, cu_seqlens_q: as they were given, garbage included; without query starts every sequence has ``even_q_len``.
        num_tokens: query tokens; of an even batch its sequences'.
        rows: of a row tile.
    """

    seq_lens: list[int]
    cu_seqlens_q: list[int] | None = None
    num_tokens: int = 0
    even_q_len: int = 1
    num_heads: int = 16
    rows: int = 16
    capacity: int = 1 << 20
    programs: int = 132

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """(first query token, query tokens, keys) of each sequence, and with query starts of the padding behind."""
        lens = [min(max(length, 0), self.capacity) for length in self.seq_lens]
        if self.cu_seqlens_q is None:
            yield from ((i * self.even_q_len, self.even_q_len, length) for i, length in enumerate(lens))
            return
        inside = [min(max(start, 0), self.num_tokens) for start in self.cu_seqlens_q[1:]]
        ends = list(itertools.accumulate([*inside, self.num_tokens], max))
        for begin, end, length in zip([0, *ends], ends, [*lens, 0], strict=False):
            yield begin, end - begin, length

    def batch(self) -> Batch:
        starts = self.cu_seqlens_q if self.cu_seqlens_q is not None else []
        tokens = self.num_tokens if self.cu_seqlens_q is not None else len(self.seq_lens) * self.even_q_len
        return Batch(
            Pointer(np.array(self.seq_lens, np.int32)), 1, Pointer(np.array(starts, np.int32)), 1,
            number(len(self.seq_lens)), number(tokens), number(self.even_q_len), number(self.capacity),
        )  # fmt: skip


class Segment(NamedTuple):
    """KV tiles ``begin`` .. ``end`` - 1 of all work, of a row tile that a program took: what it thinks that this one is."""

    sequence: int
    q_begin: int
    q_len: int
    kv_len: int
    unit: shares.Unit
    begin: int
    end: int


@dataclass
class Program:
    """What a program did.

    Attributes:
        share: (first tile, tile past the last).
        stored: segments whose row tile it wrote at once, with the number of pieces that it united for it.
        published: slot of a segment's state.
        united: (first worker, pieces, own piece, (q_begin, q_len, row tile)) of row tiles that all of their workers unite.
        loaded: (first query row, first tile) of each segment, as the warp that loads has it.
    """

    worker: int
    share: tuple[int, int]
    workers: int
    slack: int
    segments: list[Segment] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=dict)
    published: dict[int, int] = field(default_factory=dict)
    united: list[tuple[int, int, int, tuple[int, int, int]]] = field(default_factory=list)
    loaded: list[tuple[int, int]] = field(default_factory=list)


def functions(
    module: ModuleType, wanted: tuple[str, ...], names: dict[str, Any], mutant: tuple[str, str, str] | None
) -> dict[str, Any]:
    """``wanted`` of a module's Gluon functions as plain ones that see ``names``, themselves included.

    ``mutant``: (function, some text of it, what stands there instead).
    """
    for name in wanted:
        source = textwrap.dedent(inspect.getsource(getattr(module, name).fn))
        source = source[source.index("def ") :]
        if mutant is not None and mutant[0] == name:
            assert source.count(mutant[1]) == 1, f"{name} has {source.count(mutant[1])} of {mutant[1]!r}"
            source = source.replace(*mutant[1:])
        # annotations there are instructions to Gluon's compiler
        flags = __future__.annotations.compiler_flag
        exec(compile(source, f"{module.__name__}.{name}", "exec", flags=flags), names)
    return names


def constants(module: ModuleType) -> dict[str, Any]:
    """A module's names, compile-time numbers as plain ones."""
    constexpr = gluon_language.constexpr
    return {
        name: value.value if isinstance(value, constexpr) else value for name, value in vars(module).items()
    }


_SHARES = tuple(name for name, value in vars(shares).items() if isinstance(value, JITFunction))


def schedule(language: Language, mutant: tuple[str, str, str] | None = None) -> dict[str, Any]:
    """The functions of shares.py, by name."""
    names = constants(shares) | {"gl": language, "scan_layout": lambda *given: None}
    return functions(shares, _SHARES, names, mutant)


def run(call: Call, mutant: tuple[str, str, str] | None = None) -> list[Program]:
    """All programs of a launch, one after the other."""
    language = Language(call.programs)
    plan = schedule(language, mutant)
    taken = {name: plan[name] for name in _SHARES}
    attend, load = _attend_share(language, taken, mutant), _load_share(language, taken, mutant)
    batch = call.batch()
    ragged = call.cu_seqlens_q is not None
    scan = SMALL_SCAN if len(call.seq_lens) < SMALL_SCAN else LARGE_SCAN
    one_row_tile = not ragged and call.even_q_len * call.num_heads <= call.rows
    found = []
    for index in range(call.programs):
        language.loads = 0
        worker = number(index)
        share, place, all_shares = plan["share_of"](
            worker, batch, ragged, call.num_heads, call.rows, scan, one_row_tile
        )
        program = Program(
            index, (int(share[0]), int(share[1])), int(all_shares.workers), int(all_shares.slack)
        )
        attend(
            _SHARED, worker, share, place, all_shares, batch, program, None, 1.0,
            ragged, False, call.num_heads, call.rows, one_row_tile,
        )  # fmt: skip
        load(
            program, share, place, batch, _CACHE, None,
            ragged, call.num_heads, KEYS, call.rows, one_row_tile,
        )  # fmt: skip
        found.append(program)
    return found


_SHARED = SimpleNamespace(signals=SimpleNamespace(index=lambda signal: None))
_CACHE = SimpleNamespace(block_table=0, table_stride=0)


def _attend_share(language: Language, plan: dict[str, Any], mutant: tuple[str, str, str] | None) -> Any:
    """``attend_share``, which notes down in its ``outputs``, a ``Program``, what becomes of each segment."""
    state: dict[str, Any] = {}

    def attend_segment(shared, k, tile, share_end, unit, place, *rest):
        end = min(int(unit.end), int(share_end))
        assert int(unit.begin) <= int(tile) < end, "a segment without tiles, or of another row tile"
        whole = shares.Unit(*(int(value) for value in unit))
        sequence = (int(value) for value in (place.sequence, place.q_begin, place.q_len, place.kv_len))
        state["segment"] = Segment(*sequence, whole, int(tile), end)
        return None, None, number(np.zeros(rest[-1]), np.float32), k

    def note(program):
        program.segments.append(state["segment"])
        return len(program.segments) - 1

    def normalise(o, m, sums, ROWS):
        # how many pieces the state is of
        return 1, None

    def add_pieces(o, lse2, worker, count, partials, ROWS):
        return int(count), None

    def store_rows(o, lse2, unit, place, outputs, *rest):
        outputs.stored[note(outputs)] = o

    def publish(o, lse2, unit, worker, partials, ROWS):
        program = state["program"]
        program.published[note(program)] = int(slots["slot_of"](worker, worker - unit.first))

    def unite(first_worker, count, mine, rows, outputs, partials, *rest):
        outputs.united.append((int(first_worker), int(count), int(mine), tuple(int(value) for value in rows)))

    slots = functions(pieces, ("slot_of",), constants(pieces) | {"gl": language}, mutant)
    stand_ins = {
        "gl": language, "mbarrier": SimpleNamespace(wait=lambda *given: None), "row_layout": lambda rows: None,
        "attend_segment": attend_segment, "normalise": normalise, "add_pieces": add_pieces,
        "store_rows": store_rows, "publish": publish, "unite": unite,
    }  # fmt: skip
    names = functions(consumer, ("attend_share",), constants(consumer) | plan | stand_ins, mutant)

    def attend_share(*given):
        state["program"] = given[6]
        names["attend_share"](*given)

    return attend_share


def _load_share(language: Language, plan: dict[str, Any], mutant: tuple[str, str, str] | None) -> Any:
    """``load_share``, which notes down in its ``shared``, a ``Program``, what it loads."""
    rows: list[int] = []
    now: list[Program] = []

    def load_query(shared, q_row, turn, *rest):
        assert turn == len(shared.loaded), "a query out of turn"
        rows.append(int(q_row))

    def tiles(begin, end):
        # the copies themselves are as many as the keys
        now[0].loaded.append((rows.pop(), int(begin)))
        return ()

    stand_ins = {"gl": language, "load_query": load_query, "page_of": lambda *given: 0, "range": tiles}
    names = functions(loader, ("load_share",), constants(loader) | plan | stand_ins, mutant)

    def load_share(*given):
        now[:] = given[:1]
        names["load_share"](*given)

    return load_share
