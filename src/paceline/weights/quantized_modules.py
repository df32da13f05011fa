"""The modules of a safetensors checkpoint whose matrices are quantised: found among its tensors, built one at a time.

Checked by: tests/unit/test_quantized_directory.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.blocks import bf16_to_f32
from paceline.weights.packing import drop_file_pages
from paceline.weights.planes import Layout, Planes
from paceline.weights.quantization_config import GROUP_STEP, Quantization
from paceline.weights.quantized_matrix import block_kind
from paceline.weights.raw import RawTensor, TensorHeader
from paceline.weights.safetensors_header import Entry

CODE_PLANES = ("qweight", "weight_packed")
BIAS = "bias"
NUMPY_TYPES = {"I8": "<i1", "I32": "<i4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "BF16": "<u2"}
FLOATS = ("F16", "F32", "BF16")


def split_modules(entries: Mapping[str, Entry]) -> tuple[dict[str, dict[str, Entry]], dict[str, Entry]]:
    """Planes by module, for each that has codes, and the tensors that are none of these; biases are among the latter.

    Codes are a tensor named ``qweight`` or ``weight_packed``, or a ``weight`` of int8.
    """
    modules: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        module, _, plane = name.rpartition(".")
        if plane in CODE_PLANES or (plane == "weight" and entry.dtype == "I8"):
            modules[module] = {}
    plain = {}
    for name, entry in entries.items():
        module, _, plane = name.rpartition(".")
        if module in modules and plane != BIAS:
            modules[module][plane] = entry
        else:
            plain[name] = entry
    return modules, plain


def map_entry(entry: Entry, buffer: mmap.mmap) -> NDArray[Any]:
    """The numbers of a plane: a view of the file, except that bf16 is widened."""
    dtype = np.dtype(NUMPY_TYPES[entry.dtype])
    array = np.frombuffer(buffer, dtype, entry.num_bytes // dtype.itemsize, entry.start).reshape(entry.shape)
    return bf16_to_f32(array) if entry.dtype == "BF16" else array


class QuantizedModule:
    """One matrix of a checkpoint, as its planes; nothing of it is in memory until it is asked for."""

    def __init__(
        self,
        module: str,
        quantization: Quantization,
        entries: Mapping[str, Entry],
        buffers: Mapping[Path, mmap.mmap],
    ) -> None:
        """``module`` is its name in the file. Raises CheckpointError for a plane that is missing, UnsupportedError for
        one that nothing reads or for groups that blocks cannot hold.
        """
        self._module = module
        self._layout: Layout = quantization.layout(module)
        self._entries = entries
        self._buffers = buffers
        self._rows = slice(None)
        self._check_names()
        self.shape = self._layout.shape(self._planes(with_scales=False))
        group = self._layout.group or self.shape[1]
        if group % GROUP_STEP:
            raise UnsupportedError(
                f"{self._file}: {module} has {self.shape[1]} inputs with one scale for all of them; Paceline reads "
                f"multiples of {GROUP_STEP} inputs: leave the module unquantised"
            )

    def part(self, rows: range) -> QuantizedModule:
        """Some of its outputs, as a matrix; it is unpacked from all planes of the module."""
        part = copy(self)
        part._rows = slice(rows.start, rows.stop)
        part.shape = (len(rows), self.shape[1])
        return part

    @cached_property
    def header(self) -> TensorHeader:
        """Shape and kind; reads the zero points only, which are few."""
        planes = self._planes(with_scales=False)
        layout = self._layout
        planes.num_groups(self.shape[1], layout.group)
        is_symmetric = bool((layout.zero(planes)[self._rows] == 1 << (layout.bits - 1)).all())
        group = layout.group or self.shape[1]
        kind = block_kind(layout.bits, group, is_symmetric=is_symmetric, per_token=layout.per_token)
        return TensorHeader(self.shape, kind)

    def tensor(self, name: str) -> RawTensor:
        """The matrix in blocks, named ``name``. Raises as ``Layout.unpack`` does; the file's pages are given back."""
        planes = self._planes(with_scales=True)
        whole, rows = self._layout.unpack(planes), self._rows
        part = replace(whole, codes=whole.codes[rows], scale=whole.scale[rows], zero=whole.zero[rows])
        tensor = part.blocks(name)
        for array in planes.arrays.values():
            if array.size:
                drop_file_pages(array.reshape(-1).view(np.uint8))
        return tensor

    @property
    def _file(self) -> Path:
        """Where the codes are: what errors name."""
        return self._entries[self._layout.required[0]].file

    def _check_names(self) -> None:
        for name in self._layout.required:
            if name not in self._entries:
                file = next(iter(self._entries.values())).file
                raise CheckpointError(file, "missing", tensor=f"{self._module}.{name}")
        for name, entry in self._entries.items():
            if name not in (*self._layout.required, *self._layout.optional):
                known = ", ".join((*self._layout.required, *self._layout.optional))
                raise UnsupportedError(
                    f"{entry.file}: tensor '{self._module}.{name}' has no place beside codes; Paceline reads {known}"
                )
            if entry.dtype not in NUMPY_TYPES:
                raise CheckpointError(
                    entry.file, f"is {entry.dtype}, none of {', '.join(NUMPY_TYPES)}", tensor=f"{self._module}.{name}"
                )

    def _planes(self, *, with_scales: bool) -> Planes:
        """The planes; scales, which are copied when they are bf16, only where they are needed."""
        arrays = {
            name: map_entry(entry, self._buffers[entry.file])
            for name, entry in self._entries.items()
            if with_scales or entry.dtype not in FLOATS
        }
        return Planes(self._file, self._module, arrays)


def is_zero(entry: Entry, buffer: mmap.mmap) -> bool:
    """Whether all numbers of a tensor are 0, of either sign."""
    return not map_entry(entry, buffer).any()
