"""Runs the Gluon kernels' own schedule on a CPU: their functions, over a small stand-in for their language.

What reads, computes and writes is replaced by records of what it was asked for; everything that decides who does what is the
kernels' own code, taken from its source.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime.jit import JITFunction

from pagedmla.kernels.gluon import pieces, shares
from pagedmla.kernels.gluon.few_heads import consumer
from pagedmla.kernels.gluon.few_heads import loader as few_loader
from pagedmla.kernels.gluon.many_heads import gather as many_gather
from pagedmla.kernels.gluon.many_heads import halves
from pagedmla.kernels.gluon.many_heads import loader as many_loader

from .schedule_call import KEYS, Call, Computed, Load, Program, Segment, Union
from .schedule_language import Language, Mutant, functions, number

SMALL_SCAN, LARGE_SCAN = shares.SMALL_SCAN.value, 256
# table rows are numbers: so far from one sequence's to the next
_SEQUENCE = 1 << 32
# no program of these batches has as many, unless it runs for ever
_MOST_SEGMENTS = 5_000


class State:
    """A row tile's state, of so many pieces."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces

    def permute(self, order: tuple[int, ...]) -> State:
        return self


class Record:
    """What the stand-ins note down, of the program that runs.

    ``each_tile``: of every tile; otherwise only the last one of a segment is gone through, as if there were no others.
    """

    def __init__(self, language: Language, each_tile: bool) -> None:
        self.language, self.each_tile = language, each_tile
        self.computed = Computed()
        self.loads: list[Load] = []

    def begin(self) -> None:
        self.language.loads = 0
        self.computed, self.loads = Computed(), []

    @property
    def segment(self) -> Segment:
        return self.computed.segments[-1]

    def steps(self, begin: Any, end: Any, step: int) -> range:
        steps = range(int(begin), int(end), step)
        return steps if self.each_tile else steps[-1:]

    def wait(self, barrier: Any, phase: Any) -> None:
        self.computed.phases.append(int(phase))

    def arrive(self, barrier: int, count: int = 1) -> None:
        self.segment.query_freed += 1


_SHARES = tuple(name for name, value in vars(shares).items() if isinstance(value, JITFunction))
_SHARED = SimpleNamespace(signals=SimpleNamespace(index=lambda signal: signal))
# page ids say which sequence and tile they are of
_PAGES = SimpleNamespace(
    block_table=0, table_stride=_SEQUENCE, num_pages=number(2**62, np.int64), rows_per_page=1
)


def schedule(language: Language, mutant: Mutant | None = None) -> dict[str, Any]:
    """The functions of shares.py, by name."""
    return functions(shares, _SHARES, {"gl": language, "scan_layout": lambda *given: None}, mutant)


def run(call: Call, mutant: Mutant | None = None, *, each_tile: bool = False) -> list[Program]:
    """All programs of a launch, one after the other."""
    language = Language()
    record = Record(language, each_tile)
    names = schedule(language, mutant) | {"gl": language}
    ragged = call.cu_seqlens_q is not None
    one_row_tile = not ragged and call.even_q_len * call.num_heads <= call.group_rows
    scan = SMALL_SCAN if len(call.seq_lens) < SMALL_SCAN else LARGE_SCAN
    kernel, batch = call.kernel, call.batch()
    compute = _compute_function(halves if call.lanes else consumer, record, names, mutant)
    load = _load_functions(call.lanes > 0, record, names, mutant)
    # arguments by the kernels' names
    known = {
        "shared": _SHARED, "batch": batch, "pages": _PAGES, "tiles": None, "outputs": None, "partials": None, "queries": None,
        "scale_log2": 1.0, "RAGGED": ragged, "CAUSAL": False,
        "NUM_HEADS": call.num_heads, "ROWS": call.rows, "LANES": call.lanes, "PAGE_SIZE": KEYS,
        "ONE_ROW_TILE": one_row_tile, "GATHER": False,
    }  # fmt: skip
    found = []
    for index in range(call.programs):
        worker = number(index)
        record.begin()
        share, place, all_shares = names["share_of"](
            worker, number(call.programs), batch, ragged, call.num_heads, call.group_rows, scan, one_row_tile,
            kernel.smallest, kernel.extra,
        )  # fmt: skip
        known |= {"worker": worker, "share": share, "place": place, "shares": all_shares}
        known["extra"] = all_shares.extra
        whole = shares.Shares(*(int(value) for value in all_shares))
        program = Program(index, (int(share[0]), int(share[1])), whole)
        for lane in range(max(1, call.lanes)):
            known["lane"] = number(lane)
            for part in range(kernel.parts):
                record.begin()
                call_by_name(compute, known | {"SIDE": part})
                program.computed[lane, part] = record.computed
            for name, function in load.items():
                record.begin()
                call_by_name(function, known)
                program.loaded[lane, name] = record.loads
        found.append(program)
    return found


def call_by_name(function: Any, known: dict[str, Any]) -> Any:
    return function(**{name: known[name] for name in inspect.signature(function).parameters})


