"""The arrays that stand for one matrix in a quantised checkpoint, and codes of b bits in 32-bit words.

Notation: a plane is one tensor of such a file (``qweight``, ``scales``, ...); a module is the layer it belongs to, and
its planes are named module + "." + plane. Codes lie densely, least significant bit first: code i of a row has the bits
b i ... b i + b - 1 of the row's words, and with 3 bits some reach over the end of a word.

Departures: arrays of bf16 are f32 here, which is exact, because numpy has no bf16.

Checked by: tests/unit/test_planes.py, against a packer that goes bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.quantized_matrix import QuantizedMatrix

Codes = NDArray[np.uint8]
Words = NDArray[np.int32]
Arrays = Mapping[str, NDArray[Any]]

WORD_BITS = 32


@dataclass(frozen=True)
class Planes:
    """The planes of ``module`` by name. ``path`` is the file, for errors."""

    path: object
    module: str
    arrays: Arrays

    def array(self, name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """The plane, which must have that type and shape. CheckpointError when it is missing or other."""
        array = self.arrays.get(name)
        if array is None:
            raise self.error(name, "missing")
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise self.error(name, f"is {array.dtype} {array.shape}, expected {np.dtype(dtype)} {shape}")
        return array

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """The shape of a plane of two dimensions, neither 0. CheckpointError when it is missing or has others."""
        array = self.arrays.get(name)
        if array is None:
            raise self.error(name, "missing")
        if array.ndim != 2 or 0 in array.shape:
            raise self.error(name, f"has shape {array.shape}, expected two dimensions")
        return array.shape

    def scales(self, name: str, *shapes: tuple[int, ...]) -> NDArray[np.float32]:
        """A plane of floats as f32, which is exact; one of ``shapes``. CheckpointError when a number is not finite."""
        array = self.arrays.get(name)
        if array is None:
            raise self.error(name, "missing")
        if array.dtype not in (np.float16, np.float32) or array.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise self.error(name, f"is {array.dtype} {array.shape}, expected floats {expected}")
        if not np.isfinite(array).all():
            raise self.error(name, "a scale is infinite or not a number")
        return array.astype(np.float32)

    def half_scales(self, name: str, *shapes: tuple[int, ...]) -> NDArray[np.float16]:
        """``scales`` as f16. CheckpointError when one is too large for it.

        f16 and, from 2^-17 up, bf16 keep their value. An f32 from 2^-14 up is off by at most 2^-11 of itself, anything
        smaller by at most 2^-25.
        """
        values = self.scales(name, *shapes)
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            raise self.error(name, f"has the scale {np.abs(values).max():g}, and f16 ends at 65504")
        return half

    def num_groups(self, num_inputs: int, group: int | None) -> int:
        """How many groups of ``group`` inputs (None: all) there are. UnsupportedError when the last is smaller."""
        group = group or num_inputs
        if num_inputs % group:
            raise UnsupportedError(
                f"{self.path}: {self.module} has {num_inputs} inputs in groups of {group}, of which the last is "
                "smaller; Paceline reads groups of equal size"
            )
        return num_inputs // group

    def order(self, name: str, num_inputs: int, num_groups: int) -> NDArray[np.int32] | None:
        """The inputs sorted by their group, which that plane holds for each: equal ones stay in order.

        None when the plane is absent or they are sorted. CheckpointError for a group that does not exist,
        UnsupportedError for groups of unequal size.
        """
        if name not in self.arrays:
            return None
        groups = self.array(name, np.int32, (num_inputs,))
        if groups.min() < 0 or groups.max() >= num_groups:
            raise self.error(name, f"names groups from {groups.min()} to {groups.max()}, and there are {num_groups}")
        counts = np.bincount(groups, minlength=num_groups)
        if (counts != counts[0]).any():
            raise UnsupportedError(
                f"{self.path}: tensor '{self.module}.{name}' makes groups of {counts.min()} to {counts.max()} inputs; "
                "Paceline reads groups of equal size"
            )
        if (np.diff(groups) >= 0).all():
            return None
        return np.argsort(groups, kind="stable").astype(np.int32)

    def error(self, name: str, problem: str) -> CheckpointError:
        """What is wrong with one plane."""
        return CheckpointError(self.path, problem, tensor=f"{self.module}.{name}")


class Layout(Protocol):
    """How the planes of a module hold a matrix."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        ...

    @property
    def group(self) -> int | None:
        """Inputs that share a scale, None for all of them."""
        ...

    @property
    def per_token(self) -> bool:
        """Whether activations are rounded to int8 with one scale a token."""
        ...

    @property
    def required(self) -> tuple[str, ...]:
        """Planes that there must be."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Planes that there may be besides."""
        ...

    def shape(self, planes: Planes) -> tuple[int, int]:
        """(outputs, inputs). CheckpointError when the planes cannot be those of a matrix."""
        ...

    def zero(self, planes: Planes) -> Codes:
        """z [N, groups], without looking at the codes."""
        ...

    def unpack(self, planes: Planes) -> QuantizedMatrix:
        """The matrix. CheckpointError names the plane that is missing, of another shape, or holds what cannot be;
        UnsupportedError for groups of unequal size.
        """
        ...


def words_of(count: int, bits: int) -> int:
    """Words that ``count`` codes take."""
    return -(-count * bits // WORD_BITS)


def pack_rows(codes: Codes, bits: int) -> Words:
    """Codes u8 [R, C] below 2^bits as words i32 [R, ceil(C bits / 32)]; what is left of the last word is zero."""
    num_rows, count = codes.shape
    num_runs = -(-count // WORD_BITS)
    runs = np.zeros((num_rows, num_runs, WORD_BITS), np.uint32)
    runs.reshape(num_rows, -1)[:, :count] = codes
    words = np.zeros((num_rows, num_runs, bits), np.uint32)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        words[:, :, word] |= runs[:, :, index] << np.uint32(shift)
        if shift + bits > WORD_BITS:
            words[:, :, word + 1] |= runs[:, :, index] >> np.uint32(WORD_BITS - shift)
    packed = words.reshape(num_rows, -1)[:, : words_of(count, bits)]
    return np.ascontiguousarray(packed).view(np.int32)


def unpack_rows(words: Words, bits: int, count: int) -> Codes:
    """The first ``count`` codes u8 [R, count] of each row of words i32 [R, >= ceil(count bits / 32)].

    32 codes have ``bits`` words, so code i of each 32 has the same place in all of them.
    """
    if bits in (4, 8):
        return _unpack_bytes(words, bits)[:, :count]
    num_rows, num_runs = words.shape[0], -(-count // WORD_BITS)
    whole = np.zeros((num_rows, num_runs * bits), np.uint32)
    whole[:, : words_of(count, bits)] = words.view(np.uint32)[:, : words_of(count, bits)]
    runs = whole.reshape(num_rows, num_runs, bits)
    codes = np.empty((num_rows, num_runs, WORD_BITS), np.uint8)
    for index in range(WORD_BITS):
        word, shift = divmod(index * bits, WORD_BITS)
        code = runs[:, :, word] >> np.uint32(shift)
        if shift + bits > WORD_BITS:
            code |= runs[:, :, word + 1] << np.uint32(WORD_BITS - shift)
        codes[:, :, index] = code & np.uint32((1 << bits) - 1)
    return codes.reshape(num_rows, -1)[:, :count]


def _unpack_bytes(words: Words, bits: int) -> Codes:
    """All codes of words that hold one or two a byte, which is quicker."""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return packed
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2] = packed & np.uint8(15)
    codes[:, 1::2] = packed >> np.uint8(4)
    return codes
