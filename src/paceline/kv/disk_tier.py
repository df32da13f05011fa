"""The second tier of the prefix cache: which nodes of the tree are in a store on disk, and when they get there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.kv.radix import Node, RadixTree


class Entry(Protocol):
    """A stored page: its id, the page before it, whose it is, its tokens."""

    @property
    def entry(self) -> int: ...

    @property
    def parent(self) -> int | None: ...

    @property
    def domain(self) -> bytes: ...

    @property
    def tokens(self) -> bytes: ...


class Store(Protocol):
    """What the manager needs of a store on disk; see ``kv.store.PageStore``."""

    def entries(self) -> Iterator[Entry]: ...

    def put(self, parent: int | None, domain: bytes, tokens: bytes, page: NDArray[np.uint8]) -> int | None: ...

    def read(self, entry: int, into: NDArray[np.uint8]) -> bool: ...

    def touch(self, entry: int) -> None: ...

    def evicted(self) -> list[int]: ...


class DiskTier:
    """Keeps whole pages of ``tree`` in ``store``; ``memory`` [num_pages, page_bytes] is the pool.

    Adds to the tree what the store holds already.
    """

    def __init__(self, tree: RadixTree, store: Store, memory: NDArray[np.uint8]) -> None:
        self._tree = tree
        self._store = store
        self._memory = memory
        self._stored: dict[int, Node] = {}
        self._unsaved: deque[Node] = deque()
        for stored in store.entries():
            parent = tree.root(stored.domain) if stored.parent is None else self._stored[stored.parent]
            self._stored[stored.entry] = tree.attach(parent, stored.tokens, stored.entry)

    def remember(self, chain: Sequence[Node]) -> None:
        """Queues the nodes from a first page on that are not stored yet, and marks the others as used."""
        for node in chain:
            if node.entry is None and not node.unsaved:
                node.unsaved = True
                self._unsaved.append(node)
        stored = [node.entry for node in chain if node.entry is not None]
        if stored:
            self._store.touch(stored[-1])  # ancestors count as used with it

    def persist(self, max_pages: int) -> int:
        """Writes up to ``max_pages`` pages that are not in the store yet; returns how many wait still."""
        while self._unsaved and max_pages > 0:
            node = self._unsaved.popleft()
            node.unsaved = False
            parent = node.parent
            if node.page is None or node.entry is not None or parent is None:
                continue  # evicted, or stored under another name
            if parent.parent is not None and parent.entry is None:
                continue  # what comes before it is not stored
            root = parent
            while root.parent is not None:
                root = root.parent
            entry = self._store.put(parent.entry, root.tokens, node.tokens, self._memory[node.page])
            if entry is not None:
                node.entry = entry
                self._stored[entry] = node
            self._forget_evicted()
            max_pages -= 1
        return len(self._unsaved)

    def load(self, node: Node, page: int) -> bool:
        """Fills a page of the pool; False, and the node is out of the tree, when what is stored is damaged."""
        assert node.entry is not None
        if self._store.read(node.entry, self._memory[page]):
            self._store.touch(node.entry)
            return True
        self._forget_evicted()
        if node.entry is not None:
            self._tree.drop(node)
        return False

    def _forget_evicted(self) -> None:
        for entry in self._store.evicted():
            node = self._stored.pop(entry)
            if node.entry == entry:
                self._tree.unstore(node)
