"""GGUF files: a header parser that is quick on large vocabularies, and the checkpoint over it.

Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian.
Departures: the `gguf` library's reader makes several numpy objects for each string of an array and needs 3 to 11 s
for a vocabulary of 49k tokens, after an import of 0.3 s; this one needs 0.07 s.
Checked by: tests/unit/test_gguf.py, against that library's reader on its writer's files and on the packaged model.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import CheckpointError, UnsupportedError
from paceline.models.gguf_keys import ROPE_VECTORS
from paceline.models.registry import config_from_metadata, family_of
from paceline.weights.inventory import Shape, check_inventory, check_layers, expected_shapes, rows_of_parts
from paceline.weights.mapped_file import map_file
from paceline.weights.raw import BLOCK_KINDS, RawTensor, TensorHeader

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 4

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type -> its struct and numpy code."""
STRING, ARRAY = 8, 9

KINDS = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    30: "BF16",
    39: "MXFP4",
}
"""Tensor type -> one of BLOCK_KINDS."""

Metadata = Mapping[str, Any]
"""Values are int, float, bool, str, list[str], or a numpy array for an array of numbers."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: ``start`` is its first byte in the file."""

    shape: Shape
    kind: str
    start: int
    num_bytes: int

    def part(self, rows: range) -> TensorInfo:
        """Some rows of it, which follow each other."""
        row_bytes = self.num_bytes // self.shape[0]
        return TensorInfo(
            (len(rows), *self.shape[1:]), self.kind, self.start + rows.start * row_bytes, len(rows) * row_bytes
        )


@dataclass(frozen=True)
class Header:
    """What precedes the tensors' bytes."""

    version: int
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]


class GGUFCheckpoint:
    """A GGUF file, memory-mapped; implements ``raw.Checkpoint``.

    ``metadata`` also holds the tokenizer and the chat template.
    """

    def __init__(self, path: Path) -> None:
        """Opens and checks the whole header. Raises CheckpointError or UnsupportedError, naming file and tensor."""
        self._path = path
        self._buffer = map_file(path)
        header = read_header(path, self._buffer)
        self.metadata = header.metadata
        tensors = dict(header.tensors)
        vectors = {name: self._floats(name, tensors.pop(name)) for name in ROPE_VECTORS if name in tensors}
        shapes = {name: info.shape for name, info in tensors.items()}
        self.config = config_from_metadata(path, header.metadata, shapes, rope_vectors=vectors)
        family = family_of(self.config.architecture)
        self.interleaved_rope = family.interleaved_gguf
        check_layers(path, self.config, len(tensors))
        expected = expected_shapes(self.config) if family.fused else {}
        self._tensors: dict[str, TensorInfo] = {}
        for name, info in tensors.items():
            for part, rows in rows_of_parts(path, name, info.shape[0], family.fused, expected).items():
                if part in self._tensors:
                    raise CheckpointError(path, "occurs twice, by itself and in another tensor", tensor=part)
                self._tensors[part] = info.part(rows)
        check_inventory(path, self.config, {name: info.shape for name, info in self._tensors.items()})

    @property
    def path(self) -> str:
        return str(self._path)

    @property
    def files(self) -> tuple[Path, ...]:
        """All that the model is made of, for ``model_hash``."""
        return (self._path,)

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def header(self, name: str) -> TensorHeader:
        info = self._info(name)
        return TensorHeader(info.shape, info.kind)

    def tensor(self, name: str) -> RawTensor:
        info = self._info(name)
        data = np.frombuffer(self._buffer, np.uint8, info.num_bytes, info.start)
        return RawTensor(name, info.shape, info.kind, data)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(self._path, "missing", tensor=name)
        return self._tensors[name]

    def _floats(self, name: str, info: TensorInfo) -> tuple[float, ...]:
        if info.kind != "F32" or len(info.shape) != 1:
            raise UnsupportedError(f"{self._path}: tensor {name!r} is {info.kind} {info.shape}, not a vector of F32")
        return tuple(np.frombuffer(self._buffer, "<f4", info.shape[0], info.start).tolist())


def read_header(path: Path, buffer: mmap.mmap) -> Header:
    """The header of a mapped file; ``path`` is only for errors. Raises CheckpointError or UnsupportedError."""
    cursor = _Cursor(path, buffer)
    if buffer[:4] != MAGIC:
        raise CheckpointError(path, "not a GGUF file: it does not begin with 'GGUF'")
    cursor.position = 4
    version = int(cursor.number("I"))
    if version not in VERSIONS:
        if version >> 16:
            raise CheckpointError(path, "a big-endian GGUF file; Paceline reads little-endian ones")
        raise CheckpointError(path, f"GGUF version {version}; Paceline reads {' and '.join(map(str, VERSIONS))}")
    num_tensors = cursor.count(min_item_bytes=24, what="tensors")
    num_values = cursor.count(min_item_bytes=13, what="metadata values")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(path, f"metadata key {key!r} occurs twice")
        metadata[key] = cursor.value(int(cursor.number("I")))
    return Header(version, metadata, _read_tensor_infos(path, cursor, metadata, num_tensors))


