"""WIDTH: an offset past 2^31 or 2^32, in bytes or in numbers, leads to the same result as a small one.

One large pool per process and device is reserved once.  On a CPU it is address space: only pages in use and decoys are ever
touched.  Where an address that was cut to 32 bits would land, other finite data lies, so that it gives a wrong result and not
a fault by luck.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedmla.conformance.builder import Call
from pagedmla.conformance.changed_calls import check_elsewhere
from pagedmla.conformance.inputs import KV_SCALE, store
from pagedmla.conformance.properties.arch import run_or_refuse
from pagedmla.conformance.properties.mem import nan_outputs
from pagedmla.conformance.properties.property import Property, Scope
from pagedmla.conformance.spec import BatchSpec
from pagedmla.conformance.strategies import seeds
from pagedmla.conformance.subject import Refused, Result, Subject

ABOVE = 2**32 + 2**26
"""Bytes of the cache from its first page on: past 2^32, with room for a few pages behind."""
_BELOW = (2**32, 2**31, 0)
"""Bytes mapped before the cache's first page, the first that fits: a product that turned negative looks there.  2^31 is enough
for offsets in bytes, 2^32 for offsets in numbers of two bytes."""
# left for whatever else runs on the device
_MARGIN = 2**32
_BORDERS = ("2^31 numbers", "2^31 bytes", "2^32 bytes")
# keeps 16 bytes' alignment in every dtype
_ALIGNED = 16


@st.composite
def _high_pages(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, int, int, int, Any]:
    """A batch of few pages; a border in bytes; how many pages lie below it; the seed of their order; options."""
    page_size = scope.configuration.spec((1,)).page_size
    keys = st.integers(1, max(40, 2 * page_size + 1))
    seq_lens = tuple(draw(st.lists(keys, min_size=1, max_size=3)))
    spec = scope.configuration.spec(seq_lens, seed=draw(seeds), layout_seed=draw(seeds))
    size = spec.cache_dtype.itemsize
    borders = [border for border in (2**31, 2**31 * size, 2**32, ABOVE) if border <= ABOVE]
    border = draw(st.sampled_from(sorted(set(borders))))
    return spec, border, draw(st.integers(0, 4)), draw(seeds), draw(scope.options())


def _high_pages_are_like_low_ones(subject: Subject, example: tuple[BatchSpec, int, int, int, Any]) -> None:
    spec, border, below, seed, options = example
    subject.require(spec, options)
    call = subject.build(spec)
    low = subject.run(call, options)
    subject.check(low, spec, options)
    cache = _large_cache(call)
    counts = [-(-length // spec.page_size) for length in spec.seq_lens]
    bytes_of_page = cache.stride(0) * cache.element_size()
    first = border // bytes_of_page - below
    first = max(0, min(first, len(cache) - sum(counts)))
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
    pages = [first + place for place in order.tolist()]
    _write_decoys(cache, pages)
    table, places = torch.full_like(call.block_table, -1), iter(pages)
    for sequence, count in enumerate(counts):
        for column in range(count):
            page = next(places)
            cache[page] = call.kv_cache[int(call.block_table[sequence, column])]
            table[sequence, column] = page
    high = subject.run(replace(call, kv_cache=cache, block_table=table), options)
    note = f"its pages moved to {min(pages)} .. {max(pages)} of a pool of {len(cache)} pages"
    check_elsewhere(subject, low, high, spec, options, note)


@st.composite
def _far_strides(draw: st.DrawFn, scope: Scope) -> tuple[BatchSpec, str, str, int, Any]:
    """A batch of two or three pages; which of its tensors is spread out, past what, by how much more; options."""
    page_size = scope.configuration.spec((1,)).page_size
    counts = draw(st.sampled_from(((1, 1), (1, 2), (2, 1), (1, 1, 1))))
    seq_lens = tuple((count - 1) * page_size + draw(st.integers(1, page_size)) for count in counts)
    spec = scope.configuration.spec(seq_lens, seed=draw(seeds), layout_seed=draw(seeds), spare_pages=0)
    tensors = ("kv_cache", "q", "out") if "out" in scope.adapter.features else ("kv_cache", "q")
    name, border = draw(st.sampled_from(tensors)), draw(st.sampled_from(_BORDERS))
    return spec, name, border, draw(st.integers(1, 4)), draw(scope.options())


def _far_strides_are_like_packed(subject: Subject, example: tuple[BatchSpec, str, str, int, Any]) -> None:
    spec, name, border, extra, options = example
    subject.require(spec, options)
    call = subject.build(spec)
    packed = subject.run(call, options)
    if name == "out":
        out, lse = nan_outputs(subject, spec, options)
        far = _spread(out, border, extra)
        run_or_refuse(subject, call, options, far, lse)
        result = Result(far, None)
    else:
        far = _spread(getattr(call, name), border, extra)
        change: dict[str, Any] = {name: far}
        result = run_or_refuse(subject, replace(call, **change), options)
    note = f"{name} with a first stride of {far.stride(0)} numbers, its last step past {border}"
    check_elsewhere(subject, packed, result, spec, options, note)


@lru_cache(maxsize=1)
def _pool(device: torch.device) -> tuple[Tensor, int]:
    """Bytes, and how many of them lie before the cache's first page.  Kept: reserving it anew for each example is slow.

    Raises:
        Refused: there is no room for it.
    """
    for below in _BELOW:
        size = below + ABOVE
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < size + _MARGIN:
            continue
        try:
            return torch.empty(size, dtype=torch.uint8, device=device), below
        except RuntimeError:
            # not in one piece, or more addresses than the system hands out: a smaller one may be there
            continue
    raise Refused(f"no room on {device} for a pool of {ABOVE} bytes, which reaches past 2^32")


def _large_cache(call: Call) -> Tensor:
    """A pool that reaches past 2^32 bytes, of pages like the call's: [many, page_size, head_dim_qk]."""
    shape = call.kv_cache.shape[1:]
    numbers, first = _numbers(call.kv_cache)
    count = (len(numbers) - first) // shape.numel()
    return numbers[first : first + count * shape.numel()].view(count, *shape)


