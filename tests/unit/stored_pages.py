"""Stores of tiny pages whose bytes follow from their tokens, so that any test can tell whether a page is right."""

from __future__ import annotations

import functools
import hashlib
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tiny_models import tiny_config

from paceline.config import PAGE_TOKENS, EngineConfig
from paceline.kv.identity import StoreKey, domain_key, store_key
from paceline.kv.store import JOURNAL_BYTES_PER_SLOT, PageStore, StoredPage

PAGE_BYTES = 96
DOMAIN = domain_key("tests")
Chain = tuple[bytes, ...]
"""A domain, then the tokens of each page up to and including one."""


@functools.cache
def key(name: str = "model") -> StoreKey:
    """The key of a model of that name."""
    model_hash = hashlib.blake2b(name.encode(), digest_size=32).digest()
    return store_key(tiny_config(), EngineConfig(), model_hash=model_hash, executor="native")


def open_store(directory: Path, *, max_bytes: int = 2**20, name: str = "model") -> PageStore:
    """The store of a model of that name."""
    return PageStore.open(directory, key(name), page_bytes=PAGE_BYTES, max_bytes=max_bytes)


def tokens(number: int) -> bytes:
    """A page's tokens."""
    return np.full(PAGE_TOKENS, number, "<i4").tobytes()


def page_of(chain: Chain) -> NDArray[np.uint8]:
    """The only right bytes of the page at the end of a chain."""
    return np.frombuffer(hashlib.shake_128(b"".join(chain)).digest(PAGE_BYTES), np.uint8).copy()


def put_path(store: PageStore, *numbers: int, domain: bytes = DOMAIN) -> list[int | None]:
    """Puts a chain of pages; the ids of their entries."""
    parent: int | None = None
    chain: Chain = (domain,)
    entries = []
    for number in numbers:
        chain += (tokens(number),)
        parent = store.put(parent, domain, tokens(number), page_of(chain))
        entries.append(parent)
        if parent is None:
            break
    return entries


def chains(store: PageStore) -> dict[int, Chain]:
    """The chain of every entry; fails when a parent does not come before its child."""
    found: dict[int, Chain] = {}
    for page in store.entries():
        assert isinstance(page, StoredPage)
        before = (page.domain,) if page.parent is None else found[page.parent]
        found[page.entry] = (*before, page.tokens)
    return found


def read(store: PageStore, entry: int) -> bytes | None:
    """A page's bytes, None when it is gone."""
    into = np.zeros(PAGE_BYTES, np.uint8)
    return into.tobytes() if store.read(entry, into) else None


def right_pages(store: PageStore) -> set[Chain]:
    """Reads every entry, fails when one yields wrong bytes, and returns the chains of those that are there."""
    there = set()
    for entry, chain in chains(store).items():
        data = read(store, entry)
        if data is not None:
            assert data == page_of(chain).tobytes(), f"entry {entry} has wrong bytes"
            there.add(chain)
    store.check()
    return there


def path(*numbers: int, domain: bytes = DOMAIN) -> Chain:
    """The chain of pages of those numbers."""
    return (domain, *map(tokens, numbers))


def folder_of(directory: Path, name: str = "model") -> Path:
    """The folder of a model."""
    return directory / key(name).digest().hex()[:32]


def limit_for(num_pages: int, directory: Path) -> int:
    """The limit under which exactly so many pages fit; the directory is made for it and removed again."""
    store = open_store(directory / "measure")
    empty = store.num_bytes
    store.close()
    shutil.rmtree(directory / "measure")
    return empty + num_pages * (PAGE_BYTES + JOURNAL_BYTES_PER_SLOT)
