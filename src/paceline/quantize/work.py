"""What is finished of a quantisation, on disk, so that a run that was killed goes on where it was.

Layout: a directory beside the output, with ``key`` (hex: everything that the result depends on) and a file for each
finished part: 32 bytes of BLAKE2b, then a safetensors file of which that is the digest. A part is written under another
name, flushed to the disk and renamed. A part that is not what its digest says is as good as missing; a directory with
another key is emptied.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from paceline.errors import OutputError

Arrays = dict[str, NDArray[Any]]

_DIGEST_BYTES = 32
_KEY_FILE = "key"


class WorkDirectory:
    """Finished parts by name. One process uses it at a time; a context manager that gives it back."""

    def __init__(self, path: Path, key: str) -> None:
        """Opens or makes the directory; what another key left there is removed. OutputError when it cannot be used."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise OutputError(path, f"cannot keep unfinished work here: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise OutputError(path, "is used by another process that quantises to the same place") from None
        try:
            known = (path / _KEY_FILE).read_text("ascii")
        except (OSError, UnicodeDecodeError):
            known = ""
        if known != key:
            try:
                for left in path.iterdir():
                    left.unlink()
                _write(path / _KEY_FILE, key.encode("ascii"))
            except OSError as error:
                os.close(self._lock)
                raise OutputError(path, f"cannot keep unfinished work here: {error.strerror}") from error

    def __enter__(self) -> WorkDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def load(self, part: str) -> Arrays | None:
        """The arrays of a finished part; None when it is not there or not whole."""
        try:
            data = (self.path / part).read_bytes()
        except OSError:
            return None
        if len(data) < _DIGEST_BYTES or _digest(data[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
            return None
        arrays: Arrays = load(data[_DIGEST_BYTES:])
        return arrays

    def save(self, part: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Makes the part finished. OutputError when it cannot be written: parts before it stay."""
        data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        try:
            _write(self.path / part, _digest(data) + data)
        except OSError as error:
            problem = f"unfinished work cannot be written: {error.strerror}; the same command goes on where this ended"
            raise OutputError(self.path, problem) from error

    def remove(self) -> None:
        """Deletes the directory with all that is in it."""
        shutil.rmtree(self.path)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
