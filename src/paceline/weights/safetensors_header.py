"""The header of a safetensors file: where each tensor lies.

Source: the safetensors format (huggingface/safetensors, README).
Departures: the library hands out numpy arrays, and numpy has no bfloat16; this reader says where the bytes are.
Checked by: tests/unit/test_safetensors.py, against the library.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.weights.inventory import Shape

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8}
"""Bytes of a number of the types whose tensors are checked to have as many as their shape says."""

MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: bytes ``start : start + num_bytes`` of ``file``."""

    file: Path
    dtype: str
    shape: Shape
    start: int
    num_bytes: int

    def part(self, rows: range) -> Entry:
        """Some rows of it, which follow each other."""
        row_bytes = self.num_bytes // self.shape[0]
        start = self.start + rows.start * row_bytes
        return Entry(self.file, self.dtype, (len(rows), *self.shape[1:]), start, len(rows) * row_bytes)


def read_entries(path: Path, buffer: mmap.mmap) -> dict[str, Entry]:
    """Name -> place of every tensor of a mapped safetensors file. Raises CheckpointError naming file and tensor."""
    header, data_start = _read_header(path, buffer)
    header.pop("__metadata__", None)
    return {name: _entry(path, name, fields, data_start, len(buffer)) for name, fields in header.items()}


def read_metadata(path: Path, buffer: mmap.mmap) -> Mapping[str, str]:
    """The texts under ``__metadata__`` of a mapped safetensors file, none where it has none. Raises CheckpointError."""
    metadata = _read_header(path, buffer)[0].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(path, "__metadata__ is not an object of texts: corrupt")
    return metadata


def _read_header(path: Path, buffer: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header, and the first byte after it."""
    size = len(buffer)
    header_bytes = int.from_bytes(buffer[:8], "little")
    data_start = 8 + header_bytes
    if size < 8 or data_start > size:
        raise CheckpointError(path, f"announces a header of {header_bytes:,} bytes in a file of {size:,}: truncated?")
    try:
        header = json.loads(buffer[8:data_start])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"the header is corrupt: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(path, "the header is not a JSON object")
    return header, data_start


def _entry(path: Path, name: str, fields: Any, data_start: int, file_bytes: int) -> Entry:
    try:
        dtype, shape, (begin, end) = str(fields["dtype"]), tuple(fields["shape"]), fields["data_offsets"]
        valid = all(type(number) is int and number >= 0 for number in (*shape, begin, end)) and begin <= end
        # An empty tensor has the bytes of its shape whatever its other sizes are; arrays do not take any.
        valid = valid and len(shape) <= MAX_DIMENSIONS and math.prod(max(size, 1) for size in shape) <= 8 * file_bytes
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise CheckpointError(path, f"has the entry {fields!r}: corrupt", tensor=name)
    if data_start + end > file_bytes:
        raise CheckpointError(
            path, f"ends at byte {data_start + end:,} of a file of {file_bytes:,}: truncated?", tensor=name
        )
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise CheckpointError(path, f"is {dtype} {shape} but has {end - begin:,} bytes", tensor=name)
    return Entry(path, dtype, shape, data_start + begin, end - begin)
