"""The page pool's order of pages and its checks."""

from __future__ import annotations

import pytest

from paceline.kv.pool import PagePool


def test_pages_are_distinct_and_run_out() -> None:
    pool = PagePool(3)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, None]
    assert pool.num_free == 0


def test_a_freed_page_comes_before_an_untouched_one() -> None:
    pool = PagePool(100)
    pages = [pool.allocate() for _ in range(3)]
    assert pages == [0, 1, 2]
    pool.release(0)
    pool.release(2)
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [2, 0, 3]
    assert pool.num_touched == 4


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    pool = PagePool(1)
    page = pool.allocate()
    assert page == 0
    pool.share(page)
    pool.release(page)
    assert pool.allocate() is None
    pool.release(page)
    assert pool.references(page) == 0
    assert pool.allocate() == page


def test_releasing_or_sharing_a_free_page_is_refused() -> None:
    pool = PagePool(2)
    for action in (pool.release, pool.share):
        with pytest.raises(AssertionError, match="free"):
            action(0)
    page = pool.allocate()
    assert page is not None
    pool.release(page)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(page)


@pytest.mark.parametrize("owned", [[], [0], [0, 1, 1], [0, 0, 1], [0, 1, 3]])
def test_check_finds_wrong_owners(owned: list[int]) -> None:
    pool = PagePool(4)
    pool.allocate()
    pool.allocate()
    pool.check([1, 0])
    with pytest.raises(AssertionError):
        pool.check(owned)


def test_check_finds_a_page_that_is_free_twice() -> None:
    pool = PagePool(4)
    pool.allocate()
    pool.release(0)
    pool._freed.append(0)
    with pytest.raises(AssertionError, match="twice"):
        pool.check([])
