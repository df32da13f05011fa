"""Pages of one model on disk, so that the prefix cache outlives the program.

A folder holds `pages.bin` (slots of one page each), `index.log` (the journal that says which page lies where, with its
checksum) and `key.json` (for people). Any crash leaves a store that opens, lacks at most the newest entries, and yields
no wrong page: a page is written before its record, the record of a slot's old page is deleted before the slot is
written again, a torn record is cut off, and a page that does not match its record's checksum is no hit. Nothing is
synced on the way, since after a loss of power the checksums find what the disk had not taken yet.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CacheDirectoryError
from paceline.kv.cache_directory import JOURNAL, KEY, PAGES, CacheDirectory
from paceline.kv.entries import Entries, chain_of, checksum_of
from paceline.kv.identity import DIGEST_BYTES, StoreKey, digest
from paceline.kv.journal import HEADER_BYTES, PUT_BYTES, Delete, Journal, Put

JOURNAL_BYTES_PER_SLOT = 4 * PUT_BYTES
"""Room for a slot's record, for twice as much of outdated ones, and for a new journal while both exist."""


@dataclass(frozen=True)
class StoredPage:
    """A page that the store holds: its id, the page before it (None for a first page), whose it is, its 32 tokens."""

    entry: int
    parent: int | None
    domain: bytes
    tokens: bytes


