"""The page tables of the running sequences, over the pages that they and the prefix tree share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.config import PAGE_TOKENS, SPLIT_TOKENS
from paceline.kv.disk_tier import DiskTier, Store
from paceline.kv.layout import pages_for
from paceline.kv.pool import PagePool
from paceline.kv.radix import TOKEN_BYTES, Match, Node, RadixTree


@dataclass
class Opened:
    """A new sequence: the keys and values of its first ``num_cached`` tokens are there; ``num_found`` were known."""

    slot: int
    num_cached: int
    num_found: int


@dataclass
class Fork:
    """A branch of a sequence for the length of one step: ``pages`` stand for those of its table from ``first`` on."""

    slot: int
    first: int
    pages: list[int]


@dataclass
class _Sequence:
    """Pages of a sequence in order of its tokens (None: fell out of the sliding window), and its place in the tree.

    tip  the node of the last published page (or the root), None when nothing more is published
    pinned  pages that it owns without having them in its table: of the tree on the way to ``tip``, and, while it is
    opened, those that will be
    """

    pages: list[int | None] = field(default_factory=list)
    tip: Node | None = None
    num_published: int = 0
    pinned: list[int] = field(default_factory=list)


class KVManager:
    """Page tables of at most ``max_sequences`` sequences of at most ``max_tokens`` tokens over a pool.

    A sequence is a slot 0 .. max_sequences-1 between ``open`` and ``close``; it owns the pages of its table.
    ``table`` [max_sequences, p] i32 is row by row what a step's plan needs; entries past a sequence's pages are stale,
    and so are those before its sliding window.
    ``capacity`` [max_sequences] lists the tokens that each slot's pages hold. ``num_changes`` counts changes of tables.
    Read all three, change none.

    Whole pages enter the prefix tree (``publish``) when the step that computes them is planned: a sequence that is
    opened after that, even for the same step, shares them, since a step writes the keys and values of a layer before it
    reads any. A partly equal page is copied, before the step computes anything; ``page_copies`` lists what to copy.
    """

    def __init__(
        self,
        num_pages: int,
        max_sequences: int,
        max_tokens: int,
        *,
        prefix_cache: bool = True,
        window: int | None = None,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(self.pool, windowed=window is not None)
        self.prefix_cache = prefix_cache
        self.window = window
        self.table: NDArray[np.int32] = np.zeros((max_sequences, max(1, pages_for(max_tokens))), np.int32)
        self.capacity = [0] * max_sequences
        self.num_changes = 0
        self.page_copies: list[tuple[int, int]] = []
        self.is_loading = False
        self._sequences: list[_Sequence | None] = [None] * max_sequences
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        self._copy_sources: list[int] = []  # locked until the step that copies them has run
        self._fresh: list[Node] = []  # published for the step under way: not computed yet
        self._forks: list[Fork] = []  # of the step under way
        self._disk: DiskTier | None = None

    @property
    def num_pool_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_pages * PAGE_TOKENS

    @property
    def num_available(self) -> int:
        """Pages that are free or can be made free."""
        return self.pool.num_free + self.tree.num_evictable

    # Sequences

    def finish_step(self) -> None:
        """Forgets what the step that has run was to copy and compute, and the branches that nobody took."""
        if self._forks:
            for fork in self._forks:
                self._drop(fork)
            self._forks.clear()
        if self.page_copies:
            for page in self._copy_sources:
                self.tree.unlock(page)
            self._copy_sources.clear()
            self.page_copies = []
        if self._fresh:
            self._fresh.clear()

    def discard_step(self) -> None:
        """Takes back what was published for a step that failed. Its sequences must be closed without publishing."""
        for node in reversed(self._fresh):
            self.tree.withdraw(node)
        self._fresh.clear()

    def lookup(self, domain: bytes, tokens: bytes) -> int:
        """Leading tokens (int32, as bytes) whose keys and values are known."""
        return self.tree.match(domain, tokens).num_tokens if self.prefix_cache else 0

    def open(
        self, domain: bytes, tokens: bytes, *, limit: int, reserve: int = 0, max_loads: int | None = None
    ) -> Opened | None:
        """A slot for a sequence of ``tokens``, with pages for all of them; at most ``limit`` of them count as cached.

        None, and nothing changed but the cache, unless ``reserve`` more pages could be had. Reads at most ``max_loads``
        pages back from disk: where there are more it is None as well, ``is_loading`` is set, and the next call goes on.
        """
        found = self.tree.match(domain, tokens) if self.prefix_cache else Match()
        match = found.cut(limit)
        if match.partial is not None and match.partial in self._fresh:  # nothing to copy yet
            match = match.cut(len(match.nodes) * PAGE_TOKENS)
        match = self._reachable(match)
        self.is_loading = max_loads is not None and self._load_some(match, max_loads)
        if self.is_loading:
            return None
        total = pages_for(len(tokens) // TOKEN_BYTES)
        sequence = self._acquire(match, total, reserve)
        if sequence is None and match.partial is not None:  # the page to copy from may be the one that is missing
            match = self._reachable(match.cut(len(match.nodes) * PAGE_TOKENS))
            sequence = self._acquire(match, total, reserve)
        if sequence is None:
            return None
        if not self._fill(sequence, match):  # a stored page is damaged and has left the tree
            self._release(sequence)
            return self.open(domain, tokens, limit=limit, reserve=reserve, max_loads=max_loads)
        self.tree.touch(match.nodes)
        while len(sequence.pages) < total:
            sequence.pages.append(self._allocate())
        if self.prefix_cache:
            sequence.tip = match.nodes[-1] if match.nodes else Node(None, domain)
            sequence.num_published = len(match.nodes)
        slot = self._free_slots.pop()
        self._sequences[slot] = sequence
        self.table[slot, :total] = [page or 0 for page in sequence.pages]
        self.capacity[slot] = total * PAGE_TOKENS
        self.num_changes += 1
        return Opened(slot, match.num_tokens, self._reachable(found).num_tokens)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Gives a sequence the pages to hold ``num_tokens``; False, and nothing changed but the cache, when too few can
        be had."""
        sequence = self._sequence(slot)
        missing = pages_for(num_tokens) - len(sequence.pages)
        if missing <= 0:
            return True
        if not self._free_up(missing):
            return False
        for _ in range(missing):
            page = self._allocate()
            self.table[slot, len(sequence.pages)] = page
            sequence.pages.append(page)
        self.capacity[slot] = len(sequence.pages) * PAGE_TOKENS
        self.num_changes += 1
        return True

    def shrink(self, slot: int, num_tokens: int) -> None:
        """Gives up the pages that a sequence of ``num_tokens`` does not need: drafts that were refused got them."""
        sequence = self._sequence(slot)
        keep = pages_for(num_tokens)
        for page in reversed(sequence.pages[keep:]):
            assert page is not None
            self.tree.unlock(page)
        del sequence.pages[keep:]
        self.capacity[slot] = keep * PAGE_TOKENS
        self.num_changes += 1

    def fork(self, slot: int, num_computed: int, num_tokens: int) -> Fork | None:
        """A branch of a sequence from token ``num_computed`` on, with pages of its own for up to ``num_tokens``; what
        its first page holds already is copied before the step computes anything. None, and nothing changed but the
        cache, without room. It ends with the step unless it is taken."""
        pages = self._sequence(slot).pages
        first = num_computed // PAGE_TOKENS
        count = pages_for(num_tokens) - first
        if not self._free_up(count):
            return None
        fork = Fork(slot, first, [self._allocate() for _ in range(count)])
        source = pages[first]
        assert source is not None
        if num_computed % PAGE_TOKENS:
            self.page_copies.append((source, fork.pages[0]))
        self._forks.append(fork)
        return fork

    def take(self, fork: Fork) -> None:
        """Makes a branch its sequence: the pages that it replaces are given up, and what was beyond them too."""
        sequence = self._sequence(fork.slot)
        for page in reversed(sequence.pages[fork.first :]):
            assert page is not None
            self.tree.unlock(page)
        sequence.pages[fork.first :] = fork.pages
        self._forks.remove(fork)
        self.table[fork.slot, fork.first : len(sequence.pages)] = fork.pages
        self.capacity[fork.slot] = len(sequence.pages) * PAGE_TOKENS
        self.num_changes += 1

    def _drop(self, fork: Fork) -> None:
        for page in reversed(fork.pages):
            self.tree.unlock(page)

    def slide(self, slot: int, num_computed: int) -> None:
        """Gives up the pages that no row from position ``num_computed`` on will read."""
        pages = self._sequence(slot).pages
        for at in range(self._first_page(num_computed) - 1, -1, -1):
            page = pages[at]
            if page is None:
                break
            pages[at] = None
            self.tree.unlock(page)

    def publish(self, slot: int, tokens: Sequence[int], num_tokens: int, *, is_computed: bool = False) -> None:
        """Puts the whole pages of the first ``num_tokens`` into the prefix tree: they are computed, or will be by the
        step under way, which may fail and from which nothing can be copied yet."""
        sequence = self._sequence(slot)
        for at in range(sequence.num_published, num_tokens // PAGE_TOKENS):
            tip, page = sequence.tip, sequence.pages[at]
            if tip is None or page is None or not self.tree.is_attached(tip):
                sequence.tip = None  # its place in the tree has gone
                return
            node = self.tree.insert(tip, token_key(tokens[at * PAGE_TOKENS : (at + 1) * PAGE_TOKENS]), page)
            assert node is not None
            assert node.page is not None
            if node.page != page:
                self.tree.lock(node.page)
                sequence.pinned.append(node.page)
            elif not is_computed:
                self._fresh.append(node)
            sequence.tip = node
            sequence.num_published = at + 1

    def close(self, slot: int, tokens: Sequence[int] = (), num_computed: int = 0) -> None:
        """Ends a sequence. Its first ``num_computed`` tokens stay in the prefix tree, the last, partly filled page too;
        its pages lose an owner, the last page first, and the slot is free."""
        sequence = self._sequence(slot)
        if num_computed > 0:
            self.publish(slot, tokens, num_computed, is_computed=True)
            whole = num_computed // PAGE_TOKENS
            tip = sequence.tip
            if tip is not None and self.tree.is_attached(tip):
                page = sequence.pages[whole] if whole < len(sequence.pages) else None
                if page is not None and num_computed % PAGE_TOKENS and sequence.num_published == whole:
                    self.tree.insert(tip, token_key(tokens[whole * PAGE_TOKENS : num_computed]), page)
                self._remember(tip)
        self._release(sequence)
        self._sequences[slot] = None
        self.capacity[slot] = 0
        self.num_changes += 1
        self._free_slots.append(slot)

    def num_own_tokens(self, slot: int) -> int:
        """Tokens that the pages of a sequence hold, without those that others use too."""
        pages = self._sequence(slot).pages
        return PAGE_TOKENS * sum(page is not None and not self.tree.is_shared(page) for page in pages)

    def pages(self, slot: int) -> tuple[int | None, ...]:
        """The pages of a sequence, in order of its tokens; None for those before its sliding window."""
        return tuple(self._sequence(slot).pages)

    # The store

    def use_store(self, store: Store, memory: NDArray[np.uint8]) -> None:
        """Finds what ``store`` holds, and keeps whole pages there too. ``memory`` [num_pages, page_bytes] is the
        pool."""
        self._disk = DiskTier(self.tree, store, memory)

    def persist(self, max_pages: int) -> int:
        """Writes up to ``max_pages`` pages that are not in the store yet; returns how many wait still."""
        return 0 if self._disk is None else self._disk.persist(max_pages)

    def _remember(self, tip: Node | None) -> None:
        """Marks the pages up to ``tip`` as used, and queues them for the store."""
        chain: list[Node] = []
        while tip is not None and tip.parent is not None:
            chain.append(tip)
            tip = tip.parent
        self.tree.touch(chain)
        if self._disk is not None:
            self._disk.remember(chain[::-1])

    def _load(self, node: Node, page: int) -> bool:
        """Fills a page from the store; False, and the node is out of the tree, when what is stored is damaged."""
        assert self._disk is not None
        return self._disk.load(node, page)

    def _load_some(self, match: Match, max_loads: int) -> bool:
        """Brings some stored pages of a match into the pool, for whoever opens it later, when they are more than
        ``max_loads``; False when they are not, or there is no room."""
        nodes = match.nodes[self._first_page(match.num_tokens) :]
        resident = [node for node in nodes if node.page is not None]
        stored = [node for node in nodes if node.page is None]
        self.tree.touch(resident)  # so that room is made at the cost of others
        if len(stored) <= max_loads or len(resident) + max_loads > self.num_available or not self._free_up(max_loads):
            return False
        for node in stored[:max_loads]:
            page = self._allocate()
            if not self._load(node, page):
                self.pool.release(page)
                break
            self.tree.settle_loaded(node, page)
        self.tree.touch(stored[:max_loads])
        return True

    # Pages

    def _sequence(self, slot: int) -> _Sequence:
        sequence = self._sequences[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def _first_page(self, position: int) -> int:
        """The first page that a row at ``position`` reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // SPLIT_TOKENS * (SPLIT_TOKENS // PAGE_TOKENS)

    def _reachable(self, match: Match) -> Match:
        """The longest beginning of a match from which a sequence can go on: all pages that its next row reads are
        resident or stored."""
        if self.window is None:
            return match
        if match.partial is not None and match.partial.page is None and match.partial.entry is None:
            match = match.cut(len(match.nodes) * PAGE_TOKENS)
        missing = [at for at, node in enumerate(match.nodes) if node.page is None and node.entry is None]
        while missing and self._first_page(match.num_tokens) <= missing[-1]:
            match = match.cut(missing.pop() * PAGE_TOKENS)
        return match

    def _acquire(self, match: Match, total: int, reserve: int) -> _Sequence | None:
        """Locks the resident pages of a match and makes room for the rest; None, and nothing locked, without room."""
        first = self._first_page(match.num_tokens)
        resident = [node.page for node in match.nodes[first:] if node.page is not None]
        locked = list(resident)
        if match.partial is not None and match.partial.page is not None:
            locked.append(match.partial.page)
        for page in locked:
            self.tree.lock(page)
        needed = total - first - len(resident)
        if needed + reserve > self.num_available or not self._free_up(needed):
            for page in reversed(locked):
                self.tree.unlock(page)
            return None
        sequence = _Sequence()
        sequence.pages = [None] * first
        sequence.pinned = locked  # until _fill has given each its place
        return sequence

    def _fill(self, sequence: _Sequence, match: Match) -> bool:
        """Gives a sequence the pages of a match; False when one could not be read."""
        for node in match.nodes[len(sequence.pages) :]:
            if node.page is None:
                page = self._allocate()
                if not self._load(node, page):
                    self.pool.release(page)
                    return False
                self.tree.settle_loaded(node, page)
                self.tree.lock(page)
            else:
                page = node.page
                sequence.pinned.remove(page)
            sequence.pages.append(page)
        source = match.partial
        if source is not None:
            page = self._allocate()
            sequence.pages.append(page)
            if source.page is None:
                return self._load(source, page)
            sequence.pinned.remove(source.page)
            self._copy_sources.append(source.page)
            self.page_copies.append((source.page, page))
        return True

    def _release(self, sequence: _Sequence) -> None:
        for page in reversed(sequence.pages):
            if page is not None:
                self.tree.unlock(page)
        for page in reversed(sequence.pinned):
            self.tree.unlock(page)

    def _free_up(self, num_pages: int) -> bool:
        """Makes so many pages free, at the cache's cost; False when that is not enough."""
        missing = num_pages - self.pool.num_free
        return missing <= 0 or (missing <= self.tree.num_evictable and self.tree.evict(missing) == missing)

    def _allocate(self) -> int:
        page = self.pool.allocate()
        assert page is not None
        return page

    def check(self) -> None:
        """Asserts that tables, capacities, slots, the tree and the pool agree."""
        assert len(set(self._free_slots)) == len(self._free_slots), "a slot is free twice"
        owned = list(self._copy_sources)
        owned += [page for fork in self._forks for page in fork.pages]
        for slot, sequence in enumerate(self._sequences):
            assert (sequence is None) == (slot in self._free_slots), f"slot {slot} is free and in use, or neither"
            if sequence is None:
                assert self.capacity[slot] == 0, f"capacity of free slot {slot}"
                continue
            pages = sequence.pages
            assert self.capacity[slot] == len(pages) * PAGE_TOKENS, f"capacity of slot {slot}"
            for at, page in enumerate(pages):
                assert page is None or self.table[slot, at] == page, f"table of slot {slot}"
            owned += [page for page in pages if page is not None]
            owned += sequence.pinned
        owned += [node.page for node in self.tree.nodes() if node.page is not None]
        self.pool.check(owned)
        self.tree.check()


def token_key(tokens: Sequence[int]) -> bytes:
    """Token ids as int32, little-endian: what the tree and the store compare."""
    return np.array(tokens, "<i4").tobytes()
