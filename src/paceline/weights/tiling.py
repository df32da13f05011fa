"""Matrices as the bytes that ``weights/packed.py`` describes, and back: with ``blocks.py`` the numpy reference of
csrc/kernels/pack.cpp.

Departures: none in value; only scales and minima that are no f16 (of k-quants, or rounded on load) are rounded to f16.

Checked by: tests/unit/test_packed_layout.py (byte by byte), tests/native/test_pack.py (native packer, bit for bit).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.weights.blocks import (
    MXFP4_DOUBLED,
    AffineGroups,
    bf16_to_f32,
    dequantize,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    quantize_rtn,
    restore_columns,
    stored_values,
    to_affine,
)
from paceline.weights.packed import NATIVE_FORMATS, RUN, TILE, PackedFormat, PackedMatrix
from paceline.weights.raw import RawTensor

Scalar = TypeVar("Scalar", bound=np.generic)
F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def _pad(array: NDArray[Scalar], rows: int, columns: int) -> NDArray[Scalar]:
    return np.pad(array, ((0, rows - array.shape[0]), (0, columns - array.shape[1])))


def _to_bits(values: F32, fmt: PackedFormat) -> NDArray[np.uint16] | NDArray[np.uint32]:
    if fmt.kind == "f32":
        return values.view(np.uint32)
    return f32_to_bf16(values) if fmt.kind == "bf16" else f32_to_f16(values)


def pack(matrix: AffineGroups | F32, fmt: PackedFormat) -> Bytes:
    """The bytes that ``weights/packed.py`` describes; scales of ``AffineGroups`` but i8c are rounded to f16 here."""
    num_outputs, num_inputs = matrix.q.shape if isinstance(matrix, AffineGroups) else matrix.shape
    tiles, groups = -(-num_outputs // TILE), fmt.num_groups(num_inputs)
    columns = groups * fmt.group_inputs
    if not isinstance(matrix, AffineGroups):
        assert fmt.group == 0, fmt
        bits = _pad(_to_bits(np.ascontiguousarray(matrix), fmt), tiles * TILE, columns)
        tiled = bits.reshape(tiles, TILE, groups, fmt.group_inputs)
        return np.ascontiguousarray(tiled.transpose(0, 2, 1, 3)).view(np.uint8).reshape(-1)
    codes = _pad(matrix.q.view(np.uint8), tiles * TILE, columns).reshape(tiles, TILE, groups, fmt.group // 4, 4)
    parts = [codes.transpose(0, 2, 3, 1, 4).reshape(tiles, groups, -1)]
    if fmt.per_token:
        assert matrix.scale.shape == (num_outputs, 1), "one scale an output"
        scales = _pad(matrix.scale, tiles * TILE, 1).view(np.uint8).reshape(tiles, -1)
        return np.concatenate([parts[0].reshape(tiles, -1), scales], axis=1).reshape(-1)
    assert fmt.group == matrix.group, (fmt, matrix.group)
    assert (matrix.levels is not None) == (fmt.kind == "e2m1"), fmt
    if fmt.has_four_bits:
        assert 0 <= int(matrix.q.min()) <= int(matrix.q.max()) <= 15
        halves = parts[0].reshape(tiles, groups, fmt.group // RUN, 2, -1)
        parts = [(halves[:, :, :, 0] | (halves[:, :, :, 1] << np.uint8(4))).reshape(tiles, groups, -1)]

    def add_per_group(values: NDArray[Any]) -> None:
        tiled = _pad(values, tiles * TILE, groups).reshape(tiles, TILE, groups)
        parts.append(np.ascontiguousarray(tiled.transpose(0, 2, 1)).view(np.uint8))

    add_per_group(f32_to_f16(matrix.scale))
    assert (matrix.zero is not None) == (fmt.offset == "zero"), fmt
    if fmt.offset == "zero":
        add_per_group(matrix.zero.astype(np.uint8))  # type: ignore[union-attr]
    elif fmt.offset == "min":
        add_per_group(f32_to_f16(np.zeros_like(matrix.scale) if matrix.minimum is None else matrix.minimum))
    elif fmt.kind == "u4":
        assert matrix.minimum is not None
        assert np.array_equal(matrix.minimum, np.float32(-8) * matrix.scale, equal_nan=True)
    else:
        assert matrix.minimum is None
    return np.concatenate(parts, axis=2).reshape(-1)


def _from_bits(bits: NDArray[Any], fmt: PackedFormat) -> F32:
    if fmt.kind == "f32":
        return bits.view(np.float32)
    return bf16_to_f32(bits) if fmt.kind == "bf16" else f16_to_f32(bits)


def unpack(matrix: PackedMatrix) -> F32:
    """W [N, K] f32 that the packed bytes mean, columns in the layer's order.

    f16 scales and minima are widened, then scale * q + minimum (or scale * (q - zero)) with one multiplication and one
    addition in f32.
    """
    fmt = matrix.format
    values = _unpack_tiles(matrix).values() if fmt.group else _unpack_floats(matrix)
    values = np.ascontiguousarray(values[: matrix.num_outputs, : matrix.num_inputs])
    return values if matrix.order is None else restore_columns(values, matrix.order)


def _unpack_floats(matrix: PackedMatrix) -> F32:
    """Whole tiles and groups of a float kind."""
    fmt = matrix.format
    tiles, groups = -(-matrix.num_outputs // TILE), fmt.num_groups(matrix.num_inputs)
    words = matrix.data.view(np.uint32 if fmt.kind == "f32" else np.uint16)
    rows = words.reshape(tiles, groups, TILE, fmt.group_inputs).transpose(0, 2, 1, 3)
    return _from_bits(np.ascontiguousarray(rows).reshape(tiles * TILE, -1), fmt)


def unpack_groups(matrix: PackedMatrix) -> AffineGroups:
    """The codes, scales and offsets of an integer kind, columns as they lie."""
    tiles = _unpack_tiles(matrix).rows(slice(0, matrix.num_outputs))
    return replace(tiles, q=tiles.q[:, : matrix.num_inputs])


def _unpack_tiles(matrix: PackedMatrix) -> AffineGroups:
    """Whole tiles and groups of an integer kind."""
    fmt = matrix.format
    tiles, groups = -(-matrix.num_outputs // TILE), fmt.num_groups(matrix.num_inputs)
    data = matrix.data.reshape(tiles, -1)[:, : groups * fmt.group_bytes].reshape(tiles, groups, fmt.group_bytes)
    codes = data[:, :, : fmt.code_bytes]
    if fmt.has_four_bits:
        runs = codes.reshape(tiles, groups, fmt.group // RUN, -1)
        codes = np.concatenate([runs & np.uint8(15), runs >> np.uint8(4)], axis=3)
    q = codes.reshape(tiles, groups, fmt.group // 4, TILE, 4).transpose(0, 3, 1, 2, 4).reshape(tiles * TILE, -1)
    if fmt.per_token:
        scales = np.ascontiguousarray(matrix.data.reshape(tiles, -1)[:, -4 * TILE :]).view(np.float32)
        return AffineGroups(q.view(np.int8), scales.reshape(-1, 1), None, q.shape[1])

    def per_group(at: int, dtype: type[Scalar]) -> NDArray[Scalar]:
        values = np.ascontiguousarray(data[:, :, at : at + TILE * np.dtype(dtype).itemsize]).view(dtype)
        return np.ascontiguousarray(values.transpose(0, 2, 1)).reshape(tiles * TILE, groups)

    scale = f16_to_f32(per_group(fmt.code_bytes, np.uint16))
    at = fmt.code_bytes + 2 * TILE
    minimum: F32 | None = None
    zero: NDArray[np.int16] | None = None
    if fmt.offset == "min":
        minimum = f16_to_f32(per_group(at, np.uint16))
    elif fmt.offset == "zero":
        zero = (per_group(at, np.uint8) if fmt.kind == "u4" else per_group(at, np.int8)).astype(np.int16)
    elif fmt.kind == "u4":
        minimum = np.float32(-8) * scale
    levels = MXFP4_DOUBLED if fmt.kind == "e2m1" else None
    return AffineGroups(q.view(np.int8), scale, minimum, fmt.group, zero, levels)


def pack_raw(raw: RawTensor, fmt: PackedFormat, permutation: NDArray[np.int32] | None = None) -> Bytes:
    """What the native packer writes: the file's codes where ``fmt`` is the kind's native format, else rounded from f32.

    Row r of the result is row ``permutation[r]`` of the tensor. Columns stay as the tensor has them, but in a float
    format they are in the layer's order.
    """
    rows = slice(None) if permutation is None else permutation
    if fmt.group == 0:
        return pack(dequantize(raw)[rows], fmt)
    if fmt == NATIVE_FORMATS[raw.kind]:
        return pack(to_affine(raw).rows(rows), fmt)
    assert (fmt.kind, fmt.offset) in (("u4", "min"), ("i8", "none")), f"rounding to {fmt} is not defined"
    return pack(quantize_rtn(stored_values(raw)[rows], "int4" if fmt.kind == "u4" else "int8", group=fmt.group), fmt)
