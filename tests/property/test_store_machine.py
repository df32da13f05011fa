"""The store of pages on disk against a model of it: a dict of chains, reopened, damaged and short of room at random."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stored_pages import DOMAIN, PAGE_BYTES, Chain, chains, key, open_store, page_of, read, tokens

from paceline.kv.identity import domain_key
from paceline.kv.store import JOURNAL_BYTES_PER_SLOT

NUM_SLOTS = 5
NUMBERS = st.integers(0, 2)
DOMAINS = (DOMAIN, domain_key("other"))


class StoreMachine(RuleBasedStateMachine):
    """``held`` is what must be there, from id to chain; ``uses`` orders ids from the least to the most recent use."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.store = open_store(self.directory)
        self.limit = self.store.num_bytes + NUM_SLOTS * (PAGE_BYTES + JOURNAL_BYTES_PER_SLOT)
        self.held: dict[int, Chain] = {}
        self.uses: list[int] = []
        self.reopen()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    def leaves(self) -> list[int]:
        inner = {chain[:-1] for chain in self.held.values()}
        return [entry for entry in self.uses if self.held[entry] not in inner]

    def use(self, entry: int) -> None:
        """A use of an entry counts for its ancestors once they are leaves; here, at once and from the first page on."""
        self.uses = [other for other in self.uses if other != entry] + [entry]

    def forget(self, entry: int) -> None:
        chain = self.held.pop(entry)
        at = self.uses.index(entry)
        parent = next((other for other, held in self.held.items() if held == chain[:-1]), None)
        if parent is not None and self.uses.index(parent) < at:
            self.uses.remove(parent)
            self.uses.insert(self.uses.index(entry), parent)
        self.uses.remove(entry)

    @rule(number=NUMBERS, domain=st.sampled_from(DOMAINS), data=st.data())
    def put(self, number: int, domain: bytes, data: st.DataObject) -> None:
        own = [entry for entry, chain in self.held.items() if chain[0] == domain]
        parent = data.draw(st.sampled_from([None, *own]))
        chain = (*(self.held[parent] if parent is not None else (domain,)), tokens(number))
        entry = self.store.put(parent, domain, tokens(number), page_of(chain))
        known = next((other for other, held in self.held.items() if held == chain), None)
        if known is not None:
            assert entry == known
        elif len(self.held) == NUM_SLOTS:
            victims = [leaf for leaf in self.leaves() if leaf != parent]
            assert (entry is None) == (not victims)
            assert self.store.evicted() == victims[:1]
            if victims:
                self.forget(victims[0])
        if entry is not None:
            self.held[entry] = chain
            self.use(entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(sorted(self.held)))
        self.store.touch(entry)
        self.use(entry)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """One byte of one page is another: the page and its descendants are gone, the others stay."""
        entry = data.draw(st.sampled_from(sorted(self.held)))
        node = self.store._entries.get(entry)
        assert node is not None
        position = node.record.slot * PAGE_BYTES + data.draw(st.integers(0, PAGE_BYTES - 1))
        with (self.directory / key().digest().hex()[:32] / "pages.bin").open("r+b") as file:
            file.seek(position)
            old = file.read(1)
            file.seek(position)
            file.write(bytes([old[0] ^ data.draw(st.integers(1, 255))]))
        assert read(self.store, entry) is None
        gone = [other for other, chain in self.held.items() if chain[: len(self.held[entry])] == self.held[entry]]
        evicted = self.store.evicted()
        assert sorted(evicted) == sorted(gone)
        for other in evicted:  # descendants first
            self.forget(other)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = open_store(self.directory, max_bytes=self.limit)

    @rule()
    def crash(self) -> None:
        """All of the files as they are now, without what ``close`` does; only the uses since the opening are lost."""
        copy = Path(tempfile.mkdtemp())
        shutil.copytree(self.directory, copy, dirs_exist_ok=True)
        self.teardown()
        self.directory = copy
        self.store = open_store(copy, max_bytes=self.limit)
        order = {entry: self.store._entries.get(entry) for entry in self.held}
        self.uses = sorted(self.held, key=lambda entry: order[entry].record.used)  # type: ignore[union-attr]

    @invariant()
    def all_that_is_held_is_there_and_right(self) -> None:
        self.store.check()
        assert chains(self.store) == self.held
        assert self.store.evicted() == []
        for entry, chain in self.held.items():
            assert read(self.store, entry) == page_of(chain).tobytes()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
