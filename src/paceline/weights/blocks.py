"""What the bytes of a checkpoint's blocks mean: with ``tiling.py`` the numpy reference of csrc/kernels/pack.cpp.

Source: GGUF's block layouts (ggml-quants.c, gguf.quants), and those of ``weights/quantized_matrix.py``; MXFP4 is from
the OCP Microscaling Formats Specification 1.0 (2023).

Notation: W [N, K] f32 weights, q integer codes, d and m a block's f16 scale and minimum, z its zero point, sc and mn a
k-quant's 6-bit (Q6_K: 8-bit) ones.

Departures: none in value. ``dequantize`` follows the file's own formula, so it has the bits of ``gguf.quants``.
``to_affine`` moves codes into the range of the packed kinds: Q4_0 from -8..7 to 0..15 with minimum -8 d (exact), Q5_K
from 0..31 to -16..15 with minimum m + 16 scale in f32, which halves what the rounding of its scale to f16 costs. Q5_1
keeps q in 0..31: its d and m are f16 in the file and stay exact, whereas m + 16 d would not.

Checked by: tests/unit/test_blocks.py against gguf.quants and ``QuantizedMatrix.values``, tests/native/test_pack.py
(native packer, bit for bit).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.weights.raw import BLOCK_KINDS, RawTensor

F32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

MXFP4_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice what each code of MXFP4 (e2m1) means; its scale 2^(e - 127) is halved in turn."""

_BF16_QUIET = 0x0040
_F16_NAN = 0x7E00


@dataclass(frozen=True)
class AffineGroups:
    """A matrix W = scale * (q - zero) + minimum, with one of each for ``group`` inputs of an output (None for 0).

    q [N, K] i8, or places in ``levels`` [16] i8 where these are given; scale, minimum [N, ceil(K / group)] f32, zero
    likewise i16. The last group may be short.
    """

    q: NDArray[np.int8]
    scale: F32
    minimum: F32 | None
    group: int
    zero: NDArray[np.int16] | None = None
    levels: NDArray[np.int8] | None = None

    def values(self) -> F32:
        """W [N, K] f32, with one multiplication and one addition in f32."""
        values = (self.q if self.levels is None else self.levels[self.q]).astype(np.float32)
        whole = values.shape[1] // self.group
        # Grouped views of what is changed in place: repeating scales for every input takes four times as long.
        groups = values[:, : whole * self.group].reshape(len(values), whole, self.group)
        rest = values[:, whole * self.group :]
        for apply, table in ((np.subtract, self.zero), (np.multiply, self.scale), (np.add, self.minimum)):
            if table is not None:
                factors = table.astype(np.float32, copy=False)
                apply(groups, factors[:, :whole, None], out=groups)
                apply(rest, factors[:, whole:], out=rest)
        if whole * self.group < values.shape[1] and whole:
            values[:, : whole * self.group] = groups.reshape(len(values), -1)  # a copy, where rows have a short group
        return values

    def rows(self, index: slice | NDArray[np.int32]) -> AffineGroups:
        """Those outputs."""
        minimum = None if self.minimum is None else self.minimum[index]
        zero = None if self.zero is None else self.zero[index]
        return AffineGroups(self.q[index], self.scale[index], minimum, self.group, zero, self.levels)


# --- floats ---