class PageStore:
    """Pages of one model, each under the chain of tokens that leads to it. Not thread-safe; one process at a time.

    An entry is a page with an id. Entries leave when the directory is full (the least recently used leaf first, but
    other models that are not in use before them) or when their bytes turn out to be damaged, then with all that descend
    from them; ``evicted`` names them. ``problem`` says why the store stopped writing (a full disk), None while it
    writes; reading goes on. ``num_corrupt`` counts pages that did not match their checksum.
    """

    problem: str | None
    num_corrupt: int

    def __init__(
        self, directory: CacheDirectory, journal: Journal, pages_file: int, *, page_bytes: int, max_bytes: int
    ):
        """For ``open``, which gathers the parts."""
        self.page_bytes = page_bytes
        self.problem = None
        self.num_corrupt = 0
        self._max_bytes = max_bytes
        self._directory = directory
        self._journal = journal
        self._pages_file = pages_file
        self._map: mmap.mmap | None = None
        self._entries = Entries()
        self._evicted: list[int] = []
        self._is_touched = False
        self._fixed_bytes = 2 * HEADER_BYTES + (directory.path / KEY).stat().st_size
        if journal.is_new:
            os.ftruncate(pages_file, 0)
        self._num_slots = os.fstat(pages_file).st_size // page_bytes
        self._free_slots: list[int] = []

    @classmethod
    def open(cls, directory: Path, key: StoreKey, *, page_bytes: int, max_bytes: int) -> PageStore:
        """The store of ``key`` under ``directory``, which takes at most ``max_bytes``, all models together (two
        processes that fill it at the same instant may overstep that by a page).

        Raises CacheDirectoryError when the directory cannot be written, when another process uses it for the same
        model, or when ``max_bytes`` does not hold one page.
        """
        with contextlib.ExitStack() as undo:
            folder = CacheDirectory(directory, key)
            undo.callback(folder.close)
            try:
                journal = Journal(folder.path / JOURNAL, digest("journal", key.digest(), page_bytes))
                undo.callback(journal.close)
                pages_file = os.open(folder.path / PAGES, os.O_RDWR | os.O_CREAT, 0o600)
                undo.callback(os.close, pages_file)
                store = cls(folder, journal, pages_file, page_bytes=page_bytes, max_bytes=max_bytes)
                if store._footprint(1) > max_bytes:
                    problem = f"its limit is {max_bytes:,} bytes, and one page takes {store._footprint(1):,}"
                    raise CacheDirectoryError(directory, problem)
                store._replay()
                store._shrink()
            except OSError as error:
                raise CacheDirectoryError(directory, error.strerror or str(error)) from error
            undo.pop_all()
        return store

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes that this model takes on disk at most."""
        return self._footprint(self._num_slots)

    def entries(self) -> Iterator[StoredPage]:
        """What the store holds, parents before their children."""
        for entry in self._entries:
            yield StoredPage(entry.record.entry, entry.record.parent, entry.record.domain, entry.record.tokens)

    def put(self, parent: int | None, domain: bytes, tokens: bytes, page: NDArray[np.uint8]) -> int | None:
        """Keeps a page (``page_bytes`` u8, contiguous) after ``parent`` and returns the id of its entry.

        What is here already keeps its id and its bytes. ``tokens`` are the page's 32 tokens as i32, little-endian;
        ``domain`` is 32 bytes. None when the parent is gone, when nothing can make room, or when the store has stopped
        writing.
        """
        assert self._pages_file >= 0, "the store is closed"
        assert page.shape == (self.page_bytes,)
        assert page.dtype == np.uint8
        assert page.flags.c_contiguous
        assert len(domain) == DIGEST_BYTES
        before = None if parent is None else self._entries.get(parent)
        if parent is not None and before is None:
            return None
        assert before is None or before.record.domain == domain, "a chain of pages stays in its domain"
        chain = chain_of(domain if before is None else before.chain, tokens)
        if known := self._entries.find(chain):
            self.touch(known.record.entry)
            return known.record.entry
        if self.problem is not None:
            return None
        try:
            slot = self._take_slot(keep=parent)
            if slot is None:
                return None
            self._write(slot, page.data)
            checksum = checksum_of(chain, page.data)
            entry, used = self._entries.next_id(), self._entries.next_use()
            record = Put(entry, parent, slot, used, checksum, domain, tokens)
            self._append(record)
        except OSError as error:
            self._stop(error)
            return None
        added = self._entries.add(record)
        assert added is not None
        return entry

    def read(self, entry: int, into: NDArray[np.uint8]) -> bool:
        """Copies a page to ``into`` (``page_bytes`` u8, contiguous); False, and ``into`` undefined, when it is gone.

        A page that does not match its checksum is gone, and all that descend from it.
        """
        assert self._pages_file >= 0, "the store is closed"
        assert into.shape == (self.page_bytes,)
        assert into.dtype == np.uint8
        assert into.flags.c_contiguous
        found = self._entries.get(entry)
        if found is None:
            return False
        start = found.record.slot * self.page_bytes
        into[:] = np.frombuffer(self._mapped(start + self.page_bytes), np.uint8, self.page_bytes, start)
        # What was copied is checked, not what was mapped: nothing can change in between.
        if checksum_of(found.chain, into.data) == found.record.checksum:
            return True
        self.num_corrupt += 1
        try:
            self._forget(entry)
        except OSError as error:
            self._stop(error)
        return False

    def touch(self, entry: int) -> None:
        """Marks an entry as just used; its ancestors need no mark. Uses since ``open`` are lost in a crash."""
        found = self._entries.get(entry)
        if found is not None:
            self._entries.touch(found)
            self._is_touched = True

    def evicted(self) -> list[int]:
        """Entries that are gone since this was asked last, children before their parents."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def close(self) -> None:
        """Ends the use of the store, which then can be opened again; the second time does nothing."""
        if self._pages_file < 0:
            return
        if self._is_touched and self.problem is None:
            with contextlib.suppress(OSError):  # the old journal stays, which only lacks what was used last
                self._rewrite_journal()
        self._map = None
        os.close(self._pages_file)
        self._pages_file = -1
        self._journal.close()
        self._directory.close()

    def check(self) -> None:
        """Asserts that entries, slots and files agree and that the limit is kept."""
        self._entries.check()
        held = sum(file.stat().st_size for file in self._directory.path.iterdir())
        assert held <= self.num_bytes, f"{held} bytes in the folder"
        assert os.fstat(self._pages_file).st_size == self._num_slots * self.page_bytes, "size of pages.bin"
        if self.problem is None:
            used = [entry.record.slot for entry in self._entries]
            assert sorted(used + self._free_slots) == list(range(self._num_slots)), "a slot is lost or has two owners"

    # Opening

    def _replay(self) -> None:
        """Takes the journal's records for what they still say."""
        for record in self._journal.records:
            if isinstance(record, Delete):
                if self._entries.get(record.entry):
                    self._entries.remove(record.entry)
            elif record.slot < self._num_slots:
                if older := self._entries.in_slot(record.slot):
                    self._entries.remove(older.record.entry)
                self._entries.add(record)
        used = {entry.record.slot for entry in self._entries}
        self._free_slots = [slot for slot in range(self._num_slots) if slot not in used]

    def _shrink(self) -> None:
        """Brings a store into a limit that is lower than the last time, and the journal into its room."""
        while self._footprint(self._num_slots) + self._directory.other_bytes() > self._max_bytes:
            if not self._directory.remove_oldest_other():
                break
        room = self._max_bytes - self._directory.other_bytes() - self._fixed_bytes
        limit = max(0, room // (self.page_bytes + JOURNAL_BYTES_PER_SLOT))
        while len(self._entries) > limit:
            leaf = self._entries.least_recent_leaf()
            assert leaf is not None
            self._forget(leaf)
        if self._num_slots > limit:
            self._move_below(limit)
            self._rewrite_journal()
        elif self._journal.num_bytes > self._journal_limit():
            self._rewrite_journal()
        self._num_slots = min(self._num_slots, limit)
        os.ftruncate(self._pages_file, self._num_slots * self.page_bytes)
        self._evicted = []

    def _move_below(self, limit: int) -> None:
        """Copies pages from slots at or above ``limit`` to free ones below; until the journal is rewritten the old
        places count."""
        self._free_slots = [slot for slot in self._free_slots if slot < limit]
        for entry in self._entries:
            if entry.record.slot >= limit:
                slot = self._free_slots.pop()
                self._write(slot, os.pread(self._pages_file, self.page_bytes, entry.record.slot * self.page_bytes))
                self._entries.move(entry, slot)

    # Room

    def _footprint(self, num_slots: int) -> int:
        """Most bytes that the folder takes with so many slots."""
        return self._fixed_bytes + num_slots * (self.page_bytes + JOURNAL_BYTES_PER_SLOT)

    def _take_slot(self, *, keep: int | None) -> int | None:
        """A slot that no record names; None when only ``keep``, its ancestors and models in use are left to evict."""
        while not self._free_slots:
            if self._footprint(self._num_slots + 1) + self._directory.other_bytes() <= self._max_bytes:
                self._num_slots += 1
                self._free_slots.append(self._num_slots - 1)
            elif not self._directory.remove_oldest_other():
                leaf = self._entries.least_recent_leaf(keep=keep)
                if leaf is None:
                    return None
                self._forget(leaf)
        return self._free_slots.pop()

    def _forget(self, entry: int) -> None:
        """Removes an entry and its descendants, from the journal too; their slots are free."""
        removed = self._entries.remove(entry)
        self._evicted += [node.record.entry for node in removed]
        for node in removed:
            if self.problem is None:
                self._append(Delete(node.record.entry))
            self._free_slots.append(node.record.slot)

    # Files

    def _write(self, slot: int, page: memoryview | bytes) -> None:
        rest, position = memoryview(page), slot * self.page_bytes
        while rest:
            written = os.pwrite(self._pages_file, rest, position)
            rest, position = rest[written:], position + written

    def _mapped(self, end: int) -> mmap.mmap:
        """A mapping of the pages' file that reaches ``end``: the file may have grown since the last one was made."""
        if self._map is None or len(self._map) < end:
            self._map = mmap.mmap(self._pages_file, 0, access=mmap.ACCESS_READ)
        return self._map

    def _journal_limit(self) -> int:
        return HEADER_BYTES + self._num_slots * (JOURNAL_BYTES_PER_SLOT - PUT_BYTES)

    def _append(self, record: Put | Delete) -> None:
        if self._journal.num_bytes + PUT_BYTES > self._journal_limit():
            self._rewrite_journal()
        self._journal.append(record)

    def _rewrite_journal(self) -> None:
        self._journal.rewrite(entry.record for entry in self._entries)

    def _stop(self, error: OSError) -> None:
        """Ends writing. Said once, since from now on the cache on disk only shrinks."""
        self.problem = error.strerror or str(error)
        self._num_slots = os.fstat(self._pages_file).st_size // self.page_bytes
        with contextlib.suppress(OSError):  # gives back what was written of a page
            os.ftruncate(self._pages_file, self._num_slots * self.page_bytes)
        message = f"{self._directory.path}: the prefix cache is no longer written to disk: {self.problem}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