def _numbers(like: Tensor) -> tuple[Tensor, int]:
    """The pool as numbers of ``like``'s dtype, and which of them is the cache's first."""
    pool, below = _pool(like.device)
    return pool.view(like.dtype), below // like.element_size()


def _spread(tensor: Tensor, border: str, extra: int) -> Tensor:
    """A copy of ``tensor`` in the pool, of which the last step of the first axis begins past ``border``."""
    numbers, _ = _numbers(tensor)
    size = tensor.element_size()
    past = {"2^31 numbers": 2**31, "2^31 bytes": 2**31 // size, "2^32 bytes": 2**32 // size}[border]
    stride = -(-past // (len(tensor) - 1) // _ALIGNED) * _ALIGNED + extra * _ALIGNED
    if (len(tensor) - 1) * stride + tensor[0].numel() > len(numbers):
        raise Refused(f"{len(tensor)} steps of {stride} numbers do not fit into the pool")
    inner = torch.empty(tensor.shape[1:], dtype=tensor.dtype, device="meta").stride()
    # decoys where a 32-bit product would look, other numbers than anyone's
    for step in range(1, len(tensor)):
        for at in _wrapped(step * stride, tensor.element_size()):
            if at >= 0 and at + tensor[0].numel() <= len(numbers):
                numbers[at : at + tensor[0].numel()] = _other_data(tensor[0].numel(), tensor)
    far = numbers.as_strided(tensor.shape, (stride, *inner))
    far.copy_(tensor)
    return far


def _write_decoys(cache: Tensor, pages: list[int]) -> None:
    """Finite data of nobody wherever 32-bit arithmetic, signed or not, on bytes or numbers, would look for ``pages``."""
    numbers, first = _numbers(cache)
    size = cache.stride(0)
    for page in pages:
        # a page across a border has tokens on either side of it
        for edge in (0, size - 1):
            for at in _wrapped(page * size + edge, cache.element_size()):
                start = first + at - edge
                if start >= 0 and start + size <= len(numbers):
                    numbers[start : start + size] = _other_data(size, cache)


def _wrapped(offset: int, size: int) -> Iterator[int]:
    """Where ``offset``, in numbers of ``size`` bytes, seems to be once it was cut to 31 or 32 bits; in numbers."""
    for width in {1, size}:
        for bits in (31, 32):
            low = offset * width % 2**bits
            yield from {place // width for place in (low, low - 2**bits)} - {offset}


def _other_data(count: int, like: Tensor) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    return store(values, like.dtype, KV_SCALE).to(like.device)


PROPERTIES = (
    Property(
        "WIDTH",
        "high-pages",
        "pages around and past 2^31 bytes, 2^31 numbers and 2^32 bytes of the pool give the values of the float64 oracle, and "
        "the bits of low pages where one kernel is claimed to run both",
        _high_pages,
        _high_pages_are_like_low_ones,
        share=0.4,
    ),
    Property(
        "WIDTH",
        "far-strides",
        "pages, query rows and output rows spread over more than 2^31 numbers or bytes give the values of the float64 oracle, "
        "and the bits of packed ones where one kernel is claimed to run both, or are refused",
        _far_strides,
        _far_strides_are_like_packed,
        needs=frozenset({"strides"}),
        share=0.4,
    ),
)
