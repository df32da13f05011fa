"""A file as read-only memory."""

from __future__ import annotations

import mmap
from pathlib import Path

from paceline.errors import CheckpointError


def map_file(path: Path) -> mmap.mmap:
    """The whole file, mapped for reading; it stays mapped for as long as a view of it lives."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(path, "the file is empty") from None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
