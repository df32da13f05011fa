"""A store of pages in memory, of which tests may damage or forget some."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class Stored:
    """One entry of the store."""

    entry: int
    parent: int | None
    domain: bytes
    tokens: bytes
    page: NDArray[np.uint8]


class MemoryStore:
    """A store in memory: entries by id, of which tests may damage or forget some."""

    def __init__(self, kept: dict[int, Stored]) -> None:
        self.kept = kept
        self.next_entry = max(kept, default=0) + 1
        self.gone: list[int] = []
        self.damaged: set[int] = set()

    def entries(self) -> Iterator[Stored]:
        """Parents first: ids rise."""
        return iter([self.kept[entry] for entry in sorted(self.kept)])

    def put(self, parent: int | None, domain: bytes, tokens: bytes, page: NDArray[np.uint8]) -> int | None:
        """Keeps a copy."""
        if parent is not None and parent not in self.kept:
            return None
        for old in self.kept.values():
            if (old.parent, old.domain, old.tokens) == (parent, domain, tokens):
                return old.entry
        entry, self.next_entry = self.next_entry, self.next_entry + 1
        self.kept[entry] = Stored(entry, parent, domain, tokens, page.copy())
        return entry

    def read(self, entry: int, into: NDArray[np.uint8]) -> bool:
        """Copies, unless the entry is damaged or gone."""
        if entry not in self.kept:
            return False
        into[:] = 0xFF if entry in self.damaged else self.kept[entry].page
        if entry in self.damaged:
            self.forget(entry)
            return False
        return True

    def touch(self, entry: int) -> None:
        """Nothing to do."""

    def evicted(self) -> list[int]:
        """What is gone since asked last."""
        gone, self.gone = self.gone, []
        return gone

    def forget(self, entry: int) -> None:
        """Drops an entry and its descendants, children first."""
        for child in [old.entry for old in self.kept.values() if old.parent == entry]:
            self.forget(child)
        del self.kept[entry]
        self.gone.append(entry)
