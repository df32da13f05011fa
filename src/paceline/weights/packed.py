"""Weights in the layout that the kernels read: tiles of 16 outputs, groups of inputs, 4 inputs side by side.

A tile is 16 consecutive outputs (the lanes of a register); outputs are padded with zeros to a multiple of 16. Tiles
follow each other; inside a tile the groups follow each other along the inputs (K), padded with zeros to a multiple of
the group. The codes of a group are those of its runs of 32 inputs (i8 also has one of 16), one after the other:

    u4   a run is 256 bytes. Byte kb*64 + lane*4 + j, kb = 0..3, holds input kb*4 + j of the run in its low and input
         16 + kb*4 + j in its high nibble. q in 0..15
    e2m1 as u4, but q is what the code stands for: 0 1 2 3 4 6 8 12, and from code 8 on the same less than zero
    i8   a run is 512 (256) bytes. Byte kb*64 + lane*4 + j holds input kb*4 + j of the run. q in -128..127

After the codes of a group stand 16 f16 scales, then its offsets, one for each lane:

    none                   w = scale * q for i8 and e2m1, scale * (q - 8) for u4 (Q4_0)
    min    16 f16 minima   w = scale * q + min
    zero   16 bytes z      w = scale * (q - z), z unsigned for u4 and signed for i8

The other kinds have no groups of scales:

    i8c  runs of 32 inputs as i8, and after all runs of the tile 16 f32 scales: one for each output. w = scale * q.
         Its activations are rounded to int8 with one scale a token.
    bf16 per two inputs k, k+1 (K padded to even): 16 u32, low half input k, high half input k+1
    f16  per input: 16 f16
    f32  per input: 16 f32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

PackedKind = Literal["u4", "e2m1", "i8", "i8c", "bf16", "f16", "f32"]
Offset = Literal["none", "min", "zero"]
TILE = 16
RUN = 32
"""Inputs whose activations share a scale, and whose products are one exact integer sum."""

MAX_CHANNEL_INPUTS = (2**31 - 1) // (128 * 127)
"""Inputs of an i8c matrix: so many products of a code (to -128) and an activation (to 127) are below 2^31 in sum."""

_OFFSET_BYTES: dict[Offset, int] = {"none": 0, "min": 2 * TILE, "zero": TILE}


@dataclass(frozen=True)
class PackedFormat:
    """A layout: kind, inputs per scale (32 for i8c, whose group is a run; 0 for the float kinds), and what shifts the
    codes.
    """

    kind: PackedKind
    group: int = 0
    offset: Offset = "none"

    @property
    def has_four_bits(self) -> bool:
        """Whether two codes are a byte."""
        return self.kind in ("u4", "e2m1")

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one tile's group."""
        return self.group * TILE // (2 if self.has_four_bits else 1)

    @property
    def group_bytes(self) -> int:
        """Bytes of one tile's group (of one input for f16 and f32, of two for bf16)."""
        if self.kind in ("u4", "e2m1", "i8"):
            return self.code_bytes + 2 * TILE + _OFFSET_BYTES[self.offset]
        return {"i8c": self.code_bytes, "bf16": 64, "f16": 32, "f32": 64}[self.kind]

    @property
    def group_inputs(self) -> int:
        """Inputs that one group covers."""
        return self.group or {"bf16": 2}.get(self.kind, 1)

    @property
    def per_token(self) -> bool:
        """Whether activations are rounded to int8 with one scale a token, not one for each run of 32."""
        return self.kind == "i8c"

    def num_groups(self, num_inputs: int) -> int:
        """Groups of one tile of a matrix with that many inputs."""
        return -(-num_inputs // self.group_inputs)

    def tile_bytes(self, num_inputs: int) -> int:
        """Bytes of one tile of a matrix with that many inputs."""
        return self.num_groups(num_inputs) * self.group_bytes + 4 * TILE * self.per_token

    def matrix_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Bytes of a whole matrix."""
        return -(-num_outputs // TILE) * self.tile_bytes(num_inputs)

    def __str__(self) -> str:
        group = f"g{self.group}" if self.group and not self.per_token else ""
        return self.kind + group + {"none": "", "min": "m", "zero": "z"}[self.offset]


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [num_outputs, num_inputs] in that format; ``data`` is a flat u8 array of ``matrix_bytes``, aligned to 64
    bytes.

    ``order`` [num_inputs] i32, when given: column j of the matrix is input order[j] of the layer.
    """

    name: str
    format: PackedFormat
    num_outputs: int
    num_inputs: int
    data: NDArray[np.uint8]
    order: NDArray[np.int32] | None = None


NATIVE_FORMATS: dict[str, PackedFormat] = {
    "F32": PackedFormat("f32"),
    "F16": PackedFormat("f16"),
    "BF16": PackedFormat("bf16"),
    "Q4_0": PackedFormat("u4", 32),
    "Q4_1": PackedFormat("u4", 32, "min"),
    "Q4_K": PackedFormat("u4", 32, "min"),
    "Q5_0": PackedFormat("i8", 32),
    "Q5_1": PackedFormat("i8", 32, "min"),
    "Q5_K": PackedFormat("i8", 32, "min"),
    "Q8_0": PackedFormat("i8", 32),
    "Q6_K": PackedFormat("i8", 16),
    "MXFP4": PackedFormat("e2m1", 32),
    "Q4G64": PackedFormat("u4", 64),
    "Q4G128": PackedFormat("u4", 128),
    "Q4G32Z": PackedFormat("u4", 32, "zero"),
    "Q4G64Z": PackedFormat("u4", 64, "zero"),
    "Q4G128Z": PackedFormat("u4", 128, "zero"),
    "Q8G64": PackedFormat("i8", 64),
    "Q8G128": PackedFormat("i8", 128),
    "Q8G32Z": PackedFormat("i8", 32, "zero"),
    "Q8G64Z": PackedFormat("i8", 64, "zero"),
    "Q8G128Z": PackedFormat("i8", 128, "zero"),
    "Q8C": PackedFormat("i8c", RUN),
}
"""What ``--weights native`` turns each kind into. Exact but for one rounding: scales are kept as f16, which products
of a k-quant's two scales may not be, nor MXFP4's powers of two below 2^-24 (weights below 4e-7).
"""

CHOSEN_FORMATS: dict[str, PackedFormat] = {
    "f32": PackedFormat("f32"),
    "bf16": PackedFormat("bf16"),
    "int8": PackedFormat("i8", 32),
    "int4": PackedFormat("u4", 32, "min"),
}
"""What ``--weights f32|bf16|int8|int4`` turns matrices into on load (round to nearest; int8 absmax/127, int4 between
the group's extremes).
"""
