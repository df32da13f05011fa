"""The append-only list of what a store holds: checksummed, typed, length-prefixed records after a header.

Layout, little-endian: header = magic, 32 bytes that identify the store, crc32. Record = length of the payload (u32),
kind (u8), payload, crc32 of all of it before. A torn or altered record ends the journal; it and what follows goes.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.config import PAGE_TOKENS

MAGIC = b"pacekv1\n"
IDENTITY_BYTES = 32
HEADER_BYTES = len(MAGIC) + IDENTITY_BYTES + 4
TOKENS_BYTES = 4 * PAGE_TOKENS
NO_PARENT = 0

_FRAME = struct.Struct("<IB")
_CHECKSUM = struct.Struct("<I")
_PUT = struct.Struct(f"<QQQQI32s{TOKENS_BYTES}s")
_DELETE = struct.Struct("<Q")
_PUT_KIND, _DELETE_KIND = 1, 2
PUT_BYTES = _FRAME.size + _PUT.size + _CHECKSUM.size
DELETE_BYTES = _FRAME.size + _DELETE.size + _CHECKSUM.size


@dataclass(frozen=True)
class Put:
    """Entry ``entry`` (1, 2, ...) lies in ``slot``; ``used`` counts uses of the store up to its last one."""

    entry: int
    parent: int | None
    slot: int
    used: int
    checksum: int
    domain: bytes
    tokens: bytes


@dataclass(frozen=True)
class Delete:
    """Entry ``entry`` and all that descend from it are gone."""

    entry: int


Record = Put | Delete


def encode(record: Record) -> bytes:
    """The bytes of a record."""
    if isinstance(record, Delete):
        kind, payload = _DELETE_KIND, _DELETE.pack(record.entry)
    else:
        assert len(record.domain) == 32
        assert len(record.tokens) == TOKENS_BYTES
        parent = NO_PARENT if record.parent is None else record.parent
        numbers = (record.entry, parent, record.slot, record.used, record.checksum)
        kind, payload = _PUT_KIND, _PUT.pack(*numbers, record.domain, record.tokens)
    framed = _FRAME.pack(len(payload), kind) + payload
    return framed + _CHECKSUM.pack(zlib.crc32(framed))


def decode(data: bytes, start: int) -> tuple[list[Record], int]:
    """The records from ``start`` on, up to the first that is torn or altered, and where that one begins."""
    records: list[Record] = []
    while start + _FRAME.size <= len(data):
        length, kind = _FRAME.unpack_from(data, start)
        payload_start = start + _FRAME.size
        end = payload_start + length
        if end + _CHECKSUM.size > len(data) or zlib.crc32(data[start:end]) != _CHECKSUM.unpack_from(data, end)[0]:
            break
        if kind == _PUT_KIND and length == _PUT.size:
            entry, parent, slot, used, checksum, domain, tokens = _PUT.unpack_from(data, payload_start)
            records.append(Put(entry, None if parent == NO_PARENT else parent, slot, used, checksum, domain, tokens))
        elif kind == _DELETE_KIND and length == _DELETE.size:
            records.append(Delete(*_DELETE.unpack_from(data, payload_start)))
        else:
            break
        start = end + _CHECKSUM.size
    return records, start


class Journal:
    """A journal file that is open for appending. Every method may raise OSError."""

    def __init__(self, path: Path, identity: bytes) -> None:
        """Opens the journal, or makes one; one of another identity or with a damaged header is replaced.

        ``records`` are those found; ``is_new`` says that there was no journal to go on with.
        """
        assert len(identity) == IDENTITY_BYTES
        head = MAGIC + identity
        self._path = path
        self._new_path = path.with_suffix(".new")
        self._new_path.unlink(missing_ok=True)  # of a rewriting that a crash cut short
        self._header = head + _CHECKSUM.pack(zlib.crc32(head))
        self.records: list[Record] = []
        data = path.read_bytes() if path.exists() else b""
        self.is_new = data[:HEADER_BYTES] != self._header
        if self.is_new:
            self._file = self._written([])
            self.num_bytes = HEADER_BYTES
        else:
            self.records, self.num_bytes = decode(data, HEADER_BYTES)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.ftruncate(self._file, self.num_bytes)

    def append(self, record: Record) -> None:
        """Adds a record. When that fails, no part of it stays."""
        data = encode(record)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self.num_bytes)
            raise
        self.num_bytes += len(data)

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replaces the whole journal at once: after a crash there is the old one or the new one."""
        old_file = self._file
        self._file = self._written(records)
        os.close(old_file)
        self.num_bytes = os.fstat(self._file).st_size

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _written(self, records: Iterable[Record]) -> int:
        """A descriptor of a new journal that has taken the place of the old one."""
        file = os.open(self._new_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            with os.fdopen(os.dup(file), "wb") as stream:
                stream.write(self._header)
                stream.writelines(map(encode, records))
            os.fsync(file)
            os.replace(self._new_path, self._path)
        except OSError:
            os.close(file)
            self._new_path.unlink(missing_ok=True)
            raise
        return file
