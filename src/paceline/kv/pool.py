"""Pages of the KV cache: which are free, and how many owners the others have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class PagePool:
    """``num_pages`` pages with reference counts; ids are 0 .. num_pages-1.

    A freed page is the next to be handed out (last in, first out), and a page that was never used only when no freed
    one is left: what was touched once stays in use and untouched memory stays untouched. Not thread-safe.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self._references: list[int] = []  # of the pages handed out at least once
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self.num_pages - len(self._references) + len(self._freed)

    @property
    def num_touched(self) -> int:
        """Pages that were handed out at least once: the pool's memory in use."""
        return len(self._references)

    def references(self, page: int) -> int:
        """Owners of a page."""
        assert 0 <= page < self.num_pages
        return self._references[page] if page < len(self._references) else 0

    def allocate(self) -> int | None:
        """A page with one owner, or None when all are owned."""
        if self._freed:
            page = self._freed.pop()
            self._references[page] = 1
            return page
        page = len(self._references)
        if page == self.num_pages:
            return None
        self._references.append(1)
        return page

    def share(self, page: int) -> None:
        """Adds an owner to an owned page."""
        assert self.references(page) > 0, f"page {page} is free and cannot be shared"
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Takes an owner from a page; the page is free when that was the last."""
        assert self.references(page) > 0, f"page {page} is free already"
        self._references[page] -= 1
        if self._references[page] == 0:
            self._freed.append(page)

    def check(self, owned: Iterable[int]) -> None:
        """Asserts that the books are right; ``owned`` lists the pages of all owners, a page once for each owner."""
        owners = Counter(owned)
        assert len(self._references) <= self.num_pages, "more pages than exist"
        freed = set(self._freed)
        assert len(freed) == len(self._freed), "a page is free twice"
        for page, count in enumerate(self._references):
            assert count == owners.pop(page, 0), f"page {page} counts {count} owners"
            assert (count == 0) == (page in freed), f"page {page} with {count} owners is on the wrong list"
        assert not owners, f"pages {sorted(owners)} have owners and were never handed out"
