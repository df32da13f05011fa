"""Packed matrices and activations of all that their formats can hold, to run single records on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.weights.blocks import MXFP4_DOUBLED, AffineGroups
from paceline.weights.packed import RUN, PackedFormat, PackedMatrix
from paceline.weights.tiling import pack

F32 = NDArray[np.float32]
SUBNORMAL = np.float16(6e-8)


def random_groups(fmt: PackedFormat, num_outputs: int, num_inputs: int, seed: int) -> AffineGroups:
    """Codes and offsets to the ends of their range, scales that are 0, subnormal, huge and negative too; output 0
    has equal codes."""
    rng = np.random.default_rng(seed)
    low, high = (0, 16) if fmt.has_four_bits else (-128, 128)
    codes = rng.choice([low, high - 1, *range(low, high, 3)], (num_outputs, num_inputs)).astype(np.int8)
    codes[0] = high - 1
    if fmt.per_token:
        scale = rng.choice(np.array([0, 1e-40, -3.0, 1e-3, 1e30], np.float32), (num_outputs, 1))
        return AffineGroups(codes, scale, None, num_inputs)
    shape = (num_outputs, -(-num_inputs // fmt.group))
    scale = rng.choice(np.array([0, SUBNORMAL, -0.3, 1e-3, 2.5, 6e4], np.float16), shape).astype(np.float32)
    if fmt.offset == "zero":
        low, high = (0, 256) if fmt.kind == "u4" else (-128, 128)
        zero = rng.choice([low, 8, 15 if fmt.kind == "u4" else 0, high - 1], shape).astype(np.int16)
        return AffineGroups(codes, scale, None, fmt.group, zero)
    if fmt.kind == "e2m1":
        return AffineGroups(codes, scale, None, fmt.group, levels=MXFP4_DOUBLED)
    minimum = rng.choice(np.array([0, SUBNORMAL, -1.5, 7e-3], np.float16), shape).astype(np.float32)
    if fmt.offset == "none":
        return AffineGroups(codes, scale, np.float32(-8) * scale if fmt.kind == "u4" else None, fmt.group)
    return AffineGroups(codes, scale, minimum, fmt.group)


def random_rows(rows: int, num_inputs: int, seed: int) -> F32:
    """Activations with outliers, zero groups and magnitudes that no int8 holds."""
    rng = np.random.default_rng(seed)
    size = rng.choice([1.0, 1e-3, 40.0, 0.0, 1e-37], (rows, -(-num_inputs // RUN)))
    return (rng.standard_normal((rows, num_inputs)) * np.repeat(size, RUN, axis=1)[:, :num_inputs]).astype(np.float32)


def fma(a: F32, b: F32, c: F32) -> F32:
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def packed(groups: AffineGroups, fmt: PackedFormat, order: NDArray[np.int32] | None = None) -> PackedMatrix:
    return PackedMatrix("t", fmt, *groups.q.shape, pack(groups, fmt), order)
