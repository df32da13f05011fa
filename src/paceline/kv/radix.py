"""The prefix tree: which pages hold the keys and values of which beginnings, and which of them may go.

Source: RadixAttention (Zheng et al. 2023, 2312.07104). One node a page. A node's tokens follow those of its parent.
Keys and values depend on everything before them, so a page serves exactly the sequences that begin with the tokens of
all nodes down to its own, in one domain. Roots are domains; nothing crosses them.

A node is resident when it has a page of the pool, of which the tree is then one owner. Sequences that use the page are
further owners: these are the locks, and only a page that the tree alone owns is evicted, least recently used first,
leaves before their parents. With a sliding window a parent may go first: what lies before the window is not read again.
A node may also have an entry in a store on disk, and then stays in the tree without a page.

Departures: nodes are single pages, not runs of them. A lookup costs a dictionary access a page, and there is nothing
to split or to merge; the last, partly equal page is found among its sorted siblings.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.config import PAGE_TOKENS
from paceline.kv.pool import PagePool

TOKEN_BYTES = 4
PAGE_KEY_BYTES = PAGE_TOKENS * TOKEN_BYTES


class Node:
    """A page's worth of tokens (fewer in a leaf) after those of ``parent``.

    tokens  int32 little-endian (a root's: its domain);  page  in the pool, None when not resident
    entry  in the store, None when not there;  unsaved  whether it waits to be stored
    children  by their tokens;  keys  the same, sorted;  num_resident  children with a page;  used  when last, in ticks
    """

    __slots__ = ("children", "entry", "keys", "num_resident", "page", "parent", "queued", "tokens", "unsaved", "used")

    def __init__(self, parent: Node | None, tokens: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page: int | None = None
        self.entry: int | None = None
        self.children: dict[bytes, Node] = {}
        self.keys: list[bytes] = []
        self.num_resident = 0
        self.used = 0
        self.queued = False
        self.unsaved = False

    @property
    def is_whole(self) -> bool:
        """Whether its page is full: only then may it have children."""
        return len(self.tokens) == PAGE_KEY_BYTES


@dataclass
class Match:
    """Where a sequence of tokens leads: nodes whose whole page it begins with, then the node of which it shares the
    first ``num_partial`` tokens (0: ``partial`` is None)."""

    nodes: list[Node] = field(default_factory=list)
    partial: Node | None = None
    num_partial: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens found."""
        return len(self.nodes) * PAGE_TOKENS + self.num_partial

    def cut(self, num_tokens: int) -> Match:
        """The first ``num_tokens`` of it: a page that is cut becomes the partial one."""
        if num_tokens >= self.num_tokens:
            return self
        whole, rest = divmod(num_tokens, PAGE_TOKENS)
        if rest == 0:
            return Match(self.nodes[:whole])
        return Match(self.nodes[:whole], self.nodes[whole] if whole < len(self.nodes) else self.partial, rest)


class RadixTree:
    """The tree over one pool. ``windowed``: pages are evicted without regard to the pages after them."""

    def __init__(self, pool: PagePool, *, windowed: bool = False) -> None:
        self.pool = pool
        self.windowed = windowed
        self.num_evictable = 0
        self._roots: dict[bytes, Node] = {}
        self._node_of: dict[int, Node] = {}  # resident nodes by page
        self._queue: list[tuple[int, int, Node]] = []  # may hold nodes that are locked, gone or used since
        self._clock = itertools.count(1)
        self._order = itertools.count()

    def is_attached(self, node: Node) -> bool:
        """Whether a node is in the tree still, so that others may follow it. A root may be made at any time: what is
        inserted after it follows the domain's own."""
        return node.parent is None or node.parent.children.get(node.tokens) is node

    def is_shared(self, page: int) -> bool:
        """Whether several sequences use a page."""
        return self.pool.references(page) - (page in self._node_of) > 1

    def root(self, domain: bytes) -> Node:
        """The root of a domain; it leaves the tree with its last child."""
        node = self._roots.get(domain)
        if node is None:
            node = self._roots[domain] = Node(None, domain)
        return node

    def match(self, domain: bytes, tokens: bytes) -> Match:
        """The longest beginning of ``tokens`` that the domain knows, resident or stored. Changes nothing."""
        match = Match()
        node = self._roots.get(domain)
        if node is None:
            return match
        start = 0
        while (child := node.children.get(tokens[start : start + PAGE_KEY_BYTES])) is not None and child.is_whole:
            match.nodes.append(child)
            node = child
            start += PAGE_KEY_BYTES
        if node.keys and start < len(tokens):
            match.partial, match.num_partial = _closest(node, tokens[start : start + PAGE_KEY_BYTES])
        return match

    def touch(self, nodes: list[Node]) -> None:
        """Marks nodes as used now."""
        now = next(self._clock)
        for node in nodes:
            node.used = now

    def insert(self, parent: Node, tokens: bytes, page: int) -> Node | None:
        """A child of ``parent`` for ``tokens`` that lie in ``page``, of which the tree becomes an owner.

        When such a child is there and resident, it is returned and ``page`` stays the caller's alone. A part of a page
        that another child covers is not taken (None); parts that the new child covers are dropped.
        """
        assert self.is_attached(parent)
        if parent.parent is None:
            parent = self.root(parent.tokens)
        child = parent.children.get(tokens)
        if child is None:
            at = bisect_left(parent.keys, tokens)
            if at < len(parent.keys) and parent.keys[at].startswith(tokens):
                return None
            covered = at > 0 and tokens.startswith(parent.keys[at - 1])
            before = parent.children[parent.keys[at - 1]] if covered else None
            child = Node(parent, tokens)
            parent.children[tokens] = child
            parent.keys.insert(at, tokens)
            if before is not None:  # after the new one is there: a parent without children would leave the tree
                self._drop_covered(before)
        if child.page is None:
            self._settle(child, page)
            self.pool.share(page)
        child.used = next(self._clock)
        return child

    def settle_loaded(self, node: Node, page: int) -> None:
        """Makes a stored node resident in ``page``, freshly allocated and filled; the tree takes it over."""
        assert node.page is None
        self._settle(node, page)
        self.num_evictable += 1
        self._enqueue(node)

    def lock(self, page: int) -> None:
        """Adds an owner to a page, resident or not."""
        if page in self._node_of and self.pool.references(page) == 1:
            self.num_evictable -= 1
        self.pool.share(page)

    def unlock(self, page: int) -> None:
        """Takes an owner from a page; what only the tree owns then may be evicted."""
        self.pool.release(page)
        node = self._node_of.get(page)
        if node is not None and self.pool.references(page) == 1:
            self.num_evictable += 1
            self._enqueue(node)

    def evict(self, num_pages: int) -> int:
        """Frees up to ``num_pages`` pages; returns how many."""
        freed = 0
        while freed < num_pages and self._queue:
            used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if not self._may_go(node):
                continue
            if node.used != used:
                self._enqueue(node)
                continue
            self._unsettle(node)
            freed += 1
        return freed

    def attach(self, parent: Node, tokens: bytes, entry: int) -> Node:
        """A stored child that is not resident (a store's contents, parents first)."""
        child = parent.children.get(tokens)
        if child is None:
            child = Node(parent, tokens)
            parent.children[tokens] = child
            insort(parent.keys, tokens)
        child.entry = entry
        return child

    def withdraw(self, node: Node) -> None:
        """Takes the page from a node that is not right; what is stored of it and after it stays."""
        if node.page is not None:
            self._unsettle(node)

    def drop(self, node: Node) -> None:
        """Takes a node and all after it out of the tree; pages that sequences use stay theirs."""
        subtree = [node]
        for found in subtree:  # grows while it is walked
            subtree += found.children.values()
        for gone in reversed(subtree):
            gone.entry = None
            if gone.page is not None:
                self._unsettle(gone)
            elif self.is_attached(gone):  # else it went with its last child
                self._remove(gone)

    def unstore(self, node: Node) -> None:
        """Says that the store has forgotten a node: without a page it leaves the tree, and all after it."""
        node.entry = None
        if node.page is None:
            self.drop(node)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        rest = list(self._roots.values())
        while rest:
            children = list(rest.pop().children.values())
            rest.extend(children)
            yield from children

    def check(self) -> None:
        """Asserts that tree, queue and pool agree."""
        nodes = list(self.nodes())
        resident = [node for node in nodes if node.page is not None]
        assert {node.page: node for node in resident} == self._node_of, "resident nodes"
        assert len(resident) == len(self._node_of), "a page in two nodes"
        waiting = {id(node) for _, _, node in self._queue}
        for node in [*nodes, *self._roots.values()]:
            children = list(node.children.values())
            assert sorted(node.children) == node.keys, "sorted keys"
            assert node.num_resident == sum(child.page is not None for child in children), "resident children"
            assert node.is_whole or node.parent is None or not children, "a part of a page has children"
            assert node.parent is None or node.page is not None or node.entry is not None or children, "an empty node"
            assert not self._may_go(node) or id(node) in waiting, "a page that may go is not in the queue"
        alone = sum(self.pool.references(page) == 1 for page in self._node_of)
        assert alone == self.num_evictable, f"{self.num_evictable} evictable pages, {alone} found"

    def _may_go(self, node: Node) -> bool:
        return (
            node.page is not None
            and self._node_of.get(node.page) is node
            and self.pool.references(node.page) == 1
            and (node.num_resident == 0 or self.windowed)
        )

    def _enqueue(self, node: Node) -> None:
        if not node.queued and self._may_go(node):
            node.queued = True
            heapq.heappush(self._queue, (node.used, next(self._order), node))

    def _settle(self, node: Node, page: int) -> None:
        node.page = page
        self._node_of[page] = node
        if node.parent is not None:
            node.parent.num_resident += 1

    def _unsettle(self, node: Node) -> None:
        """Takes the page from a node, and the node from the tree when nothing else keeps it."""
        page, parent = node.page, node.parent
        assert page is not None
        assert parent is not None
        if self.pool.references(page) == 1:
            self.num_evictable -= 1
        del self._node_of[page]
        node.page = None
        self.pool.release(page)
        parent.num_resident -= 1
        if node.entry is None and not node.children:
            self._remove(node)
        if parent.page is not None:
            self._enqueue(parent)

    def _drop_covered(self, node: Node) -> None:
        """Drops a part of a page that is covered by a new node, unless a sequence reads it."""
        if node.page is not None and not node.is_whole and self.pool.references(node.page) == 1:
            self._unsettle(node)

    def _remove(self, node: Node) -> None:
        """Takes an empty node out, and its ancestors that are empty without it."""
        parent: Node | None = node.parent
        while parent is not None:
            del parent.children[node.tokens]
            del parent.keys[bisect_left(parent.keys, node.tokens)]
            node, parent = parent, parent.parent
            if node.children or node.page is not None or node.entry is not None:
                return
        self._roots.pop(node.tokens, None)


def _closest(node: Node, tokens: bytes) -> tuple[Node | None, int]:
    """The child that shares the most leading tokens with ``tokens``, and how many: a neighbour in sorted order."""
    at = bisect_left(node.keys, tokens)
    best, most = None, 0
    for key in node.keys[max(0, at - 1) : at + 1]:
        count = _common_tokens(key, tokens)
        if count > most:
            best, most = node.children[key], count
    return best, most


def _common_tokens(one: bytes, other: bytes) -> int:
    """Leading tokens that two runs have in common."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length // TOKEN_BYTES
    return next(i for i in range(length) if one[i] != other[i]) // TOKEN_BYTES
