"""Damage to a store of pages on disk, by crashes and by bad disks: wherever it is, no wrong page is ever read."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import pytest
from stored_pages import (
    DOMAIN,
    PAGE_BYTES,
    chains,
    folder_of,
    limit_for,
    open_store,
    page_of,
    path,
    put_path,
    read,
    right_pages,
    tokens,
)


@pytest.fixture
def small_store(tmp_path: Path) -> Path:
    """A closed store: two chains, and the record of a page that was evicted and whose slot is used again."""
    directory = tmp_path / "original"
    store = open_store(directory, max_bytes=limit_for(4, tmp_path))
    put_path(store, 9)
    put_path(store, 1, 2)
    put_path(store, 3)
    put_path(store, 1, 4)
    assert len(store.evicted()) == 1
    assert right_pages(store) == {path(1), path(1, 2), path(3), path(1, 4)}
    store.close()
    return directory


class Damage:
    """Puts damaged files in the place of a closed store's own and looks at what it yields then."""

    def __init__(self, directory: Path, file: str) -> None:
        self.directory = directory
        self.folder = folder_of(directory)
        self.file = file
        self.whole = {name: (self.folder / name).read_bytes() for name in ("index.log", "pages.bin")}
        self.data = self.whole[file]

    def num_right(self, data: bytes, *, go_on: bool) -> int:
        """Pages that are there, all of them right. ``go_on`` also adds one, and opens the store once more."""
        for name, content in self.whole.items():
            (self.folder / name).write_bytes(data if name == self.file else content)
        store = open_store(self.directory)
        there = right_pages(store)
        if go_on:
            assert put_path(store, 8) != [None]
            store.close()
            store = open_store(self.directory)
            assert right_pages(store) == there | {path(8)}
            assert store.num_corrupt == 0, "what is damaged is dropped once"
        store.close()
        return len(there)


@pytest.mark.parametrize("file", ["index.log", "pages.bin"])
def test_a_file_cut_anywhere_loses_only_what_was_behind(small_store: Path, file: str) -> None:
    damage = Damage(small_store, file)
    counts = [damage.num_right(damage.data[:end], go_on=end % 16 == 0) for end in range(len(damage.data))]
    assert damage.num_right(damage.data, go_on=True) == 4
    assert counts[0] == 0
    assert counts[-1] == 3, "the last byte belongs to a page"
    if file == "pages.bin":
        # The slots hold 4 (child of 1), 1, 2 (child of 1), 3.
        assert [counts[PAGE_BYTES * slots] for slots in range(4)] == [0, 0, 2, 3]


@pytest.mark.parametrize("file", ["index.log", "pages.bin"])
def test_a_changed_byte_is_never_read(small_store: Path, file: str) -> None:
    rng = random.Random(file)
    damage = Damage(small_store, file)
    for position in range(len(damage.data)):
        changed = bytearray(damage.data)
        changed[position] ^= rng.randrange(1, 256)
        assert damage.num_right(bytes(changed), go_on=position % 16 == 0) < 4


def test_a_damaged_page_takes_its_descendants_along(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entries = put_path(store, 1, 2, 3)
    (other,) = put_path(store, 4)
    with (folder_of(tmp_path) / "pages.bin").open("r+b") as file:
        file.seek(PAGE_BYTES + 5)
        file.write(b"\x00\xff\x00")
    assert read(store, entries[1] or 0) is None
    assert store.num_corrupt == 1
    assert store.evicted() == [entries[2], entries[1]]
    assert set(chains(store)) == {entries[0], other}
    store.check()
    assert put_path(store, 1, 2)[1] is not None, "and can be kept again"
    assert right_pages(store) == {path(1), path(1, 2), path(4)}
    store.close()


def test_pages_in_each_others_places_do_not_pass(tmp_path: Path) -> None:
    """Two whole pages, each with a checksum that is right where it belongs."""
    store = open_store(tmp_path)
    put_path(store, 1)
    put_path(store, 2)
    store.close()
    file = folder_of(tmp_path) / "pages.bin"
    data = file.read_bytes()
    file.write_bytes(data[PAGE_BYTES:] + data[:PAGE_BYTES])
    store = open_store(tmp_path)
    assert right_pages(store) == set()
    assert store.num_corrupt == 2
    store.close()


def test_equal_pages_of_different_chains_do_not_pass_for_each_other(tmp_path: Path) -> None:
    """The checksum covers whose page it is, not its bytes alone."""
    store = open_store(tmp_path)
    page = page_of(path(1))
    first = store.put(None, DOMAIN, tokens(1), page)
    second = store.put(None, DOMAIN, tokens(2), page)
    first_record, second_record = (store._entries.get(entry or 0).record for entry in (first, second))  # type: ignore[union-attr]
    assert first_record.checksum != second_record.checksum
    store.close()


def test_any_journal_with_any_later_pages_yields_right_pages_only(tmp_path: Path) -> None:
    """After a loss of power the disk may hold an older journal than its pages are, or the other way round."""
    limit = limit_for(3, tmp_path)
    live, folder = tmp_path / "live", folder_of(tmp_path / "live")
    journals, pages = [], []
    store = open_store(live, max_bytes=limit)
    for number in range(9):
        put_path(store, *((1, number) if number % 2 else (number,)))
        journals.append((folder / "index.log").read_bytes())
        pages.append((folder / "pages.bin").read_bytes())
    store.close()
    num_right = {}
    for (at, journal), (page_at, page) in itertools.product(enumerate(journals), enumerate(pages)):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(live, copy)
        (folder_of(copy) / "index.log").write_bytes(journal)
        (folder_of(copy) / "pages.bin").write_bytes(page)
        store = open_store(copy, max_bytes=limit)
        num_right[at, page_at] = len(right_pages(store))
        store.close()
    assert all(num_right[at, at] >= min(3, at + 1) for at in range(9))
    assert any(count == 0 for count in num_right.values()), "the checksum had something to do"


def test_a_store_without_a_journal_begins_anew(small_store: Path) -> None:
    (folder_of(small_store) / "index.log").unlink()
    store = open_store(small_store)
    assert right_pages(store) == set()
    assert (folder_of(small_store) / "pages.bin").stat().st_size == 0
    store.close()


def test_a_journal_that_was_not_finished_does_not_count(small_store: Path) -> None:
    unfinished = folder_of(small_store) / "index.new"
    unfinished.write_bytes(b"pacekv1\nwhat a crash left")
    store = open_store(small_store)
    assert len(right_pages(store)) == 4
    assert not unfinished.exists()
    store.close()


def test_check_finds_a_slot_with_two_owners(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put_path(store, 1, 2)
    store.check()
    store._free_slots.append(0)
    with pytest.raises(AssertionError, match="two owners"):
        store.check()
    store.close()
