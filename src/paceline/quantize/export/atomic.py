"""A file or a directory that takes the place of another at once, or not at all.

Everything is written into a scratch directory beside OUT, forced to the disk and read back; only then is it renamed. A
directory cannot be renamed onto one that has something in it, so the two change places in one system call
(renameat2, RENAME_EXCHANGE) and the old one is deleted afterwards. Where a system lacks that call, the old directory
is moved into the scratch directory first; a kill between the two renames leaves it there, and the next write to OUT
moves it back.

Checked by: tests/unit/test_export_atomic.py, which kills a writer before each of its calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import OutputError

OLD = "replaced"
"""Where the old directory waits in the scratch directory on systems that cannot exchange two."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_output(out: Path, *, force: bool, source: Path | None = None) -> None:
    """OutputError when a model made from ``source`` may not be written to ``out``: it exists and ``force`` is not
    given, it is no model but a directory with other things, or it is the source, holds it, or is a file of it.
    """
    target = out.resolve()
    kept = None if source is None else source.resolve()
    lost = (target, target.parent) if target.is_file() else (target,)
    if kept is not None and (kept in lost or target in kept.parents):
        raise OutputError(out, f"the model that it is made from ({source}) would be lost: choose another place")
    if not target.exists():
        return
    if not force:
        raise OutputError(out, "exists: choose another place, or give --force to replace it")
    if target.is_dir() and any(target.iterdir()) and not _is_model(target):
        raise OutputError(out, "is a directory with other things than a model: remove it yourself, or choose another")


def _is_model(directory: Path) -> bool:
    """Whether it holds what writers make: config.json, safetensors, and no directories. Many a project that is no model
    has a config.json."""
    has_weights = any(path.suffix == ".safetensors" for path in directory.iterdir())
    return (directory / "config.json").is_file() and has_weights and not any(p.is_dir() for p in directory.iterdir())


def write_atomically(
    out: Path, write: Callable[[Path], None], verify: Callable[[Path], object], *, force: bool, source: Path
) -> None:
    """Calls ``write`` with a path that does not exist yet, forces what it made there to the disk, calls ``verify`` with
    the same path and gives it the place of ``out``. A kill at any instant leaves ``out`` as it was or as it will be.

    Raises OutputError for what ``check_output`` refuses and for what the system says; an error of ``write`` or
    ``verify`` goes on. ``out`` is unchanged after each. Removes what killed writers to the same ``out`` have left.
    """
    check_output(out, force=force, source=source)
    target = out.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_abandoned(target)
        with _scratch_directory(target) as scratch:
            made = scratch / target.name
            write(made)
            _sync(made)
            verify(made)
            # Somebody may have put something there in the meantime.
            check_output(out, force=force, source=source)
            _put_in_place(made, target, scratch / OLD)
            _sync_directory(target.parent)
    except OSError as error:
        raise OutputError(out, f"cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _scratch_directory(target: Path) -> Iterator[Path]:
    """A new directory beside ``target``, locked, removed at the end."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        lock = _lock(scratch)
        if lock is not None:
            break
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _clear_abandoned(target: Path) -> None:
    """Removes scratch directories that no process holds; an old directory in one goes back to its place."""
    prefix = _prefix(target)
    for scratch in sorted(target.parent.iterdir()):
        if not scratch.name.startswith(prefix) or (lock := _lock(scratch)) is None:
            continue
        if (scratch / OLD).exists() and not target.exists():
            (scratch / OLD).rename(target)
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _lock(directory: Path) -> int | None:
    """The open, locked directory; None when another process holds it or has removed it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(directory)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _sync(path: Path) -> None:
    """Forces a file, or a directory and all in it, to the disk, and asks the system to forget what it has cached of
    files: who reads them next, reads the disk.
    """
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            _sync(inner)
        _sync_directory(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(made: Path, target: Path, old: Path) -> None:
    if not target.exists() or not (made.is_dir() or target.is_dir()):
        os.replace(made, target)
    elif not exchange(made, target):
        target.rename(old)
        made.rename(target)


def exchange(first: Path, second: Path) -> bool:
    """Has two paths change places at once; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(first))
