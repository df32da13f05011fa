"""How 4-bit weights lie in a GPU's memory, and the packer that brings them there.

Notation: W [N, K] weights, q [N, K] codes 0..15, G the group (32, 64 or 128 inputs of an output that share a scale), s
and o [N, K / G] the scale and the offset of a group.

Inputs are cut into blocks of 128, the last one filled up with codes and scales of zero:

    codes   [K / 128, N, 16] i32   nibble i (bits 4 i to 4 i + 3) of word j: input 16 i + j of the block
    scale   [K / G, N]             f16 where that is exact, else f32
    offset  [K / G, N]             by its kind:
              middle   none           W = s (q - 8)
              zero     u8             W = s (q - o)
              minimum  type of scale  W = s q + o

A thread block reads the words of some neighbouring outputs: one run of bytes. Shifting them right by 4 i leaves
sixteen consecutive inputs in the lowest bits, which is the depth of one tensor-core product: nothing has to be moved
between threads, and no scale changes on the way.

Checked by: tests/triton/test_int4_layout.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UnsupportedError
from paceline.weights.blocks import AffineGroups, to_affine
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import RawTensor

BLOCK_INPUTS = 128
WORDS = 16
"""Of an output in a block."""
NIBBLES = 8
GROUPS = (32, 64, 128)

OffsetKind = Literal["middle", "zero", "minimum"]


@dataclass(frozen=True)
class PackedInt4:
    """A matrix [num_outputs, num_inputs] in the layout above; ``offset`` is None for the kind "middle".

    ``order`` [num_inputs] i32, when given: column j of the matrix is input order[j] of the layer.
    """

    codes: NDArray[np.int32]
    scale: NDArray[Any]
    offset: NDArray[Any] | None
    offset_kind: OffsetKind
    group: int
    num_outputs: int
    num_inputs: int
    order: NDArray[np.int32] | None = None

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        return self.codes.nbytes + self.scale.nbytes + (0 if self.offset is None else self.offset.nbytes)

    def values(self) -> NDArray[np.float32]:
        """W [N, K] f32, columns as they lie."""
        words = self.codes.view(np.uint32)[:, :, None, :] >> (4 * np.arange(NIBBLES, dtype=np.uint32))[:, None]
        codes = (words & np.uint32(15)).astype(np.float32)  # [blocks, N, nibble, word]
        q = codes.transpose(1, 0, 2, 3).reshape(self.num_outputs, -1)[:, : self.num_inputs]

        def spread(x: NDArray[Any]) -> NDArray[np.float32]:
            return np.repeat(x.T.astype(np.float32), self.group, axis=1)[:, : self.num_inputs]

        if self.offset_kind == "minimum":
            assert self.offset is not None
            return np.asarray(spread(self.scale) * q + spread(self.offset), np.float32)
        zero = np.float32(8) if self.offset is None else spread(self.offset)
        return np.asarray(spread(self.scale) * (q - zero), np.float32)


def pack_affine(matrix: AffineGroups, name: str, order: NDArray[np.int32] | None = None) -> PackedInt4:
    """The matrix in the layout above. Raises ``UnsupportedError`` for codes of more than 4 bits and other groups."""
    num_outputs, num_inputs = matrix.q.shape
    if matrix.levels is not None:
        raise UnsupportedError(
            f"{name}: codes that are looked up; 4-bit products on a GPU take whole numbers: choose --weights int4"
        )
    if matrix.group not in GROUPS:
        raise UnsupportedError(
            f"{name}: groups of {matrix.group} inputs; 4-bit products on a GPU take groups of "
            f"{', '.join(map(str, GROUPS))}: quantise with one of these, or choose --weights bf16"
        )
    if matrix.q.min(initial=0) < 0 or matrix.q.max(initial=0) > 15:
        raise UnsupportedError(
            f"{name}: codes from {matrix.q.min()} to {matrix.q.max()}; 4-bit products on a GPU take 0 to 15: choose "
            "--weights int4 or --weights bf16"
        )
    kind, offset = _offset_of(matrix)
    floats = [matrix.scale] + ([offset] if kind == "minimum" and offset is not None else [])
    with np.errstate(over="ignore"):
        exact_f16 = all(np.array_equal(x.astype(np.float16).astype(np.float32), x) for x in floats)
    scale_type = np.float16 if exact_f16 else np.float32
    offset_type = np.uint8 if kind == "zero" else scale_type
    return PackedInt4(
        _pack_codes(matrix.q),
        _group_major(matrix.scale, num_inputs, matrix.group).astype(scale_type),
        None if offset is None else _group_major(offset, num_inputs, matrix.group).astype(offset_type),
        kind,
        matrix.group,
        num_outputs,
        num_inputs,
        order,
    )


def pack_tensor(raw: RawTensor) -> PackedInt4:
    """A tensor of a checkpoint: Q4_0, Q4_1, Q4_K, or any 4-bit kind of ``weights/quantized_matrix.py``."""
    if raw.kind in ("F32", "F16", "BF16"):
        raise UnsupportedError(f"{raw.name}: {raw.kind} has no 4-bit codes; choose --weights int4 to make them")
    return pack_affine(to_affine(raw), raw.name, raw.order)


def pack_quantized(matrix: QuantizedMatrix, name: str) -> PackedInt4:
    """A matrix as ``paceline quantize`` makes it and other programs' files hold it; 2 to 4 bits."""
    if matrix.bits > 4:
        raise UnsupportedError(f"{name}: codes of {matrix.bits} bits; 4-bit products on a GPU take 2 to 4")
    if matrix.group % GROUPS[0]:
        raise UnsupportedError(f"{name}: groups of {matrix.group} inputs are no multiple of {GROUPS[0]}")
    return pack_tensor(matrix.blocks(name))


def _offset_of(matrix: AffineGroups) -> tuple[OffsetKind, NDArray[Any] | None]:
    if matrix.zero is not None:
        assert matrix.minimum is None, "a matrix has zero points or minima"
        assert matrix.zero.min(initial=0) >= 0, "zero points are codes"
        assert matrix.zero.max(initial=0) <= 15, "zero points are codes"
        return ("middle", None) if (matrix.zero == 8).all() else ("zero", matrix.zero)
    minimum = matrix.minimum
    if minimum is None:
        minimum = np.zeros_like(matrix.scale)
    if np.array_equal(minimum, np.float32(-8) * matrix.scale):
        return "middle", None
    return "minimum", minimum


def _pack_codes(q: NDArray[np.int8]) -> NDArray[np.int32]:
    num_outputs, num_inputs = q.shape
    blocks = -(-num_inputs // BLOCK_INPUTS)
    padded = np.zeros((num_outputs, blocks * BLOCK_INPUTS), np.uint32)
    padded[:, :num_inputs] = q
    nibbles = padded.reshape(num_outputs, blocks, NIBBLES, WORDS) << (4 * np.arange(NIBBLES, dtype=np.uint32))[:, None]
    words = np.bitwise_or.reduce(nibbles, axis=2).transpose(1, 0, 2)
    return np.ascontiguousarray(words).view(np.int32)


def _group_major(x: NDArray[Any], num_inputs: int, group: int) -> NDArray[Any]:
    """[N, groups] -> [groups of whole blocks, N], filled up with zeros."""
    num_groups = -(-num_inputs // BLOCK_INPUTS) * (BLOCK_INPUTS // group)
    padded = np.zeros((num_groups, x.shape[0]), x.dtype)
    padded[: x.shape[1]] = x.T
    return padded
