"""A quantised matrix as methods make it and files hold it, and its rows as blocks that the packer reads.

Notation: W [N, K] f32 weights, q [N, K] codes, s and z [N, groups] the scale and zero point of a group's inputs:
W = s (q - z). GPTQ, AWQ and compressed-tensors all store exactly these; the files differ in where the bits lie.

A block (``raw.BLOCK_KINDS``) is one group of one output, or 32 inputs of it for a matrix with one scale an output:

    Q4G{32,64,128}[Z]   f16 s, [u8 z,] codes of 4 bits: of every 32 inputs 16 bytes, byte i with input i in its low and
                        input 16 + i in its high nibble. Without Z z = 8 (Q4G32 is Q4_0).
    Q8G{32,64,128}[Z]   f16 s, [i8 z - 128,] i8 q - 128 of each input. Without Z z = 128 (Q8G32 is Q8_0).
    Q8C                 f32 s, i8 q - 128 of 32 inputs: one scale for a whole output, repeated in each of its blocks.
                        Activations are rounded to int8 with one scale a token.

Codes of fewer bits than 4 lie in Q4 blocks with their own zero point. A group that is none of these sizes is cut into
the largest that divides it.

Checked by: tests/unit/test_blocks.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.weights.raw import BLOCK_KINDS, RawTensor

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK_GROUPS = (128, 64, 32)
"""Inputs that a block may cover, largest first."""


def block_kind(bits: int, group: int, *, is_symmetric: bool, per_token: bool) -> str:
    """The kind of the blocks that hold such a matrix. ValueError when groups are no multiple of 32."""
    size = next((size for size in BLOCK_GROUPS if group % size == 0), None)
    if size is None:
        raise ValueError(f"groups of {group} inputs are no multiple of {BLOCK_GROUPS[-1]}")
    if per_token:
        return "Q8C"
    kind = f"Q{4 if bits <= 4 else 8}G{size}" + ("" if is_symmetric and bits in (4, 8) else "Z")
    return {"Q4G32": "Q4_0", "Q8G32": "Q8_0"}.get(kind, kind)


@dataclass(frozen=True)
class QuantizedMatrix:
    """W = scale * (codes - zero), one scale and zero point for each ``group`` inputs of an output.

    codes [N, K] u8 below 2^bits; scale [N, K / group] f16, or f32 with ``per_token``; zero [N, K / group] u8. ``group``
    divides K; it is K for one scale an output. ``per_token`` says that activations are to be rounded to int8 with one
    scale a token (W8A8).

    ``order`` [K] i32 is there when groups are not consecutive (GPTQ's g_idx): codes lie in the order in which they are,
    and column j of ``codes`` is input order[j] of the layer.
    """

    codes: NDArray[np.uint8]
    scale: NDArray[np.float16] | F32
    zero: NDArray[np.uint8]
    bits: int
    group: int
    per_token: bool = False
    order: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        num_outputs, num_inputs = self.codes.shape
        assert 2 <= self.bits <= 8, self.bits
        assert self.codes.dtype == self.zero.dtype == np.uint8
        assert self.scale.dtype == (np.float32 if self.per_token else np.float16), self.scale.dtype
        assert num_inputs % self.group == 0, (num_inputs, self.group)
        assert self.scale.shape == self.zero.shape == (num_outputs, num_inputs // self.group)

    @property
    def is_symmetric(self) -> bool:
        """Whether every zero point is the middle code."""
        return bool((self.zero == 1 << (self.bits - 1)).all())

    @property
    def num_bytes(self) -> int:
        """Bytes of the codes, packed, the scales, and zero points where they differ from the middle code."""
        zero_bits = 0 if self.is_symmetric else self.zero.size * self.bits
        return -(-self.codes.size * self.bits // 8) + self.scale.nbytes + -(-zero_bits // 8)

    def values(self) -> F32:
        """W [N, K] f32, exact, with its columns in the layer's order."""
        centred = self.codes.astype(np.float32) - np.repeat(self.zero, self.group, axis=1).astype(np.float32)
        values = centred * np.repeat(self.scale.astype(np.float32), self.group, axis=1)
        if self.order is None:
            return values
        restored = np.empty_like(values)
        restored[:, self.order] = values
        return restored

    def blocks(self, name: str) -> RawTensor:
        """The matrix as a tensor of one of the block kinds above. ValueError when groups are no multiple of 32."""
        kind = block_kind(self.bits, self.group, is_symmetric=self.is_symmetric, per_token=self.per_token)
        group, _ = BLOCK_KINDS[kind]
        if self.per_token:
            assert self.bits == 8, "int8 activations meet int8 weights"
            assert self.is_symmetric, "int8 activations meet symmetric weights"
            data = self._cut(group, "<f4", None)
        else:
            data = self._cut(group, "<f2", self.zero if kind.endswith("Z") else None)
        return RawTensor(name, self.codes.shape, kind, data, self.order)

    def _cut(self, group: int, scale_type: str, zero: NDArray[np.uint8] | None) -> Bytes:
        """The bytes of all blocks of ``group`` inputs."""
        num_outputs, num_inputs = self.codes.shape
        repeats = self.group // group
        scale = np.repeat(self.scale, repeats, axis=1).astype(scale_type).reshape(-1, 1).view(np.uint8)
        parts = [scale]
        offset = np.uint8(0 if self.bits <= 4 else 128)
        if zero is not None:
            parts.append((np.repeat(zero, repeats, axis=1) - offset).reshape(-1, 1))
        if self.bits <= 4:
            runs = self.codes.reshape(num_outputs * num_inputs // 32, 2, 16)
            parts.append((runs[:, 0] | (runs[:, 1] << np.uint8(4))).reshape(-1, group // 2))
        else:
            # 5 to 7 bits are stored as they are: their zero point stands in the block.
            parts.append((self.codes - offset).reshape(-1, group))
        return np.concatenate(parts, axis=1).reshape(-1)
