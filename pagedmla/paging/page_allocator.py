"""Which pages of a pool are free, on the host: reference counts, so that sequences can share pages."""

from __future__ import annotations

from collections.abc import Iterable

from pagedmla.contract.errors import InvalidArgument


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than were asked for; nothing was allocated."""


class PageAllocator:
    """Hands out page ids of a pool of ``num_pages`` pages and takes them back.

    A page is held by as many sequences as its reference count says; it is free again when the last one releases it.
    The most recently freed page is handed out first, since it is the likeliest to be in a cache.
    """

    def __init__(self, num_pages: int) -> None:
        self._free: list[int] = []
        self._count: list[int] = []
        self.grow(num_pages)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return len(self._count)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def reference_count(self, page: int) -> int:
        """How many holders ``page`` has; 0 for a free one."""
        self._check(page)
        return self._count[page]

    def grow(self, new_num_pages: int) -> None:
        """Adds free pages until the pool has ``new_num_pages``.

        Raises:
            InvalidArgument: the pool would shrink.
        """
        old = len(self._count)
        if new_num_pages < old:
            raise InvalidArgument(
                "num_pages", "new_num_pages", f"at least the present {old} pages", str(new_num_pages)
            )
        self._count += [0] * (new_num_pages - old)
        # the free list is a stack: low ids come out first
        self._free[:0] = range(new_num_pages - 1, old - 1, -1)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free pages, each with one holder.

        Raises:
            InvalidArgument: ``count`` is negative.
            OutOfPages: fewer are free; none is taken.
        """
        if count < 0:
            raise InvalidArgument("count", "count", "a number of pages >= 0", str(count))
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._count[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a holder to each of ``pages``.

        Raises:
            InvalidArgument: a page outside the pool, or a free one.
        """
        for page in pages:
            self._check(page, held=True)
            self._count[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder from each of ``pages``; a page without one is free again.

        Raises:
            InvalidArgument: a page outside the pool, or one that is already free.
        """
        for page in pages:
            self._check(page, held=True)
            self._count[page] -= 1
            if self._count[page] == 0:
                self._free.append(page)

    def _check(self, page: int, held: bool = False) -> None:
        if not 0 <= page < len(self._count):
            raise InvalidArgument("page", "pages", f"page ids in 0..{len(self._count) - 1}", str(page))
        if held and self._count[page] == 0:
            raise InvalidArgument("page", "pages", "pages that somebody holds", f"{page}, which is free")
