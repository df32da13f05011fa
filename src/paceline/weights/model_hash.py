"""What a model is, whatever its files are called and wherever they lie: a hash of their contents."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from paceline.errors import CacheDirectoryError, CheckpointError

HASH_BYTES = 32
CHUNK_BYTES = 2**20

SETTLED_NS = 2 * 10**9
"""A younger file is not remembered: on a coarse clock it could change once more and keep its times."""


def model_hash(files: Sequence[Path], memo_path: Path | None = None) -> bytes:
    """32 bytes of BLAKE2b over the contents of a model's files; names and places do not matter.

    Hashing takes 1 to 2 s a gigabyte, so what was found is remembered in ``memo_path`` (JSON, made anew when it is
    missing or broken) for as long as a file's place, inode, size and times stay; without a path nothing is. Raises
    CheckpointError when a file cannot be read, CacheDirectoryError when the memo cannot be written.
    """
    memo = {} if memo_path is None else _read_memo(memo_path)
    found = {str(file.resolve()): _identity_and_hash(file, memo.get(str(file.resolve()))) for file in files}
    latest_ns = time.time_ns() - SETTLED_NS
    settled = {name: entry for name, entry in found.items() if max(entry[0][3:]) < latest_ns}
    if memo_path is not None and not settled.items() <= memo.items():
        _write_memo(memo_path, memo | settled)
    state = blake2b(digest_size=HASH_BYTES)
    for content_hash in sorted(content_hash for _, content_hash in found.values()):
        state.update(bytes.fromhex(content_hash))  # all of one length: no two lists of files give the same input
    return state.digest()


Entry = tuple[tuple[int, ...], str]
"""What a file was (device, inode, size, times of its contents and of its inode in ns), and its hash."""


def _identity_and_hash(file: Path, remembered: Entry | None) -> Entry:
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if remembered is not None and remembered[0] == identity:
                return remembered
            state = blake2b(digest_size=HASH_BYTES)
            while chunk := stream.read(CHUNK_BYTES):
                state.update(chunk)
            return identity, state.hexdigest()
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror}") from error


def _read_memo(path: Path) -> dict[str, Entry]:
    """What is remembered; whatever is not as we write it is forgotten."""
    memo: dict[str, Entry] = {}
    try:
        for name, (identity, content_hash) in json.loads(path.read_bytes()).items():
            if len(bytes.fromhex(content_hash)) == HASH_BYTES and all(type(number) is int for number in identity):
                memo[name] = tuple(identity), content_hash
    except FileNotFoundError:
        pass
    except OSError as error:
        raise CacheDirectoryError(path.parent, error.strerror or str(error)) from error
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return memo


def _write_memo(path: Path, memo: dict[str, Entry]) -> None:
    """Replaces the memo at once; of two processes that do so the later one stays, which costs the other a hash."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as stream:
            json.dump(memo, stream, indent=1)
        os.replace(stream.name, path)
    except OSError as error:
        raise CacheDirectoryError(path.parent, error.strerror or str(error)) from error
