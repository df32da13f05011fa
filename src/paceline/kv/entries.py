"""The entries of a store as a forest: who descends from whom, who lies where, which leaf was used least recently."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from paceline.kv.identity import digest
from paceline.kv.journal import Put


@dataclass
class Entry:
    """One stored page. ``chain`` is a digest of the domain and of all tokens up to the page's end."""

    record: Put
    chain: bytes
    children: set[int] = field(default_factory=set)
    is_queued: bool = False


def chain_of(before: bytes, tokens: bytes) -> bytes:
    """The chain of a page whose predecessor's chain is ``before``; a first page's is its domain."""
    return digest("chain", before, tokens)


def checksum_of(chain: bytes, page: bytes | memoryview) -> int:
    """A page's checksum. It begins with the chain, so that a page which lies in another's place does not pass.

    CRC-32 finds every burst of up to 32 bits and all but 2^-32 of other changes, at 2.4 GB/s where BLAKE2b runs at 0.6:
    the checksums are most of what reading a page costs.
    """
    return zlib.crc32(page, zlib.crc32(chain))


class Entries:
    """Entries by id; a parent's id is smaller than its children's. Holds no bytes of pages."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._by_chain: dict[bytes, int] = {}
        self._by_slot: dict[int, int] = {}
        self._queue: list[tuple[int, int]] = []  # (used, id) of leaves, possibly out of date: see least_recent_leaf
        self._clock = 0
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Parents before their children."""
        return iter([self._entries[entry] for entry in sorted(self._entries)])

    def get(self, entry: int) -> Entry | None:
        """An entry, None when it is gone."""
        return self._entries.get(entry)

    def find(self, chain: bytes) -> Entry | None:
        """The entry of that chain."""
        return self._entries.get(self._by_chain.get(chain, 0))

    def in_slot(self, slot: int) -> Entry | None:
        """The entry whose page lies in a slot."""
        return self._entries.get(self._by_slot.get(slot, 0))

    def next_id(self) -> int:
        """An id that was not used before."""
        return self._last_id + 1

    def next_use(self) -> int:
        """Advances the clock by which uses are ordered."""
        self._clock += 1
        return self._clock

    def add(self, record: Put) -> Entry | None:
        """Adds an entry; None when it has no place: its parent is missing, or its id or chain is taken."""
        self._last_id = max(self._last_id, record.entry)
        self._clock = max(self._clock, record.used)
        parent = None if record.parent is None else self._entries.get(record.parent)
        if record.entry in self._entries or (parent is None) != (record.parent is None):
            return None
        if parent is not None and parent.record.domain != record.domain:
            return None
        chain = chain_of(record.domain if parent is None else parent.chain, record.tokens)
        if chain in self._by_chain:
            return None
        assert record.slot not in self._by_slot, f"slot {record.slot} is taken"
        entry = Entry(record, chain)
        self._entries[record.entry] = entry
        self._by_chain[chain] = record.entry
        self._by_slot[record.slot] = record.entry
        if parent is not None:
            parent.children.add(record.entry)
        self._enqueue(entry)
        return entry

    def remove(self, entry: int) -> list[Entry]:
        """Removes an entry and all that descend from it; returns them, descendants first."""
        removed = [self._entries[entry]]
        for node in removed:  # the list grows while it is walked
            removed += [self._entries[child] for child in node.children]
        removed.reverse()
        for node in removed:
            del self._entries[node.record.entry], self._by_chain[node.chain], self._by_slot[node.record.slot]
        top = removed[-1].record
        parent = None if top.parent is None else self._entries.get(top.parent)
        if parent is not None:
            parent.children.discard(entry)
            # Whoever used a page used those before it.
            used = max(node.record.used for node in (parent, *removed))
            parent.record = replace(parent.record, used=used)
            self._enqueue(parent)
        return removed

    def touch(self, entry: Entry) -> None:
        """Marks an entry as the most recently used one."""
        entry.record = replace(entry.record, used=self.next_use())

    def move(self, entry: Entry, slot: int) -> None:
        """Says that the entry's page lies in another slot now."""
        del self._by_slot[entry.record.slot]
        entry.record = replace(entry.record, slot=slot)
        self._by_slot[slot] = entry.record.entry

    def least_recent_leaf(self, *, keep: int | None = None) -> int | None:
        """The leaf that was not used for longest, never ``keep``; None when there is no other.

        A use does not move a leaf in the queue. Its place is put right when it comes up, so that a use costs nothing.
        """
        kept: list[tuple[int, int]] = []
        found = None
        while self._queue and found is None:
            used, entry = heapq.heappop(self._queue)
            node = self._entries.get(entry)
            if node is None:
                continue
            if node.children:
                node.is_queued = False
            elif node.record.used != used:
                heapq.heappush(self._queue, (node.record.used, entry))
            else:
                kept.append((used, entry))
                found = None if entry == keep else entry
        for item in kept:
            heapq.heappush(self._queue, item)
        return found

    def _enqueue(self, entry: Entry) -> None:
        if not entry.children and not entry.is_queued:
            entry.is_queued = True
            heapq.heappush(self._queue, (entry.record.used, entry.record.entry))

    def check(self) -> None:
        """Asserts that parents, children, chains, slots and the queue agree."""
        queued = [entry for _, entry in self._queue if entry in self._entries]
        assert len(set(queued)) == len(queued), "an entry is queued twice"
        slots = {node.record.slot: entry for entry, node in self._entries.items()}
        assert slots == self._by_slot, "slots"
        assert {node.chain: entry for entry, node in self._entries.items()} == self._by_chain, "chains"
        for entry, node in self._entries.items():
            record = node.record
            assert record.entry == entry <= self._last_id
            before = record.domain
            if record.parent is not None:
                parent = self._entries[record.parent]
                assert record.parent < entry, f"entry {entry} is older than its parent"
                assert entry in parent.children, f"entry {entry} is no child of its parent"
                assert parent.record.domain == record.domain, f"entry {entry} left its domain"
                before = parent.chain
            assert node.chain == chain_of(before, record.tokens), f"chain of entry {entry}"
            assert all(self._entries[child].record.parent == entry for child in node.children), f"children of {entry}"
            assert node.is_queued == (entry in queued), f"entry {entry} does not know whether it is queued"
            assert node.children or node.is_queued, f"leaf {entry} is not queued"
