"""The directory of `--kv-dir`: one locked folder a model, and the room that all of them take."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import CacheDirectoryError
from paceline.kv.identity import StoreKey

PAGES, JOURNAL, NEW_JOURNAL, KEY, LOCK = "pages.bin", "index.log", "index.new", "key.json", "lock"
REMOVED_IN_ORDER = (JOURNAL, NEW_JOURNAL, PAGES, KEY, LOCK)
"""The journal first: a folder whose removal was cut short is an empty store. The lock last: until then it is ours."""

FOLDER = re.compile(r"[0-9a-f]{32}")
MEMO = "models.json"


class CacheDirectory:
    """The folder of one model in a cache directory, locked until ``close``.

    Folders are named by the digest of their key, and only what Paceline made is ever counted or removed.
    """

    def __init__(self, root: Path, key: StoreKey) -> None:
        """Makes the directory where it is missing. Raises CacheDirectoryError when it cannot be used."""
        self._root = root
        self.path = root / key.digest().hex()[:32]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = _lock(self.path)
            if lock is None:
                raise CacheDirectoryError(root, f"another process uses {self.path.name} for the same model")
        except OSError as error:
            raise CacheDirectoryError(root, error.strerror or str(error)) from error
        self._lock_file = lock
        try:
            os.utime(lock)
            self._describe(key)
        except OSError as error:
            self.close()
            raise CacheDirectoryError(root, error.strerror or str(error)) from error

    def close(self) -> None:
        """Lets go of the folder; the time says when it was last used."""
        with contextlib.suppress(OSError):
            os.utime(self._lock_file)
        os.close(self._lock_file)

    def other_bytes(self) -> int:
        """Bytes that other models take, and what the directory keeps about all of them."""
        total = _file_bytes(self._root / MEMO)
        return total + sum(_file_bytes(folder / name) for folder in self._others() for name in REMOVED_IN_ORDER)

    def remove_oldest_other(self) -> bool:
        """Removes the model that was not used for longest; False when there is none but those in use."""
        for folder in sorted(self._others(), key=_last_use):
            lock = _lock(folder)
            if lock is None:
                continue
            for name in REMOVED_IN_ORDER:
                (folder / name).unlink(missing_ok=True)
            os.close(lock)
            with contextlib.suppress(OSError):  # somebody else's file is in it: what was ours is gone all the same
                folder.rmdir()
            return True
        return False

    def _describe(self, key: StoreKey) -> None:
        """Writes what the folder is for, where that is missing: a full disk can be opened for reading."""
        text = json.dumps(key.describe(), indent=2) + "\n"
        path = self.path / KEY
        if _file_bytes(path) != len(text.encode()):
            path.write_text(text, encoding="utf-8")

    def _others(self) -> Iterator[Path]:
        for folder in self._root.iterdir():
            # One without a lock is nobody's store: what is left where a removal could not take somebody else's file.
            if folder != self.path and FOLDER.fullmatch(folder.name) and (folder / LOCK).exists():
                yield folder


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock, None when another holds it."""
    while True:
        folder.mkdir(exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                return file
        except BlockingIOError:
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the folder was removed between opening and locking: again


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / LOCK).stat().st_mtime
    return 0.0


def _file_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
