"""Sequences that share beginnings, over a small pool: what is called cached holds what the tokens say, always.

The pool's memory is modelled: position i of a sequence, once computed, holds a digest of its tokens 0..i and its
domain, so a page that is stale, shared too far, or another domain's shows at once.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_store import MemoryStore

from paceline.config import PAGE_TOKENS, SPLIT_TOKENS
from paceline.kv.layout import pages_for
from paceline.kv.manager import KVManager, token_key

SLOTS = 4
MAX_TOKENS = 12 * PAGE_TOKENS


class Running:
    """A sequence between open and close. ``contents`` [tokens] are what its positions hold once they are computed."""

    def __init__(self, slot: int, domain: bytes, tokens: list[int], num_computed: int) -> None:
        self.slot = slot
        self.domain = domain
        self.tokens: list[int] = []
        self.contents = np.zeros(0, np.int64)
        self.num_computed = num_computed
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        """Appends tokens."""
        self.tokens = self.tokens + tokens
        chain = hash(self.domain)
        contents = []
        for token in self.tokens:
            chain = hash((chain, token))
            contents.append(chain)
        self.contents = np.array(contents, np.int64)


class RadixMachine(RuleBasedStateMachine):
    """Opens, computes, slides, closes, persists and reopens at random."""

    kv: KVManager

    @initialize(pages=st.integers(2, 20), window=st.sampled_from([None, None, 1, 40, 130]), has_store=st.booleans())
    def start(self, pages: int, window: int | None, has_store: bool) -> None:
        self.num_pages, self.window = pages, window
        self.store = MemoryStore({}) if has_store else None
        self.boot()

    def boot(self) -> None:
        """A manager with nothing in memory."""
        self.kv = KVManager(self.num_pages, SLOTS, MAX_TOKENS, window=self.window)
        self.memory = np.zeros((self.num_pages, PAGE_TOKENS), np.int64)
        if self.store is not None:
            self.kv.use_store(self.store, self.memory.view(np.uint8))
        self.running: list[Running] = []

    @precondition(lambda self: len(self.running) < SLOTS)
    @rule(
        domain=st.sampled_from([b"a", b"a", b"b"]),
        branch=st.sampled_from([0, 31, 32, 100]),
        length=st.one_of(st.sampled_from([64, 65, 128, MAX_TOKENS]), st.integers(1, MAX_TOKENS)),
        reserve=st.integers(0, 2),
        spare=st.integers(1, 40),
    )
    def open(self, domain: bytes, branch: int, length: int, reserve: int, spare: int) -> None:
        tokens = [1 if at < branch else 2 + branch for at in range(length)]  # a few trunks, so that much is shared
        limit = max(0, len(tokens) - spare)
        before = self.kv.num_available
        opened = self.kv.open(domain, token_key(tokens), limit=limit, reserve=reserve)
        if opened is None:
            assert self.running or pages_for(len(tokens)) + reserve > self.num_pages, "nothing runs and it does not fit"
            assert self.kv.num_available == before
            return
        assert opened.num_cached <= min(limit, opened.num_found)
        self.running.append(Running(opened.slot, domain, tokens, opened.num_cached))
        for source, destination in self.kv.page_copies:  # as a step does, before it computes anything
            self.memory[destination] = self.memory[source]
        self.kv.finish_step()
        self.verify(self.running[-1])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def step(self, data: st.DataObject, fails: bool) -> None:
        """Rows of some sequences, published before they are computed; another may join them in the same step."""
        chosen = data.draw(st.lists(st.sampled_from(self.running), min_size=1, max_size=3, unique_by=id))
        planned = []
        for running in chosen:
            left = len(running.tokens) - running.num_computed
            rows = data.draw(st.one_of(st.just(left), st.integers(0, left)))
            self.kv.slide(running.slot, running.num_computed)
            self.kv.publish(running.slot, running.tokens, running.num_computed + rows)
            planned.append((running, rows))
        if len(self.running) < SLOTS and data.draw(st.booleans()):
            twin = planned[-1][0]
            limit = data.draw(st.integers(0, len(twin.tokens) - 1))
            opened = self.kv.open(twin.domain, token_key(twin.tokens), limit=limit)
            if opened is not None:
                planned.append((Running(opened.slot, twin.domain, twin.tokens, opened.num_cached), 0))
                self.running.append(planned[-1][0])
        for source, destination in self.kv.page_copies:
            self.memory[destination] = self.memory[source]
        if fails:
            self.kv.discard_step()
            for running, _ in planned:
                self.kv.close(running.slot)
                self.running.remove(running)
        else:
            for running, rows in planned:
                for position in range(running.num_computed, running.num_computed + rows):
                    page = self.kv.table[running.slot, position // PAGE_TOKENS]
                    self.memory[page, position % PAGE_TOKENS] = running.contents[position]
                running.num_computed += rows
        self.kv.finish_step()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 40))
    def grow(self, data: st.DataObject, count: int) -> None:
        running = data.draw(st.sampled_from(self.running))
        if running.num_computed < len(running.tokens) or len(running.tokens) + count > MAX_TOKENS:
            return
        self.kv.publish(running.slot, running.tokens, running.num_computed)
        if self.kv.grow(running.slot, len(running.tokens) + count):
            running.extend([90 + count] * count)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def close(self, data: st.DataObject, keep: bool) -> None:
        running = data.draw(st.sampled_from(self.running))
        self.kv.close(running.slot, running.tokens, running.num_computed if keep else 0)
        self.running.remove(running)
        if keep and not self.window and self.kv.num_available > 0:
            whole = running.num_computed // PAGE_TOKENS * PAGE_TOKENS
            assert self.kv.lookup(running.domain, token_key(running.tokens)) >= min(whole, running.num_computed)

    @precondition(lambda self: self.store is not None)
    @rule(count=st.integers(1, 5))
    def persist(self, count: int) -> None:
        self.kv.persist(count)

    @precondition(lambda self: self.store is not None and self.store.kept)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        assert self.store is not None
        self.store.damaged.add(data.draw(st.sampled_from(sorted(self.store.kept))))

    @precondition(lambda self: self.store is not None)
    @rule()
    def restart(self) -> None:
        assert self.store is not None
        self.store.gone = []
        self.boot()

    @invariant()
    def all_is_right(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        for running in self.running:
            self.verify(running)
        if not self.running:
            assert self.kv.num_available == self.num_pages, "a page has leaked"

    def verify(self, running: Running) -> None:
        """What a next row of the sequence would read is what its tokens say."""
        first = 0
        if self.window is not None:
            first = max(0, running.num_computed - self.window + 1) // SPLIT_TOKENS * SPLIT_TOKENS
        positions = np.arange(first, running.num_computed)
        pages = self.kv.table[running.slot, positions // PAGE_TOKENS]
        np.testing.assert_array_equal(self.memory[pages, positions % PAGE_TOKENS], running.contents[positions])


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
