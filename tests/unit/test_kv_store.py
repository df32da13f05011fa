"""The store of pages on disk: what is kept, what leaves first, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stored_pages import (
    DOMAIN,
    PAGE_BYTES,
    folder_of,
    key,
    limit_for,
    open_store,
    page_of,
    path,
    put_path,
    read,
    right_pages,
    tokens,
)

from paceline.errors import CacheDirectoryError
from paceline.kv.identity import domain_key
from paceline.kv.journal import HEADER_BYTES, PUT_BYTES
from paceline.kv.store import JOURNAL_BYTES_PER_SLOT, PageStore

# Keeping


def test_pages_come_back_after_reopening(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_path(store, 1, 2, 3)
    put_path(store, 1, 4)
    put_path(store, 1, 2, domain=domain_key("other"))
    expected = {path(1), path(1, 2), path(1, 2, 3), path(1, 4)}
    expected |= {path(1, domain=domain_key("other")), path(1, 2, domain=domain_key("other"))}
    assert right_pages(store) == expected
    store.close()
    store.close()
    for _ in range(2):
        store = open_store(tmp_path)
        assert right_pages(store) == expected
        assert len(store) == 6
        assert store.evicted() == []
        store.close()


def test_a_page_written_after_a_read_can_be_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(100):  # the file grows past the mapping again and again
        (entry,) = put_path(store, number)
        assert entry is not None
        assert read(store, entry) == page_of(path(number)).tobytes()
    assert len(right_pages(store)) == 100
    store.close()


def test_a_page_that_is_here_already_keeps_its_entry(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert put_path(store, 1, 2) == put_path(store, 1, 2)
    assert len(store) == 2
    store.close()


def test_a_page_whose_parent_is_gone_is_not_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.put(17, DOMAIN, tokens(1), page_of(path(1))) is None
    assert read(store, 17) is None
    store.touch(17)
    assert len(store) == 0
    store.close()


def test_a_chain_cannot_change_its_domain(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (entry,) = put_path(store, 1)
    with pytest.raises(AssertionError, match="domain"):
        store.put(entry, domain_key("other"), tokens(2), page_of(path(2)))
    store.close()


def test_other_page_sizes_are_another_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_path(store, 1)
    store.close()
    store = PageStore.open(tmp_path, key(), page_bytes=PAGE_BYTES // 2, max_bytes=2**20)
    assert len(store) == 0
    page = np.arange(PAGE_BYTES // 2, dtype=np.uint8)
    assert store.put(None, DOMAIN, tokens(1), page) is not None
    store.close()


# Room


def test_the_least_recently_used_leaf_leaves_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=limit_for(4, tmp_path))
    first, second = put_path(store, 1, 2)
    (third,) = put_path(store, 3)
    (fourth,) = put_path(store, 4)
    assert second is not None
    assert third is not None
    store.touch(third)
    put_path(store, 5)
    assert store.evicted() == [second], "1 is older, but it is no leaf"
    put_path(store, 6)
    assert store.evicted() == [first], "now it is, used when its child was"
    put_path(store, 7)
    assert store.evicted() == [fourth]
    put_path(store, 8)
    assert store.evicted() == [third]
    assert right_pages(store) == {path(5), path(6), path(7), path(8)}
    store.close()


def test_uses_are_remembered_over_a_restart(tmp_path: Path) -> None:
    limit = limit_for(3, tmp_path)
    store = open_store(tmp_path, max_bytes=limit)
    (first,), (second,), _ = (put_path(store, number) for number in (1, 2, 3))
    assert first is not None
    store.touch(first)
    store.close()
    store = open_store(tmp_path, max_bytes=limit)
    put_path(store, 4)
    assert store.evicted() == [second]
    store.close()


def test_a_page_never_pushes_out_its_own_chain(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=limit_for(2, tmp_path))
    entries = put_path(store, 1, 2, 3)
    assert entries[2] is None
    assert store.evicted() == []
    assert store.problem is None
    assert right_pages(store) == {path(1), path(1, 2)}
    store.close()


def test_the_limit_holds_whatever_happens(tmp_path: Path) -> None:
    limit = limit_for(5, tmp_path)
    store = open_store(tmp_path, max_bytes=limit)
    for number in range(200):
        put_path(store, number % 7, number)
        assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= limit
        store.check()
    assert len(store) == 5
    store.close()


def test_a_lower_limit_moves_what_stays(tmp_path: Path) -> None:
    limit = limit_for(3, tmp_path)
    store = open_store(tmp_path)
    for number in range(9):
        put_path(store, number)
    for entry in (9, 2, 8):
        store.touch(entry)
    store.close()
    store = open_store(tmp_path, max_bytes=limit)
    assert right_pages(store) == {path(8), path(1), path(7)}
    assert (folder_of(tmp_path) / "pages.bin").stat().st_size == 3 * PAGE_BYTES
    assert store.evicted() == [], "the caller never heard of them"
    store.close()
    store = open_store(tmp_path)
    assert right_pages(store) == {path(8), path(1), path(7)}
    store.close()


def test_the_model_that_was_not_used_for_longest_leaves_first(tmp_path: Path) -> None:
    limit = limit_for(4, tmp_path)
    for age, name in ((100, "oldest"), (300, "locked"), (50, "newer")):
        store = open_store(tmp_path, name=name)
        put_path(store, 1)
        store.close()
        os.utime(folder_of(tmp_path, name) / "lock", (10**9 - age, 10**9 - age))
    locked = open_store(tmp_path, name="locked")
    os.utime(folder_of(tmp_path, "locked") / "lock", (10**9 - 300, 10**9 - 300))
    store = open_store(tmp_path, max_bytes=limit)
    while folder_of(tmp_path, "oldest").exists():
        assert put_path(store, len(store)) != [None]
        assert store.evicted() == []
    assert folder_of(tmp_path, "newer").exists()
    for number in range(100, 110):
        put_path(store, number)
    assert not folder_of(tmp_path, "newer").exists()
    assert right_pages(locked) == {path(1)}
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) <= limit
    locked.close()
    store.close()


def test_what_others_keep_in_the_directory_stays(tmp_path: Path) -> None:
    theirs = [tmp_path / "notes.txt", tmp_path / ("a" * 32) / "data", tmp_path / "folder" / "lock"]
    old = open_store(tmp_path, name="old")
    put_path(old, 1)
    old.close()
    theirs.append(folder_of(tmp_path, "old") / "notes.txt")
    for file in theirs:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(5000))
    store = open_store(tmp_path, max_bytes=limit_for(1, tmp_path))
    put_path(store, 1)
    put_path(store, 2)
    assert right_pages(store) == {path(2)}
    assert all(file.stat().st_size == 5000 for file in theirs)
    assert not (folder_of(tmp_path, "old") / "pages.bin").exists()
    store.close()


def test_the_journal_stays_short(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=limit_for(3, tmp_path))
    journal = folder_of(tmp_path) / "index.log"
    for number in range(100):
        put_path(store, number)
        assert journal.stat().st_size <= HEADER_BYTES + 3 * (JOURNAL_BYTES_PER_SLOT - PUT_BYTES)
    assert right_pages(store) == {path(97), path(98), path(99)}
    store.close()


# Refusals


def test_a_second_user_of_the_same_model_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(CacheDirectoryError, match="another process uses") as caught:
        open_store(tmp_path)
    assert str(tmp_path) in str(caught.value)
    other = open_store(tmp_path, name="other")
    other.close()
    store.close()
    open_store(tmp_path).close()


def test_another_process_is_refused_too(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nfrom stored_pages import open_store\n"
        "from paceline.errors import CacheDirectoryError\n"
        "try:\n    open_store(Path(sys.argv[1]))\n    print('opened')\n"
        "except CacheDirectoryError as error:\n    print(error)\n"
    )

    def child() -> str:
        command = [sys.executable, "-c", code, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    store = open_store(tmp_path)
    assert "another process uses" in child()
    store.close()
    assert child() == "opened\n", "and a process that ends lets go of it"
    open_store(tmp_path).close()


def test_impossible_directories_and_limits_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below", tmp_path / ("x" * 300)):
        with pytest.raises(CacheDirectoryError) as caught:
            open_store(place)
        assert str(place) in str(caught.value)
    enough = limit_for(1, tmp_path)
    with pytest.raises(CacheDirectoryError, match=f"limit is {enough - 1:,} bytes, and one page takes {enough:,}"):
        open_store(tmp_path, max_bytes=enough - 1)
    open_store(tmp_path, max_bytes=enough).close()


FULL_DISK = """
import resource, sys, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from stored_pages import open_store, put_path, right_pages
store = open_store(Path(sys.argv[2]))
put_path(store, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    kept = [number for number in range(1, 40) if put_path(store, number) != [None]]
assert kept == list(range(1, len(kept) + 1)), kept
assert len(caught) == 1 and "no longer written to disk" in str(caught[0].message), caught
assert store.problem
assert len(right_pages(store)) == len(kept) + 1
store.close()
print(len(kept) + 1)
"""


@pytest.mark.parametrize("room", [1000, 1001, 2 * PAGE_BYTES + 400, HEADER_BYTES + 5 * PUT_BYTES])
def test_a_full_disk_is_told_once_and_what_is_there_stays(tmp_path: Path, room: int) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(Path(__file__).parent), str(tmp_path), str(room)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    store = open_store(tmp_path)
    assert len(right_pages(store)) == int(ended.stdout)
    assert len(store) == int(ended.stdout)
    put_path(store, 100)
    store.check()
    store.close()