def _compute_function(
    module: ModuleType, record: Record, names: dict[str, Any], mutant: Mutant | None
) -> Any:
    """``attend_share`` of a kernel, which notes down what becomes of each segment."""
    is_few = module is consumer
    segment_signature = inspect.signature(module.attend_segment.fn)
    # left's pair and right's have the same
    tile_signature = inspect.signature((consumer.attend_tile if is_few else halves.left_pair).fn)
    store_signature = inspect.signature(module.store_rows.fn)

    def steps(begin, end, step=1):
        # the one kernel counts tiles, the other tokens
        size = 1 if is_few else KEYS
        assert begin % size == 0
        assert end % size == 0 or end == record.segment.kv_len
        record.segment.keys = int(begin) // size, -(-int(end) // size)
        return record.steps(begin, end, step)

    def attend_tile(*given):
        named = tile_signature.bind(*given).arguments
        record.segment.steps.append((int(named["k"]), int(named["first"]) // KEYS))
        record.segment.query_freed += bool(named["is_last"])
        return tuple(named[name] for name in ("o", "m", "l", "c"))

    def sum_of_both(shared, sums, turn, SIDE):
        record.segment.summed.append(int(turn))
        return sums

    def attend_segment(*given):
        named = segment_signature.bind(*given).arguments
        sequence = (int(value) for value in named["place"][:1] + named["place"][2:])
        unit = shares.Unit(*(int(value) for value in named["unit"]))
        segments = record.computed.segments
        assert len(segments) < _MOST_SEGMENTS, "a program runs for ever"
        segments.append(Segment(*sequence, unit, int(named["tile"])))
        return inner["attend_segment"](*given)

    def normalise(o, m, sums, *rest):
        return State(1), None

    def add_pieces(o, lse2, worker, count, *rest):
        return State(int(count)), None

    def store_rows(*given):
        named = store_signature.bind(*given).arguments
        record.computed.stored[len(record.computed.segments) - 1] = named["o"].pieces
        k = int(named["k"]) if is_few else None
        record.segment.freed.append((k, bool(named["has_keys"])))

    def release(*given):
        k, has_keys = (int(given[1]), given[2]) if is_few else (None, given[1])
        record.segment.freed.append((k, bool(has_keys)))

    def publish(o, lse2, unit, worker, *rest):
        slot = int(slots["slot_of"](worker, worker - unit.first))
        record.computed.published[len(record.computed.segments) - 1] = slot

    def unite(first_worker, count, mine, rows, outputs, partials, ROWS, COLUMNS, NUM_HEADS, STORE_LSE):
        rows = tuple(int(value) for value in rows)
        record.computed.united.append(Union(int(first_worker), int(count), int(mine), rows, STORE_LSE))

    slots = functions(pieces, ("slot_of",), names, mutant)
    stand_ins = {
        "mbarrier": SimpleNamespace(wait=record.wait, arrive=record.arrive), "arrive": record.arrive,
        "row_layout": lambda rows: None, "transposed": lambda rows: None,
        "attend_tile": attend_tile, "left_pair": attend_tile, "right_pair": attend_tile,
        "sum_of_both": sum_of_both, "normalise": normalise, "add_pieces": add_pieces,
        "store_rows": store_rows, "release": release, "publish": publish, "unite": unite,
    }  # fmt: skip
    if not is_few:
        stand_ins |= functions(many_loader, ("keys_of",), names, mutant)
    inner = functions(module, ("attend_segment",), names | stand_ins | {"range": steps}, mutant)
    stand_ins["attend_segment"] = attend_segment
    return functions(module, ("attend_share",), names | stand_ins, mutant)["attend_share"]


def _load_functions(
    is_many: bool, record: Record, names: dict[str, Any], mutant: Mutant | None
) -> dict[str, Any]:
    """The functions that load a kernel's keys, each for pages of its own kind, by name; they note down what they load."""

    def load_query_of(shared, first_row, place, turn, queries, ROWS, NUM_HEADS):
        load_query(shared, place.q_begin * NUM_HEADS + first_row, turn, queries)

    def load_query(shared, q_row, turn, queries):
        assert turn == len(record.loads) < _MOST_SEGMENTS, "a query out of turn"
        record.loads.append(Load(int(q_row)))

    def steps(begin, end, step=1):
        record.loads[-1].keys = int(begin), int(end)
        return record.steps(begin, end, step)

    def page_of(tile, table_row, *rest):
        return table_row + tile

    def load_one(shared, rows, exists, k, pages):
        record.loads[-1].tiles.append((int(k), divmod(int(rows), _SEQUENCE)))
        record.loads[-1].tokens.append(exists)

    def load_of_pair(shared, TILE_OF_PAIR, row, exists, phase, tiles):
        if exists:
            place = int(phase) ^ 1, int(TILE_OF_PAIR)
            record.loads[-1].tiles.append((place, divmod(int(row), _SEQUENCE)))

    def rows_of(first, key_end, table_row, *rest):
        assert first % KEYS == 0
        return table_row + first // KEYS, min(max(int(key_end - first), 0), KEYS)

    def gather_of_pair(shared, TILE_OF_PAIR, rows, exists, phase, pages):
        load_of_pair(shared, TILE_OF_PAIR, rows, exists, phase, None)
        if exists:
            record.loads[-1].tokens.append(exists)

    stand_ins = names | {"range": steps, "page_of": page_of, "rows_of": rows_of}
    if not is_many:
        stand_ins |= {"load_query": load_query_of, "load_tile": load_one}
        return functions(few_loader, ("load_share",), stand_ins, mutant)
    stand_ins |= functions(many_loader, ("keys_of",), names, mutant)
    stand_ins |= {"load_query": load_query, "load_tile": load_of_pair, "gather_tile": gather_of_pair}
    load = functions(many_loader, ("load_share",), stand_ins, mutant)
    return load | functions(many_gather, ("gather_share",), stand_ins, mutant)
