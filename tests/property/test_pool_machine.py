"""The page pool against a model of it: a counter for each page."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.kv.pool import PagePool

NUM_PAGES = 6


class PoolMachine(RuleBasedStateMachine):
    """Allocates, shares and releases at random."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.owners: Counter[int] = Counter()
        self.touched: set[int] = set()

    @rule()
    def allocate(self) -> None:
        page = self.pool.allocate()
        if page is None:
            assert len(+self.owners) == NUM_PAGES
            return
        assert self.owners[page] == 0, "an owned page was handed out"
        untouched = page not in self.touched
        assert not (untouched and any(self.owners[old] == 0 for old in self.touched)), "fresh memory before freed"
        self.owners[page] = 1
        self.touched.add(page)

    @precondition(lambda self: len(+self.owners) > 0)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(+self.owners)))
        self.pool.share(page)
        self.owners[page] += 1

    @precondition(lambda self: len(+self.owners) > 0)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(+self.owners)))
        self.pool.release(page)
        self.owners[page] -= 1

    @invariant()
    def books_agree(self) -> None:
        self.pool.check(self.owners.elements())
        assert self.pool.num_free == NUM_PAGES - len(+self.owners)
        assert self.pool.num_touched == len(self.touched)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
