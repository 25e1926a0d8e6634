"""``mla_reduce_v1``: partial states of cut tiles become final rows, in AITER's buffers, without reading the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagedmla.compat.aiter.checks import matrix, tensor, vector, whole
from pagedmla.contract.errors import InvalidArgument, check_type
from pagedmla.decode import merge_states

_FINAL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def mla_reduce_v1(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor | None,
    reduce_partial_map: torch.Tensor,
    max_seqlen_q: int,
    num_kv_splits: int,
    final_output: torch.Tensor,
    final_lse: torch.Tensor | None = None,
) -> None:
    """Merges the partial states of each tile and writes its final rows.

    Tile t has the states reduce_partial_map[reduce_indptr[t] : reduce_indptr[t + 1]], each the first of as many rows as the
    tile has query tokens.  Final rows of a tile with one state or none stay as they are: whoever had the whole tile wrote them.
    States are merged two by two in the order of the map, so the same buffers give the same bits.  Allocates about twice what
    the states take.

    Args:
        partial_output: f32 [rows, num_heads, dv] or [rows, 1, num_heads, dv], NORMALISED: attention over a state's own keys.
            (AITER's docstring calls them unnormalised; its arithmetic does not.)  Any number of heads, any dv.
        partial_lse: f32 [rows, num_heads], [rows, 1, num_heads] or [rows, 1, num_heads, 1]; natural logarithm.  A state without
            keys, (anything, -inf), adds nothing; +inf counts as -inf.
        reduce_indptr: i32 [tiles + 1].
        reduce_final_map: i32 [tiles, 2], final rows [begin, end) of each tile; None: tile t has rows t * max_seqlen_q and on.
        reduce_partial_map: i32 [at least reduce_indptr[-1]], rows of the partial buffers.
        max_seqlen_q: most query tokens of a tile; rows of a tile past it are left as they are.
        num_kv_splits: the size of a scratch memory of AITER's; a tile may have any number of states here.
        final_output: bf16, fp16 or f32 [final rows, num_heads, dv], written; may be strided.
        final_lse: f32 [final rows, num_heads], written; may be strided.

    Raises:
        InvalidArgument: a wrong rank, shape, dtype or device, or a number out of range.
    """
    whole("num_kv_splits", num_kv_splits, 0)
    num_tokens = whole("max_seqlen_q", max_seqlen_q, 1)
    outs, lses = _check_partials(partial_output, partial_lse)
    _check_final(final_output, final_lse, outs)
    device = outs.device
    num_tiles = vector("reduce_indptr", reduce_indptr, 1, device).shape[0] - 1
    num_entries = vector("reduce_partial_map", reduce_partial_map, 0, device).shape[0]
    if reduce_final_map is not None:
        matrix("reduce_final_map", reduce_final_map, num_tiles, 2, device)
    if 0 in (num_tiles, num_entries, outs.shape[0], outs.shape[1], final_output.shape[0]):
        return
    # bounded, so that nothing in the maps leads out of the buffers
    indptr = reduce_indptr.to(torch.int64).clamp(0, num_entries).cummax(0).values
    counts = indptr.diff()
    most = _most_states(counts, num_entries)
    states = _States(indptr, reduce_partial_map.to(torch.int64), outs, lses)
    while most > 1:
        states = _merge_pairs(states, num_tokens)
        most = (most + 1) // 2
    sources = _final_sources(states, counts, reduce_final_map, num_tokens, final_output.shape[0])
    _write(sources, states, final_output, final_lse)


@dataclass(frozen=True)
class _States:
    """Partial states of all tiles.

    Attributes:
        indptr: i64 [tiles + 1], first entry of each tile.
        first_rows: i64 [entries], first row of each entry in ``outs`` and ``lses``.
        outs: f32 [rows, num_heads, dv].
        lses: f32 [rows, num_heads].
    """

    indptr: Tensor
    first_rows: Tensor
    outs: Tensor
    lses: Tensor

    def rows(self, entries: Tensor, num_tokens: int) -> Tensor:
        """Rows of ``entries``, i64 [len(entries) * num_tokens]; entries and rows that do not exist lead to some that do."""
        first = self.first_rows[entries.clamp(0, self.first_rows.shape[0] - 1)]
        tokens = torch.arange(num_tokens, device=first.device)
        return (first[:, None] + tokens).clamp_(0, self.outs.shape[0] - 1).flatten()


def _most_states(counts: Tensor, num_entries: int) -> int:
    # values on a CPU are at hand; elsewhere one tile may have all entries
    return max(counts.tolist()) if counts.device.type == "cpu" else num_entries


def _merge_pairs(states: _States, num_tokens: int) -> _States:
    """Entries 2i and 2i + 1 of each tile become its entry i."""
    num_entries, num_tiles = states.first_rows.shape[0], states.indptr.shape[0] - 1
    indptr = pad(((states.indptr.diff() + 1) // 2).cumsum(0), (1, 0))
    # halves that are rounded up: at most one more for every two tiles
    size = min(num_entries, (num_entries + num_tiles) // 2)
    entries = torch.arange(size, device=indptr.device)
    tile = torch.searchsorted(indptr[1:], entries, right=True).clamp_(max=num_tiles - 1)
    left = states.indptr[tile] + 2 * (entries - indptr[tile])
    has_right = (left + 1 < states.indptr[tile + 1])[:, None].expand(-1, num_tokens).reshape(-1, 1)
    left_rows, right_rows = states.rows(left, num_tokens), states.rows(left + 1, num_tokens)
    out, lse = merge_states(
        [states.outs[left_rows], states.outs[right_rows]],
        [states.lses[left_rows], torch.where(has_right, states.lses[right_rows], -torch.inf)],
    )
    return _States(indptr, entries * num_tokens, out, lse)


def _final_sources(
    states: _States, counts: Tensor, final_map: Tensor | None, num_tokens: int, num_rows: int
) -> Tensor:
    """Where in ``states`` each final row comes from, -1 for one that stays: i64 [num_rows]."""
    num_tiles = counts.shape[0]
    if final_map is None:
        begin = torch.arange(num_tiles, device=counts.device) * num_tokens
        end = begin + num_tokens
    else:
        begin, end = final_map[:num_tiles].to(torch.int64).unbind(1)
    place = begin[:, None] + torch.arange(num_tokens, device=counts.device)
    written = (counts[:, None] > 1) & (place < end[:, None]) & (place >= 0) & (place < num_rows)
    # one spare place takes what is not written
    target = torch.where(written, place, num_rows).flatten()
    sources = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=counts.device)
    return sources.scatter_(0, target, states.rows(states.indptr[:-1], num_tokens))[:num_rows]


def _write(sources: Tensor, states: _States, final_output: Tensor, final_lse: Tensor | None) -> None:
    written, sources = sources >= 0, sources.clamp(min=0)
    merged = states.outs[sources].to(final_output.dtype)
    final_output.copy_(torch.where(written[:, None, None], merged, final_output))
    if final_lse is not None:
        final_lse.copy_(torch.where(written[:, None], states.lses[sources], final_lse))


def _check_partials(partial_output: Tensor, partial_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Views [rows, num_heads, dv] and [rows, num_heads] of the partial buffers."""
    for name, value in (("partial_output", partial_output), ("partial_lse", partial_lse)):
        check_type(name, value, Tensor)
    outs, lses = partial_output, partial_lse
    if outs.dim() == 4 and outs.shape[1] == 1:
        outs = outs.squeeze(1)
    tensor("partial_output", outs, 3, (torch.float32,), None)
    heads = (outs.shape[0], outs.shape[1])
    if tuple(lses.shape) in (heads, (heads[0], 1, heads[1]), (*heads, 1), (heads[0], 1, heads[1], 1)):
        lses = lses.reshape(heads)
    tensor("partial_lse", lses, 2, (torch.float32,), outs.device)
    if tuple(lses.shape) != heads:
        raise InvalidArgument(
            "shape", "partial_lse", f"{list(heads)}, as partial_output", str(list(lses.shape))
        )
    return outs, lses


def _check_final(final_output: Tensor, final_lse: Tensor | None, outs: Tensor) -> None:
    tensor("final_output", final_output, 3, _FINAL_DTYPES, outs.device)
    if final_output.shape[1:] != outs.shape[1:]:
        wanted = f"[final rows, {outs.shape[1]}, {outs.shape[2]}], as partial_output"
        raise InvalidArgument("shape", "final_output", wanted, str(list(final_output.shape)))
    if final_lse is not None:
        tensor("final_lse", final_lse, 2, (torch.float32,), outs.device)
        if final_lse.shape != final_output.shape[:2]:
            wanted = f"{list(final_output.shape[:2])}, as final_output"
            raise InvalidArgument("shape", "final_lse", wanted, str(list(final_lse.shape)))
