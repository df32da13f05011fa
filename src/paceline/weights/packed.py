"""Weights in the layout that the kernels read: tiles of 16 outputs, groups of inputs, 4 inputs side by side.

A tile is 16 consecutive outputs (the lanes of a register); outputs are padded with zeros to a multiple of 16. Tiles
follow each other; inside a tile the groups follow each other along the inputs (K), padded with zeros to a multiple of
the group:

    u4   group 32: 256 bytes, then 16 f16 scales, then (has_min) 16 f16 minima. Byte kb*64 + lane*4 + j, kb = 0..3,
    holds input
                   kb*4 + j in its low and input 16 + kb*4 + j in its high nibble.                     w = scale * q +
                   min, q in 0..15
    i8   group 32 or 16: group*16 bytes, then 16 f16 scales, then (has_min) 16 f16 minima. Byte kb*64 + lane*4 + j holds
    input
                   kb*4 + j.                                                                     w = scale * q + min, q
                   in -128..127
    bf16 per two inputs k, k+1 (K padded to even): 16 u32, low half input k, high half input k+1
    f16  per input: 16 f16
    f32  per input: 16 f32

Without minima: i8 has min = 0, u4 has min = -8 * scale (that is Q4_0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

PackedKind = Literal["u4", "i8", "bf16", "f16", "f32"]
TILE = 16


@dataclass(frozen=True)
class PackedFormat:
    """A layout: kind, inputs per scale (0 for the float kinds), and whether minima are stored."""

    kind: PackedKind
    group: int = 0
    has_min: bool = False

    @property
    def group_bytes(self) -> int:
        """Bytes of one tile's group (of one input for f16 and f32, of two for bf16)."""
        if self.kind == "u4":
            return 256 + 32 + 32 * self.has_min
        if self.kind == "i8":
            return self.group * TILE + 32 + 32 * self.has_min
        return {"bf16": 64, "f16": 32, "f32": 64}[self.kind]

    @property
    def group_inputs(self) -> int:
        """Inputs that one group covers."""
        return self.group or {"bf16": 2}.get(self.kind, 1)

    def tile_bytes(self, num_inputs: int) -> int:
        """Bytes of one tile of a matrix with that many inputs."""
        return -(-num_inputs // self.group_inputs) * self.group_bytes

    def matrix_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Bytes of a whole matrix."""
        return -(-num_outputs // TILE) * self.tile_bytes(num_inputs)

    def __str__(self) -> str:
        return self.kind + (f"g{self.group}" if self.group else "") + ("m" if self.has_min else "")


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [num_outputs, num_inputs] in that format; ``data`` is a flat u8 array of ``matrix_bytes``, aligned to 64
    bytes.
    """

    name: str
    format: PackedFormat
    num_outputs: int
    num_inputs: int
    data: NDArray[np.uint8]


NATIVE_FORMATS: dict[str, PackedFormat] = {
    "F32": PackedFormat("f32"),
    "F16": PackedFormat("f16"),
    "BF16": PackedFormat("bf16"),
    "Q4_0": PackedFormat("u4", 32),
    "Q4_1": PackedFormat("u4", 32, has_min=True),
    "Q4_K": PackedFormat("u4", 32, has_min=True),
    "Q5_0": PackedFormat("i8", 32),
    "Q5_1": PackedFormat("i8", 32, has_min=True),
    "Q5_K": PackedFormat("i8", 32, has_min=True),
    "Q8_0": PackedFormat("i8", 32),
    "Q6_K": PackedFormat("i8", 16),
}
"""What ``--weights native`` turns each kind into. Exact but for one rounding: products of a k-quant's two scales are
kept as f16.
"""

CHOSEN_FORMATS: dict[str, PackedFormat] = {
    "f32": PackedFormat("f32"),
    "bf16": PackedFormat("bf16"),
    "int8": PackedFormat("i8", 32),
    "int4": PackedFormat("u4", 32, has_min=True),
}
"""What ``--weights f32|bf16|int8|int4`` turns matrices into on load (round to nearest; int8 absmax/127, int4 between
the group's extremes).
"""
