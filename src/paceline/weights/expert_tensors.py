"""Matrices of all experts of a layer as one canonical tensor, from the forms in which safetensors hold them.

Source: what Transformers 4 and 5 write (``conversion_mapping.py``), and OpenAI's MXFP4 planes of gpt-oss: "_blocks" u8
[experts, outputs, groups, 16], byte j of a group with input 2j in its low and 2j + 1 in its high nibble, and "_scales"
u8 [experts, outputs, groups]. They become blocks as GGUF has them: the scale, then 16 bytes, byte j with input j in its
low and j + 16 in its high nibble.

Checked by: tests/unit/test_expert_tensors.py, tests/golden/test_transformers_experts.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, UnsupportedError
from paceline.models.family import ExpertSource
from paceline.weights.inventory import Shape
from paceline.weights.packing import drop_file_pages
from paceline.weights.quantized_modules import QuantizedModule
from paceline.weights.raw import BLOCK_KINDS, RawTensor, TensorHeader
from paceline.weights.safetensors_header import Entry

Bytes = NDArray[np.uint8]

ITEMS = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
"""Numbers that have as many bytes as those of a float type: they are moved, not read."""

ROWS: dict[str, Callable[[int], slice]] = {
    "all": lambda outputs: slice(0, outputs),
    "first half": lambda outputs: slice(0, outputs // 2),
    "second half": lambda outputs: slice(outputs // 2, outputs),
    "even": lambda outputs: slice(0, outputs, 2),
    "odd": lambda outputs: slice(1, outputs, 2),
}
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_INPUTS, BLOCK_BYTES = BLOCK_KINDS["MXFP4"]


class MadeTensor(Protocol):
    """A tensor that is made when it is asked for."""

    @property
    def shape(self) -> Shape: ...

    @property
    def header(self) -> TensorHeader:
        """May read some of it, where only that says of which kind it is."""
        ...

    def tensor(self, name: str) -> RawTensor:
        """A copy, named ``name``; the pages of the file are given back."""
        ...


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, whose bytes are moved as they are."""

    name: str
    entry: Entry
    buffer: mmap.mmap

    @property
    def shape(self) -> Shape:
        return self.entry.shape

    @property
    def header(self) -> TensorHeader:
        """Raises UnsupportedError for a type that is no float."""
        if self.entry.dtype not in ITEMS:
            raise UnsupportedError(
                f"{self.entry.file}: tensor {self.name!r} is {self.entry.dtype}; Paceline reads {', '.join(ITEMS)}"
            )
        return TensorHeader(self.entry.shape, self.entry.dtype)

    def tensor(self, name: str) -> RawTensor:
        """A view of the file."""
        return RawTensor(name, self.entry.shape, self.header.kind, self.data)

    @property
    def data(self) -> Bytes:
        return np.frombuffer(self.buffer, np.uint8, self.entry.num_bytes, self.entry.start)


@dataclass(frozen=True)
class StackedExperts:
    """One matrix an expert, each stored by itself."""

    path: Path
    parts: Sequence[Stored | QuantizedModule]

    @property
    def shape(self) -> Shape:
        return (len(self.parts), *self.parts[0].shape)

    @cached_property
    def header(self) -> TensorHeader:
        """Raises UnsupportedError for experts that differ."""
        headers = {part.header for part in self.parts}
        if len(headers) > 1:
            found = ", ".join(sorted(f"{header.kind} {header.shape}" for header in headers))
            raise UnsupportedError(f"{self.path}: experts of one layer differ: {found}; Paceline reads experts alike")
        return TensorHeader(self.shape, headers.pop().kind)

    def tensor(self, name: str) -> RawTensor:
        header, data = self.header, []
        for part in self.parts:
            raw = part.tensor(name)
            if raw.order is not None:
                raise UnsupportedError(f"{self.path}: tensor {name!r}: experts whose inputs have an order (desc_act)")
            data.append(raw.data.copy())
            drop_file_pages(raw.data)
        return RawTensor(name, header.shape, header.kind, np.concatenate(data))


@dataclass(frozen=True)
class FusedExperts:
    """Some outputs of a tensor [experts, outputs, inputs] (or [experts, inputs, outputs]), or of biases."""

    stored: Stored
    source: ExpertSource

    @property
    def shape(self) -> Shape:
        """Raises CheckpointError for one that is not of experts."""
        shape = self.stored.shape
        if len(shape) not in (2, 3) or (self.source.transposed and len(shape) != 3):
            raise CheckpointError(self.stored.entry.file, f"has shape {shape}", tensor=self.stored.name)
        experts, outputs, *inputs = (shape[0], shape[2], shape[1]) if self.source.transposed else shape
        return (experts, _num_rows(self.source, outputs), *inputs)

    @property
    def header(self) -> TensorHeader:
        return TensorHeader(self.shape, self.stored.header.kind)

    def tensor(self, name: str) -> RawTensor:
        header = self.header
        stored = self.stored.data.view(ITEMS[header.kind]).reshape(self.stored.shape)
        copy = np.empty(header.shape, stored.dtype)
        for made, expert in zip(copy, stored, strict=True):
            rows = expert.T if self.source.transposed else expert
            made[:] = rows[ROWS[self.source.rows](len(rows))]
            drop_file_pages(expert.reshape(-1).view(np.uint8))
        return RawTensor(name, header.shape, header.kind, copy.reshape(-1).view(np.uint8))


