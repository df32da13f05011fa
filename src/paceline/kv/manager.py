"""The page tables of the running sequences."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS
from paceline.kv.layout import pages_for
from paceline.kv.pool import PagePool


class KVManager:
    """Page tables of at most ``max_sequences`` sequences of at most ``max_tokens`` tokens over a pool.

    A sequence is a slot 0 .. max_sequences-1 between ``open`` and ``close``; it owns the pages of its table.
    ``table`` [max_sequences, p] i32 is row by row what a step's plan needs; entries past a sequence's pages are stale.
    ``capacity`` [max_sequences] lists the tokens that each slot's pages hold. ``num_changes`` counts changes of tables.
    Read all three, change none.
    """

    def __init__(self, num_pages: int, max_sequences: int, max_tokens: int) -> None:
        self.pool = PagePool(num_pages)
        self.table: NDArray[np.int32] = np.zeros((max_sequences, max(1, pages_for(max_tokens))), np.int32)
        self.capacity = [0] * max_sequences
        self.num_changes = 0
        self._pages: list[list[int]] = [[] for _ in range(max_sequences)]
        self._free_slots = list(range(max_sequences - 1, -1, -1))

    @property
    def num_pool_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_pages * PAGE_TOKENS

    def open(self) -> int:
        """A slot for a new sequence, without pages."""
        return self._free_slots.pop()

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Gives a sequence the pages to hold ``num_tokens``; False, and nothing changed, when too few are free."""
        pages = self._pages[slot]
        missing = pages_for(num_tokens) - len(pages)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        for _ in range(missing):
            page = self.pool.allocate()
            assert page is not None
            self.table[slot, len(pages)] = page
            pages.append(page)
        self.capacity[slot] = len(pages) * PAGE_TOKENS
        self.num_changes += 1
        return True

    def close(self, slot: int) -> None:
        """Ends a sequence: its pages lose an owner, the last page first, and the slot is free."""
        for page in reversed(self._pages[slot]):
            self.pool.release(page)
        self._pages[slot] = []
        self.capacity[slot] = 0
        self.num_changes += 1
        self._free_slots.append(slot)

    def pages(self, slot: int) -> tuple[int, ...]:
        """The pages of a sequence, in order of its tokens."""
        return tuple(self._pages[slot])

    def check(self) -> None:
        """Asserts that tables, capacities, slots and the pool agree."""
        assert len(set(self._free_slots)) == len(self._free_slots), "a slot is free twice"
        for slot, pages in enumerate(self._pages):
            assert self.capacity[slot] == len(pages) * PAGE_TOKENS, f"capacity of slot {slot}"
            assert self.table[slot, : len(pages)].tolist() == pages, f"table of slot {slot}"
            assert not (pages and slot in self._free_slots), f"slot {slot} is free and owns pages"
        self.pool.check(page for pages in self._pages for page in pages)