def _read_tensor_infos(path: Path, cursor: _Cursor, metadata: Metadata, num_tensors: int) -> dict[str, TensorInfo]:
    entries: list[tuple[str, Shape, int, int]] = []
    for _ in range(num_tensors):
        name = cursor.string()
        num_dimensions = int(cursor.number("I"))
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(path, f"has {num_dimensions} dimensions", tensor=name)
        shape = tuple(int(cursor.number("Q")) for _ in range(num_dimensions))[::-1]
        entries.append((name, shape, int(cursor.number("I")), int(cursor.number("Q"))))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
        raise CheckpointError(path, f"general.alignment is {alignment!r}, expected a multiple of 8")
    data_start = -(-cursor.position // alignment) * alignment
    infos: dict[str, TensorInfo] = {}
    for name, shape, kind_id, offset in entries:
        if name in infos:
            raise CheckpointError(path, "occurs twice", tensor=name)
        if kind_id not in KINDS:
            supported = ", ".join(KINDS.values())
            raise UnsupportedError(
                f"{path}: tensor {name!r} is of type {_kind_name(kind_id)}; Paceline reads {supported}"
            )
        kind = KINDS[kind_id]
        block_weights, block_bytes = BLOCK_KINDS[kind]
        if min(shape) < 1 or shape[-1] % block_weights:
            raise CheckpointError(path, f"has shape {shape}, impossible for {kind}", tensor=name)
        info = TensorInfo(shape, kind, data_start + offset, math.prod(shape) // block_weights * block_bytes)
        if info.start + info.num_bytes > cursor.size:
            end = info.start + info.num_bytes
            raise CheckpointError(path, f"ends at byte {end:,} of a file of {cursor.size:,}: truncated?", tensor=name)
        infos[name] = info
    return infos


def _kind_name(kind_id: int) -> str:
    """What the ``gguf`` library calls a tensor type; imported for this error only, since that takes 0.3 s."""
    from gguf import GGMLQuantizationType

    try:
        return GGMLQuantizationType(kind_id).name
    except ValueError:
        return f"number {kind_id}"


class _Cursor:
    """Reads the header's values one after the other; ``position`` is the next byte."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0

    def truncated(self) -> CheckpointError:
        position = min(self.position, self.size)
        return CheckpointError(self.path, f"the header is truncated or corrupt at byte {position:,}")

    def number(self, code: str) -> Any:
        """The scalar of that struct code."""
        scalar = struct.Struct("<" + code)
        if self.position + scalar.size > self.size:
            raise self.truncated()
        (value,) = scalar.unpack_from(self.buffer, self.position)
        self.position += scalar.size
        return value

    def count(self, *, min_item_bytes: int, what: str) -> int:
        """A number of items that follow; CheckpointError when the rest of the file cannot hold that many."""
        count = int(self.number("Q"))
        if count * min_item_bytes > self.size - self.position:
            raise CheckpointError(self.path, f"announces {count:,} {what}, more than the file can hold: corrupt")
        return count

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """``count`` strings. A vocabulary and its merges are 10^5 of them: opening a file is mostly this loop."""
        buffer, size, position = self.buffer, self.size, self.position
        read_length = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        append = texts.append
        try:
            for _ in range(count):
                start = position + 8
                end = start + read_length(buffer, position)[0]
                if end > size:
                    self.position = position
                    raise self.truncated()
                append(buffer[start:end].decode())
                position = end
        except (struct.error, UnicodeDecodeError):
            self.position = position
            raise self.truncated() from None
        self.position = position
        return texts

    def value(self, type_id: int, depth: int = 0) -> Any:
        """The metadata value of that type."""
        if type_id in SCALARS:
            return self.number(SCALARS[type_id])
        if type_id == STRING:
            return self.string()
        if type_id != ARRAY or depth == MAX_ARRAY_DEPTH:
            raise self.truncated()
        item_type = int(self.number("I"))
        if item_type == STRING:
            return self.strings(self.count(min_item_bytes=8, what="strings"))
        if item_type == ARRAY:
            return [self.value(ARRAY, depth + 1) for _ in range(self.count(min_item_bytes=12, what="arrays"))]
        if item_type not in SCALARS:
            raise self.truncated()
        dtype = np.dtype("<" + SCALARS[item_type])
        count = self.count(min_item_bytes=dtype.itemsize, what="numbers")
        array = np.frombuffer(self.buffer, dtype, count, self.position)
        self.position += array.nbytes
        return array
