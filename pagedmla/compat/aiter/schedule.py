"""The work schedule of AITER's persistent mode, computed on the tensors' device without reading it.

**Tiles.**  A tile is up to ``query_tile`` query tokens of one request; tile k of request b is b * tiles_per_request + k.  It
needs the pages that its last token sees (all of the request's, where queries are not causal), counted in *blocks* of
``kv_granularity`` pages.  A tile whose tokens see nothing counts as one block, so that somebody writes its rows; a tile without
tokens counts as none.

**Shares.**  All blocks are laid end to end, T of them.  Worker w of W takes blocks w*T//W up to (w+1)*T//W: no worker has more
than one block more than another, whatever the lengths are.  A *work* is what a worker has of one tile.  Tiles begin and shares
begin, and at each of these places one work begins, so there are at most tiles + W - 1 works.  A tile that is one work is
written at once; the others are partial, 2 * (W - 1) at most, since each of the W - 1 places between shares makes one work two.

**Fields of a work** (i32 [8]), as AITER has them:

    0  request
    1  first row of its partial state in the partial buffers, or -1: it writes the final rows itself
    2, 3  query tokens [begin, end) of the packed batch
    4, 5  PAGES [begin, end): places in ``kv_indices``
    6  TOKENS from the end of the last of these pages to the end of the request.  Negative where the request ends within that
       page: the tokens that are missing there.  So (end - begin) * page_size + min(field 6, 0) tokens are to be read, and the
       token at distance d >= 1 from the request's end is seen by a query that has fewer than d query tokens after it.
    7  0

Works of a worker are consecutive, those of a tile too; partial rows are given out in the order of the works, as many as the
tile has tokens.  Past the last work all is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagedmla.compat.aiter.paged_kv import page_ranges, token_counts

# packed query rows (tokens times heads) of a tile: what AITER's kernels give to a workgroup
_TILE_ROWS = 128
_INT32_MAX = 2**31 - 1


def query_tile(num_heads: int) -> int:
    """Query tokens of a tile for ``num_heads`` heads."""
    return max(1, _TILE_ROWS // num_heads)


@dataclass(frozen=True)
class ScheduleSizes:
    """How much a schedule takes at most.

    Attributes:
        tiles: query tiles of all requests.
        works: rows of the work list.
        partials: works that leave a partial state.
    """

    tiles: int
    works: int
    partials: int

    @classmethod
    def of(cls, num_requests: int, tiles_per_request: int, num_workers: int) -> ScheduleSizes:
        """The sizes for ``num_workers`` >= 1 workers."""
        tiles = num_requests * tiles_per_request
        works = tiles + num_workers - 1
        return cls(tiles, works, min(works, 2 * (num_workers - 1)))


@dataclass(frozen=True)
class Schedule:
    """A schedule, i64 on the device of the lengths.

    Attributes:
        work_indptr: [num_workers + 1], first work of each worker.
        work_info: [works, 8], see above.
        reduce_indptr: [tiles + 1], first entry of each tile in ``reduce_partial_map``; a tile that is one work has none.
        reduce_final_map: [tiles, 2], query tokens [begin, end) of each tile.
        reduce_partial_map: [partials], first row of each partial state; -1 past the last.
    """

    work_indptr: Tensor
    work_info: Tensor
    reduce_indptr: Tensor
    reduce_final_map: Tensor
    reduce_partial_map: Tensor


@dataclass(frozen=True)
class _Tiles:
    """Of each tile, i64 [tiles].

    Attributes:
        request: the request.
        q_begin, q_end: query tokens.
        kv_begin: the request's first place in ``kv_indices``.
        pages: pages that the tile needs.
        length: the request's tokens.
        ends: blocks of all tiles up to and including this one.
        firsts: blocks of the tiles before it.
    """

    request: Tensor
    q_begin: Tensor
    q_end: Tensor
    kv_begin: Tensor
    pages: Tensor
    length: Tensor
    ends: Tensor
    firsts: Tensor


def make_schedule(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_last_page_lens: Tensor,
    *,
    page_size: int,
    causal: bool,
    tile_tokens: int | None,
    tiles_per_request: int,
    kv_granularity: int,
    num_workers: int,
    most_workers: int | None = None,
) -> Schedule:
    """The schedule for the lengths that the tensors hold; at least one request.

    Args:
        qo_indptr: i32 [num_requests + 1], query tokens.
        kv_indptr: i32 [num_requests + 1], pages.
        kv_last_page_lens: i32 [num_requests], tokens; bounded to 1..page_size.
        page_size: tokens in a page.
        causal: whether a tile may leave out pages past its last token's last key.
        tile_tokens: query tokens of a tile; None: a request is one tile, however many it has.
        tiles_per_request: tiles that a request has room for; query tokens past them are in no tile.
        kv_granularity: pages of a block; a request is cut at multiples of it.
        num_workers: workers, of which the last ones have nothing where there are fewer blocks.
        most_workers: how many of them get works at most.
    """
    tiles = _tiles(
        qo_indptr,
        kv_indptr,
        kv_last_page_lens,
        page_size,
        causal,
        tile_tokens,
        tiles_per_request,
        kv_granularity,
    )
    total = tiles.ends[-1:]
    shares = _share_bounds(total, num_workers, most_workers or num_workers)
    begins = _work_begins(tiles, shares[1:-1], total)
    ends = torch.cat([begins[1:], total])
    real = begins < total

    tile = torch.searchsorted(tiles.ends, begins, right=True).clamp_(max=tiles.ends.shape[0] - 1)
    begin, end = begins - tiles.firsts[tile], ends - tiles.firsts[tile]
    partial = real & ((begin > 0) | (ends < tiles.ends[tile]))
    q_begin, q_end = tiles.q_begin[tile], tiles.q_end[tile]
    rows = torch.where(partial, q_end - q_begin, 0)
    slot = torch.where(partial, rows.cumsum(0) - rows, -1)
    kv_begin = tiles.kv_begin[tile]
    last_page = torch.minimum(end * kv_granularity, tiles.pages[tile])
    fields = [
        tiles.request[tile],
        slot,
        q_begin,
        q_end,
        kv_begin + torch.minimum(begin * kv_granularity, last_page),
        kv_begin + last_page,
        tiles.length[tile] - last_page * page_size,
        torch.zeros_like(slot),
    ]
    work_info = torch.where(real[:, None], torch.stack(fields, 1), 0)

    # entry p of the partial map belongs to the first work up to which there are p + 1 partial ones
    so_far = partial.cumsum(0)
    sizes = ScheduleSizes.of(qo_indptr.shape[0] - 1, tiles_per_request, num_workers)
    entries = torch.arange(sizes.partials, device=slot.device)
    owner = torch.searchsorted(so_far, entries, right=True).clamp_(max=so_far.shape[0] - 1)
    works_up_to = torch.searchsorted(begins, tiles.ends)
    return Schedule(
        work_indptr=torch.searchsorted(begins, shares),
        work_info=work_info,
        reduce_indptr=pad(pad(so_far, (1, 0))[works_up_to], (1, 0)),
        reduce_final_map=torch.stack([tiles.q_begin, tiles.q_end], 1),
        reduce_partial_map=torch.where(entries < so_far[-1], slot[owner], -1),
    )


def _tiles(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_last_page_lens: Tensor,
    page_size: int,
    causal: bool,
    tile_tokens: int | None,
    tiles_per_request: int,
    kv_granularity: int,
) -> _Tiles:
    starts = qo_indptr[:-1].to(torch.int64)[:, None]
    stops = torch.maximum(qo_indptr[1:].to(torch.int64)[:, None], starts)
    numbers = torch.arange(tiles_per_request, device=qo_indptr.device)
    q_begin = torch.minimum(starts + numbers * (tile_tokens or 0), stops)
    q_end = stops if tile_tokens is None else torch.minimum(q_begin + tile_tokens, stops)

    first_page, num_pages = page_ranges(kv_indptr, _INT32_MAX)
    length = token_counts(num_pages, kv_last_page_lens, page_size)[:, None]
    # a causal tile's last token is followed by this many of its request, and sees as many keys less
    after = stops - q_end if causal else torch.zeros_like(q_end)
    pages = ((length - after).clamp_(min=0) + (page_size - 1)) // page_size
    blocks = ((pages + (kv_granularity - 1)) // kv_granularity).clamp_(min=1)
    blocks = torch.where(q_end > q_begin, blocks, 0).flatten()
    ends = blocks.cumsum(0)

    def of_tiles(per_request: Tensor) -> Tensor:
        return per_request.to(torch.int64).expand(-1, tiles_per_request).flatten()

    return _Tiles(
        request=of_tiles(torch.arange(starts.shape[0], device=starts.device)[:, None]),
        q_begin=q_begin.flatten(),
        q_end=q_end.flatten(),
        kv_begin=of_tiles(first_page[:, None]),
        pages=pages.flatten(),
        length=of_tiles(length),
        ends=ends,
        firsts=ends - blocks,
    )


def _share_bounds(total: Tensor, num_workers: int, most_workers: int) -> Tensor:
    """Where each worker's blocks begin, and the end of the last one's: i64 [num_workers + 1]."""
    workers = total.clamp(1, min(num_workers, most_workers))
    numbers = torch.arange(num_workers + 1, device=total.device)
    return torch.minimum(numbers, workers) * total // workers


def _work_begins(tiles: _Tiles, shares: Tensor, total: Tensor) -> Tensor:
    """The block that each work begins with, rising, ``total`` past the last work: i64 [tiles + num_workers - 1]."""
    tile_begins = torch.where(tiles.ends > tiles.firsts, tiles.firsts, total)
    begins = torch.cat([tile_begins, shares]).sort().values
    # a share that begins with a tile begins one work, not two
    following = torch.cat([begins[1:], total])
    return torch.where(begins < following, begins, total).sort().values
