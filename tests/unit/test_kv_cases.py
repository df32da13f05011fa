"""Single cases of the prefix cache that went wrong once, each in a few steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from memory_store import MemoryStore, Stored
from stored_pages import open_store, put_path

from paceline.config import PAGE_TOKENS
from paceline.kv.manager import KVManager, Opened, token_key


def opened(kv: KVManager, tokens: list[int], limit: int = 0) -> Opened:
    """A sequence that is there."""
    found = kv.open(b"a", token_key(tokens), limit=limit)
    assert found is not None
    return found


def computed(kv: KVManager, tokens: list[int], num_computed: int) -> int:
    """The slot of a sequence after a step that computed its first tokens."""
    slot = opened(kv, tokens).slot
    kv.publish(slot, tokens, num_computed)
    kv.finish_step()
    return slot


def fill(kv: KVManager, spare: int) -> None:
    """Takes all free pages and ``spare`` cached ones, and gives them back without leaving anything."""
    kv.close(opened(kv, [99] * PAGE_TOKENS * (kv.pool.num_free + spare)).slot)


def test_a_sequence_whose_place_left_the_window_and_the_tree_ends_well() -> None:
    kv = KVManager(8, 3, 512, window=20)
    tokens = [1] * 155
    slot = computed(kv, tokens, 150)
    kv.slide(slot, 150)
    other = opened(kv, [2] * PAGE_TOKENS * 7)
    kv.check()
    kv.close(slot, tokens, 150)
    kv.check()
    kv.close(other.slot)
    opened(kv, [3] * PAGE_TOKENS * 8)
    kv.check()


def test_a_store_that_forgets_what_a_running_sequence_has_left_behind() -> None:
    store = MemoryStore({})
    kv = KVManager(16, 4, 512, window=20)
    kv.use_store(store, np.zeros((16, PAGE_TOKENS * 8), np.uint8))
    tokens = [1] * 128
    kv.close(computed(kv, tokens, 128), tokens, 128)
    while kv.persist(1):
        pass
    longer = tokens + [7] * 100
    slot = opened(kv, longer, limit=227).slot
    kv.publish(slot, longer, 170)
    kv.finish_step()
    kv.slide(slot, 170)
    fill(kv, 4)
    store.forget(max(store.kept))
    other = [5] * PAGE_TOKENS
    kv.close(computed(kv, other, 32), other, 32)
    while kv.persist(1):
        pass
    kv.close(slot, longer, 170)
    kv.check()
    opened(kv, [3] * PAGE_TOKENS * 16)
    kv.check()


def test_a_page_of_the_step_under_way_is_cut_before_the_window_is_looked_at() -> None:
    kv = KVManager(16, 4, 512, window=5)
    tokens = [1] * 200
    slot = computed(kv, tokens, 132)
    kv.slide(slot, 132)
    fill(kv, 3)
    kv.publish(slot, tokens, 170)
    late = opened(kv, tokens[:134], limit=133)
    assert late.num_cached % PAGE_TOKENS == 0
    kv.check()


@pytest.mark.parametrize("num_pages", [3, 1050])
def test_a_failed_step_keeps_what_is_stored(num_pages: int) -> None:
    stored = {
        at + 1: Stored(at + 1, at or None, b"a", token_key([at] * PAGE_TOKENS), np.zeros(256, np.uint8))
        for at in range(num_pages)
    }
    kv = KVManager(8, 2, 40_000)
    kv.use_store(MemoryStore(stored), np.zeros((8, 256), np.uint8))
    tokens = [at for at in range(num_pages) for _ in range(PAGE_TOKENS)]
    slot = opened(kv, tokens[:64]).slot  # log-probabilities of the prompt: it computes what is stored
    kv.publish(slot, tokens, 32)
    kv.discard_step()
    kv.close(slot)
    kv.check()
    assert kv.lookup(b"a", token_key(tokens)) == len(tokens)
    kv.tree.drop(next(iter(kv.tree.nodes())))  # of any depth
    assert kv.lookup(b"a", token_key(tokens)) == 0
    kv.check()


def test_what_is_computed_may_be_copied_and_outlives_a_failed_step() -> None:
    kv = KVManager(8, 3, 256)
    tokens = [1] * 64
    kv.close(opened(kv, tokens).slot, tokens, 64)  # its last step has run, and the next one is being planned
    late = opened(kv, tokens, limit=40)
    assert late.num_cached == 40
    assert len(kv.page_copies) == 1
    kv.discard_step()
    kv.finish_step()
    assert kv.lookup(b"a", token_key(tokens)) == 64
    kv.check()


def test_a_domain_without_pages_leaves_nothing() -> None:
    kv = KVManager(4, 2, 128)
    for domain in range(100):
        found = kv.open(str(domain).encode(), token_key([1] * 64), limit=63)
        assert found is not None
        kv.publish(found.slot, [1] * 64, 64)
        kv.finish_step()
        kv.close(found.slot, [1] * 64, 64)
        kv.check()
    assert len(kv.tree._roots) <= 4


def test_reading_back_goes_on_where_it_stopped() -> None:
    stored = {
        at + 1: Stored(at + 1, at or None, b"a", token_key([at] * PAGE_TOKENS), np.full(256, at, np.uint8))
        for at in range(10)
    }
    kv = KVManager(16, 2, 512)
    memory = np.zeros((16, 256), np.uint8)
    kv.use_store(MemoryStore(stored), memory)
    tokens = [at for at in range(10) for _ in range(PAGE_TOKENS)]
    for _ in range(2):
        assert kv.open(b"a", token_key(tokens), limit=319, max_loads=4) is None
        assert kv.is_loading
        kv.check()
    found = kv.open(b"a", token_key(tokens), limit=319, max_loads=4)
    assert found is not None
    assert not kv.is_loading
    assert found.num_cached == 319
    pages = [page for page in kv.pages(found.slot)[:9] if page is not None]
    assert memory[pages, 0].tolist() == list(range(9))


def test_a_closed_store_touches_no_file(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=2**20)
    put_path(store, 1)
    store.close()
    with pytest.raises(AssertionError, match="closed"):
        put_path(store, 2)