@dataclass(frozen=True)
class MXFP4Experts:
    """Some outputs of MXFP4 planes."""

    blocks: Stored
    scales: Stored
    source: ExpertSource

    @property
    def shape(self) -> Shape:
        """Raises CheckpointError for planes that do not fit together."""
        shape = self.blocks.shape
        for plane, wanted in ((self.blocks, (*shape[:3], BLOCK_INPUTS // 2)), (self.scales, shape[:3])):
            if plane.entry.dtype != "U8" or plane.shape != wanted or len(shape) != 4:
                problem = f"is {plane.entry.dtype} {plane.shape}, no plane of MXFP4 experts"
                raise CheckpointError(plane.entry.file, problem, tensor=plane.name)
        experts, outputs, groups, _ = shape
        return (experts, _num_rows(self.source, outputs), groups * BLOCK_INPUTS)

    @property
    def header(self) -> TensorHeader:
        return TensorHeader(self.shape, "MXFP4")

    def tensor(self, name: str) -> RawTensor:
        blocks = self.blocks.data.reshape(self.blocks.shape)
        scales = self.scales.data.reshape(self.scales.shape)
        rows = ROWS[self.source.rows](blocks.shape[1])
        copy = np.empty((*self.shape[:2], blocks.shape[2], BLOCK_BYTES), np.uint8)
        for made, codes, scale in zip(copy, blocks, scales, strict=True):
            made[..., 0] = scale[rows]
            made[..., 1:] = _in_halves(codes[rows])
            drop_file_pages(codes.reshape(-1))
        return RawTensor(name, self.shape, "MXFP4", copy.reshape(-1))


def _num_rows(source: ExpertSource, outputs: int) -> int:
    return len(range(outputs)[ROWS[source.rows](outputs)])


def _in_halves(codes: Bytes) -> Bytes:
    """[..., 16] with inputs 2j and 2j + 1 in byte j -> inputs j and j + 16."""
    first, second = codes[..., :8], codes[..., 8:]
    low = np.stack([first & np.uint8(15), first >> np.uint8(4)], axis=-1)
    high = np.stack([second & np.uint8(15), second >> np.uint8(4)], axis=-1)
    halves: Bytes = low | (high << np.uint8(4))
    return halves.reshape(codes.shape)


class ExpertReader:
    """Finds the experts of a family among the tensors of its files."""

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, Entry],
        modules: Mapping[str, QuantizedModule],
        buffers: Mapping[Path, mmap.mmap],
    ) -> None:
        """``entries`` are plain tensors by their names, ``modules`` quantised matrices; neither is modified."""
        self._path = path
        self._entries = entries
        self._modules = modules
        self._buffers = buffers
        self.used: set[str] = set()
        """Tensors and modules that a canonical tensor was made of."""

    def find(self, prefix: str, sources: Sequence[ExpertSource], num_experts: int) -> MadeTensor | None:
        """The tensor in the first of the ``sources`` of a layer that is there, names after ``prefix``; None if none is.

        Raises CheckpointError where the first expert is there and another one is not, or blocks without scales.
        """
        for source in sources:
            name = prefix + source.name
            if "{}" in name and self._has(name.format(0)):
                parts = [self._take(name.format(expert)) for expert in range(num_experts)]
                return StackedExperts(self._path, parts)
            if name in self._entries:
                return FusedExperts(self._stored(name), source)
            if f"{name}{BLOCKS}" in self._entries:
                return MXFP4Experts(self._stored(f"{name}{BLOCKS}"), self._stored(f"{name}{SCALES}"), source)
        return None

    def _has(self, name: str) -> bool:
        return name in self._entries or name.removesuffix(".weight") in self._modules

    def _take(self, name: str) -> Stored | QuantizedModule:
        module = name.removesuffix(".weight")
        if module not in self._modules:
            return self._stored(name)
        self.used.add(module)
        return self._modules[module]

    def _stored(self, name: str) -> Stored:
        if name not in self._entries:
            raise CheckpointError(self._path, "missing", tensor=name)
        self.used.add(name)
        entry = self._entries[name]
        return Stored(name, entry, self._buffers[entry.file])