def f32_to_bf16(values: F32) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(_BF16_QUIET)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def bf16_to_f32(bits: NDArray[np.uint16]) -> F32:
    """Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_f16(values: F32) -> NDArray[np.uint16]:
    """Bits of the nearest f16, ties to even; too large gives infinity, a NaN gives 0x7e00."""
    with np.errstate(over="ignore", under="ignore"):
        bits = np.asarray(values, np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(_F16_NAN), bits)


def f16_to_f32(bits: NDArray[np.uint16]) -> F32:
    """Exact."""
    return bits.view(np.float16).astype(np.float32)


def _round_f16(values: F32) -> F32:
    return f16_to_f32(f32_to_f16(values))


# --- blocks of a file ---
# A decoder takes blocks [B, bytes] and returns the file's form: q [B, block] i8, scale [B, groups] f32, minimum
# likewise (None for 0).

Decoded = tuple[NDArray[np.int8], F32, "F32 | None"]


def _half(blocks: Bytes, at: int) -> F32:
    return f16_to_f32(np.ascontiguousarray(blocks[:, at : at + 2]).view(np.uint16))


def _nibbles(data: Bytes) -> Bytes:
    """[B, n] -> [B, 2n]: the low nibbles of all bytes, then the high ones."""
    return np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=1)


def _fifth_bits(data: Bytes) -> Bytes:
    """[B, 4] -> [B, 32]: bit i of the little-endian word, worth 16."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Decoded:
    return _nibbles(blocks[:, 2:18]).astype(np.int8) - np.int8(8), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Decoded:
    return _nibbles(blocks[:, 4:20]).astype(np.int8), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Decoded:
    q = _nibbles(blocks[:, 6:22]) | _fifth_bits(blocks[:, 2:6])
    return q.astype(np.int8) - np.int8(16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Decoded:
    q = _nibbles(blocks[:, 8:24]) | _fifth_bits(blocks[:, 4:8])
    return q.astype(np.int8), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Decoded:
    return blocks[:, 2:34].view(np.int8), _half(blocks, 0), None


def _k_scales(blocks: Bytes) -> tuple[F32, F32]:
    """d * sc and -(dmin * mn), [B, 8] each, of Q4_K and Q5_K: d, dmin, then twelve bytes of 6-bit numbers."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    sc = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    mn = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=1)
    return _half(blocks, 0) * sc.astype(np.float32), -(_half(blocks, 2) * mn.astype(np.float32))


def _k_nibbles(data: Bytes) -> Bytes:
    """[B, 128] -> [B, 256]: each 32 bytes hold 32 low nibbles, then 32 high ones."""
    return _nibbles(data.reshape(-1, 32)).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Decoded:
    return _k_nibbles(blocks[:, 16:144]).astype(np.int8), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Decoded:
    bits = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    q = _k_nibbles(blocks[:, 48:176]) | (bits.reshape(-1, 256) << np.uint8(4))
    return q.astype(np.int8), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Decoded:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 256)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & np.uint8(3)
    q = (low | (high.reshape(-1, 256) << np.uint8(4))).astype(np.int8) - np.int8(32)
    return q, _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32), None


def _mxfp4(blocks: Bytes) -> Decoded:
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return _nibbles(blocks[:, 1:17]).view(np.int8), scale, None


_DECODERS: dict[str, Callable[[Bytes], Decoded]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


def _decode_quantized(raw: RawTensor) -> AffineGroups:
    """Blocks of ``quantized_matrix``: codes of Q4 without Z are moved to -8..7, as those of Q4_0 are."""
    num_outputs, num_inputs = raw.shape
    group, block_bytes = BLOCK_KINDS[raw.kind]
    blocks = raw.data.reshape(-1, block_bytes)
    if raw.kind == "Q8C":
        scale = np.ascontiguousarray(blocks[:, :4]).view(np.float32).reshape(num_outputs, -1)
        assert np.array_equal(scale.view(np.uint32), np.repeat(scale[:, :1], scale.shape[1], axis=1).view(np.uint32))
        return AffineGroups(blocks[:, 4:].view(np.int8).reshape(raw.shape), scale[:, :1], None, num_inputs)
    four, has_zero = raw.kind.startswith("Q4"), raw.kind.endswith("Z")
    codes = blocks[:, 3 if has_zero else 2 :]
    q = (_nibbles(codes.reshape(-1, 16)) if four else codes).view(np.int8).reshape(raw.shape)
    scale = _half(blocks, 0).reshape(num_outputs, -1)
    if not has_zero:
        return AffineGroups(q - np.int8(8) if four else q, scale, None, group)
    zero = blocks[:, 2] if four else blocks[:, 2].view(np.int8)
    return AffineGroups(q, scale, None, group, zero.astype(np.int16).reshape(num_outputs, -1))


def _decode(raw: RawTensor) -> AffineGroups:
    """The tensor in the form of its file, codes not yet moved."""
    num_outputs, num_inputs = raw.shape
    block, block_bytes = BLOCK_KINDS[raw.kind]
    assert num_inputs % block == 0, (raw.name, raw.shape, raw.kind)
    if raw.kind not in _DECODERS:
        return _decode_quantized(raw)
    q, scale, minimum = _DECODERS[raw.kind](raw.data.reshape(-1, block_bytes))
    return AffineGroups(
        q.reshape(num_outputs, num_inputs),
        scale.reshape(num_outputs, -1),
        None if minimum is None else minimum.reshape(num_outputs, -1),
        block // scale.shape[1],
        levels=MXFP4_DOUBLED if raw.kind == "MXFP4" else None,
    )


def to_affine(raw: RawTensor) -> AffineGroups:
    """A matrix of an integer kind in the range of its packed kind (q 0..15 for those of four bits), scales not rounded
    yet, columns in the tensor's order.
    """
    groups = _decode(raw)
    if raw.kind in ("Q4_0", "Q4G64", "Q4G128"):
        return AffineGroups(groups.q + np.int8(8), groups.scale, np.float32(-8) * groups.scale, groups.group)
    if raw.kind == "Q5_K":
        assert groups.minimum is not None
        moved = groups.minimum + np.float32(16) * groups.scale
        return AffineGroups(groups.q - np.int8(16), groups.scale, moved, groups.group)
    return groups


def dequantize(raw: RawTensor) -> F32:
    """W [N, K] f32 ([length] for a vector, [E, N, K] for experts), columns in the layer's order: bit for bit what
    ``gguf.quants.dequantize`` and ``QuantizedMatrix.values`` give.
    """
    values = stored_values(raw)
    return values if raw.order is None else restore_columns(values, raw.order)


def restore_columns(values: F32, order: NDArray[np.int32]) -> F32:
    """Columns put back: column j of ``values`` [N, K] is input order[j]."""
    restored = np.empty_like(values)
    restored[:, order] = values
    return restored


def stored_values(raw: RawTensor) -> F32:
    """What ``dequantize`` gives, columns in the tensor's order."""
    data: Bytes = np.ascontiguousarray(raw.data)
    if raw.kind == "F32":
        return data.view(np.float32).reshape(raw.shape)
    if raw.kind == "F16":
        return f16_to_f32(data.view(np.uint16)).reshape(raw.shape)
    if raw.kind == "BF16":
        return bf16_to_f32(data.view(np.uint16)).reshape(raw.shape)
    rows = RawTensor(raw.name, (math.prod(raw.shape[:-1]), raw.shape[-1]), raw.kind, data)
    return _decode(rows).values().reshape(raw.shape)


# --- quantising on load ---


def quantize_rtn(weights: F32, fmt: Literal["int8", "int4"], *, group: int = 32) -> AffineGroups:
    """W [N, K] rounded to nearest in groups along K; does not modify ``weights``.

    int8: scale = absmax / 127, q in -127..127, no minimum. int4: minimum = min W, scale = (max W - minimum) / 15, q in
    0..15. Scale and minimum are rounded to f16 before q is computed, so q is the best code for what is stored;
    q = rint((w - minimum) / scale) in f32, ties to even, clamped. A group whose scale is 0 has q = 0; a group with a
    weight that is not finite has scale NaN and q = 0.
    """
    num_outputs, num_inputs = weights.shape
    num_groups = -(-num_inputs // group)
    padded = np.pad(weights, ((0, 0), (0, num_groups * group - num_inputs)), mode="edge")
    grouped = padded.reshape(num_outputs, num_groups, group)
    finite: NDArray[np.bool_] = np.isfinite(grouped).min(axis=2)
    grouped = np.where(finite[:, :, None], grouped, np.float32(0))
    zero = np.float32(0)
    minimum: F32 | None = None
    if fmt == "int8":
        scale = np.abs(grouped).max(axis=2) / np.float32(127)
        low, high = -127.0, 127.0
    else:
        minimum = _round_f16(grouped.min(axis=2) + zero)  # + 0: the sign of a zero minimum must not depend on order
        span = grouped.max(axis=2) - minimum
        scale = np.where(span > zero, span, zero) / np.float32(15)
        grouped = grouped - minimum[:, :, None]
        low, high = 0.0, 15.0
    scale = _round_f16(scale)
    usable = (scale > zero) & np.isfinite(scale)
    ratio = grouped / np.where(usable, scale, np.float32(1))[:, :, None]
    ratio = np.clip(np.where(usable[:, :, None], ratio, zero), np.float32(low), np.float32(high))
    q = np.rint(ratio).astype(np.int8).reshape(num_outputs, -1)[:, :num_inputs]
    return AffineGroups(q, np.where(finite, scale, np.float32("nan")), minimum, group)
