"""Holds a work plan, whoever made it, against the invariants of ``pagedmla.paging.work_plan``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pagedmla.paging.work_plan import Segment, Unit


def check_cover(segments: Iterable[Segment], units: Sequence[Unit]) -> list[str]:
    """Every breach of the invariants 1 and 3 to 5 of ``work_plan``, in words; none for a right plan.

    Args:
        segments: of any schedule, in any order; from a device as well as from ``work_plan``.
        units: all units of the call.
    """
    found = _shared_rows(units)
    of_unit: dict[int, list[Segment]] = defaultdict(list)
    of_slot: dict[int, list[Segment]] = defaultdict(list)
    for segment in segments:
        of_unit[segment.unit].append(segment)
        if segment.slot is not None:
            of_slot[segment.slot].append(segment)
    for slot, writers in sorted(of_slot.items()):
        if len(writers) > 1 or slot < 0:
            found.append(f"slot {slot} is written by workers {[writer.worker for writer in writers]}")
    known = {unit.number for unit in units}
    found += [f"unit {number} does not exist" for number in sorted(of_unit.keys() - known)]
    for unit in units:
        # by worker first: that tiles and slots then rise is what is to be shown
        pieces = sorted(of_unit[unit.number], key=lambda piece: piece.worker)
        found += [f"unit {unit.number} {breach}" for breach in _breaches(unit, pieces)]
    return found


def _breaches(unit: Unit, pieces: list[Segment]) -> list[str]:
    if not pieces:
        return ["has no writer"]
    found = []
    times = [0] * unit.kv_tiles
    for piece in pieces:
        if not 0 <= piece.tile_begin <= piece.tile_end <= unit.kv_tiles:
            found.append(f"has {unit.kv_tiles} tiles, not {piece.tile_begin}..{piece.tile_end}")
            continue
        for tile in range(piece.tile_begin, piece.tile_end):
            times[tile] += 1
    # the one tile of a unit without keys may be taken or not
    least = 1 if unit.key_tiles else 0
    found += [f"tile {tile} is covered {n} times" for tile, n in enumerate(times) if not least <= n <= 1]
    if [piece.worker for piece in pieces] != list(range(pieces[0].worker, pieces[0].worker + len(pieces))):
        found.append(f"is cut among workers {[piece.worker for piece in pieces]}, which are not consecutive")
    slots = [piece.slot for piece in pieces if piece.slot is not None]
    if len(pieces) == 1 and slots:
        found.append(f"is whole, and yet goes to slot {slots[0]}")
    if len(pieces) > 1 and len(slots) < len(pieces):
        found.append(f"has {len(pieces)} pieces and {len(slots)} slots")
    if slots != sorted(slots):
        found.append(f"has slots {slots}, which do not rise")
    if any(before.tile_end > after.tile_begin for before, after in pairwise(pieces)):
        found.append("has pieces that are not in KV order")
    return found


def _shared_rows(units: Sequence[Unit]) -> list[str]:
    found = []
    end, owner = 0, -1
    for unit in sorted(units, key=lambda unit: unit.row_begin):
        if unit.row_begin < end:
            found.append(f"row {unit.row_begin} belongs to units {owner} and {unit.number}")
        if unit.row_end > end:
            end, owner = unit.row_end, unit.number
    return found
