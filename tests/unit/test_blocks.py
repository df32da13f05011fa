"""Blocks of a file against gguf's own decoder; rounding against a slow reference that tries every code."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline.weights.blocks import (
    bf16_to_f32,
    dequantize,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    quantize_rtn,
    to_affine,
)
from paceline.weights.packed import NATIVE_FORMATS, PackedMatrix
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import BLOCK_KINDS, RawTensor
from paceline.weights.tiling import pack_raw, unpack

INTEGER_KINDS = [kind for kind, fmt in NATIVE_FORMATS.items() if fmt.group]
SCALES_AT = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_raw(kind: str, num_outputs: int, num_inputs: int, seed: int = 0) -> RawTensor:
    """Random bytes, so that all codes and 6-bit scales occur; f16 scales of both signs, ordinary and tiny."""
    rng = np.random.default_rng(seed)
    block, block_bytes = BLOCK_KINDS[kind]
    if block == 1:
        values = rng.standard_normal(num_outputs * num_inputs).astype(np.float32)
        packed = {"F32": values, "F16": values.astype(np.float16), "BF16": f32_to_bf16(values)}[kind]
        return RawTensor("t", (num_outputs, num_inputs), kind, packed.view(np.uint8))
    blocks = rng.integers(0, 256, (num_outputs * num_inputs // block, block_bytes), dtype=np.uint8)
    if kind == "Q8C":
        scale = np.repeat(rng.standard_normal(num_outputs).astype(np.float32), num_inputs // block)
        blocks[:, :4] = scale[:, None].view(np.uint8)
        return RawTensor("t", (num_outputs, num_inputs), kind, blocks.reshape(-1))
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(104, 137, len(blocks))  # scales that f16 holds
        return RawTensor("t", (num_outputs, num_inputs), kind, blocks.reshape(-1))
    for at in SCALES_AT.get(kind, (0,)):
        size = rng.choice([1e-2, 1e-3, 1e-7], (len(blocks), 1))
        blocks[:, at : at + 2] = (rng.standard_normal((len(blocks), 1)) * size).astype(np.float16).view(np.uint8)
    return RawTensor("t", (num_outputs, num_inputs), kind, blocks.reshape(-1))


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if kind in gguf.GGMLQuantizationType.__members__])
def test_dequantize_has_the_bits_of_gguf(kind: str) -> None:
    raw = random_raw(kind, 5, 512)
    expected = gguf.quants.dequantize(raw.data.reshape(5, -1), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(dequantize(raw).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantize_reads_what_gguf_quantised(kind: str) -> None:
    weights = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[kind])
    values = dequantize(RawTensor("t", (3, 64), kind, blocks.reshape(-1)))
    step = 2 * np.abs(weights).max() / (256 if kind == "Q8_0" else 2 ** int(kind[1]))
    assert (
        np.abs(values - weights).max() < 1.1 * step
    )  # the largest weight may be one step off (Q4_0's codes are -8..7)


def test_dequantize_takes_vectors() -> None:
    raw = random_raw("Q8_0", 1, 64)
    vector = RawTensor("t", (64,), "Q8_0", raw.data)
    assert np.array_equal(dequantize(vector), dequantize(raw)[0])


@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_to_affine_means_the_same_weights(kind: str) -> None:
    raw = random_raw(kind, 5, 512)
    groups, fmt = to_affine(raw), NATIVE_FORMATS[kind]
    assert groups.group == (512 if fmt.per_token else fmt.group)
    assert groups.scale.shape == (5, 512 // groups.group)
    assert (groups.zero is not None) == (fmt.offset == "zero")
    if fmt.has_four_bits:
        assert (groups.q.min(), groups.q.max()) == (0, 15)
    values = dequantize(raw)
    if kind == "Q5_K":
        # Codes moved by 16: minimum + 16 scale is rounded once more, by half an ulp of no more than the largest weight.
        assert np.abs(groups.values() - values).max() <= np.abs(values).max() * 2.0**-23
    else:
        assert np.array_equal(groups.values(), values)


@st.composite
def quantized_matrices(draw: st.DrawFn) -> QuantizedMatrix:
    """Any bits, group, scales (0 and subnormal ones among them) and zero points that a file may hold."""
    bits, group = draw(st.sampled_from([2, 3, 4, 5, 8])), draw(st.sampled_from([32, 64, 96, 128, 256]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    num_outputs, groups = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    scale = rng.choice([0.0, 6e-8, 1e-3, -0.02, 1.0, 65504.0], (num_outputs, groups)).astype(np.float16)
    middle = draw(st.booleans())
    zero = rng.choice([0, (1 << bits) - 1, 1 << bits if bits < 8 else 255, 1 << (bits - 1)], scale.shape)
    zero = np.full_like(zero, 1 << (bits - 1)) if middle else zero
    codes = rng.integers(0, 1 << bits, (num_outputs, groups * group))
    codes[:, :group] = draw(st.sampled_from([0, (1 << bits) - 1]))  # a group of equal codes
    order = rng.permutation(groups * group).astype(np.int32) if draw(st.booleans()) else None
    return QuantizedMatrix(codes.astype(np.uint8), scale, zero.astype(np.uint8), bits, group, order=order)


@settings(deadline=None, max_examples=150)
@given(quantized_matrices())
def test_blocks_of_a_quantised_matrix_have_its_values(matrix: QuantizedMatrix) -> None:
    raw = matrix.blocks("t")
    assert raw.data.size == matrix.codes.size // BLOCK_KINDS[raw.kind][0] * BLOCK_KINDS[raw.kind][1]
    assert np.array_equal(dequantize(raw), matrix.values())
    fmt = NATIVE_FORMATS[raw.kind]
    packed = PackedMatrix("t", fmt, *raw.shape, pack_raw(raw, fmt), raw.order)
    assert np.array_equal(unpack(packed), matrix.values())


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_has_the_kind_that_is_made_for_it(bits: int, group: int, symmetric: bool) -> None:
    middle = 1 << (bits - 1)
    zero = np.full((2, 256 // group), middle if symmetric else middle - 1, np.uint8)
    codes = np.full((2, 256), middle, np.uint8)
    raw = QuantizedMatrix(codes, np.ones(zero.shape, np.float16), zero, bits, group).blocks("t")
    expected = f"Q{bits}G{group}{'' if symmetric else 'Z'}"
    assert raw.kind == {"Q4G32": "Q4_0", "Q8G32": "Q8_0"}.get(expected, expected)
    assert np.array_equal(dequantize(raw), np.full((2, 256), 0.0 if symmetric else 1.0))


@pytest.mark.parametrize("permuted", [False, True])
def test_one_scale_an_output(permuted: bool) -> None:
    rng = np.random.default_rng(5)
    scale = np.array([[1.5e-40], [0.0], [-3.0], [1e30]], np.float32)
    order = rng.permutation(160).astype(np.int32) if permuted else None
    zero = np.full((4, 1), 128, np.uint8)
    matrix = QuantizedMatrix(rng.integers(0, 256, (4, 160)).astype(np.uint8), scale, zero, 8, 160, True, order)
    raw = matrix.blocks("t")
    assert raw.kind == "Q8C"
    assert np.array_equal(dequantize(raw), matrix.values())
    fmt = NATIVE_FORMATS["Q8C"]
    assert np.array_equal(unpack(PackedMatrix("t", fmt, 4, 160, pack_raw(raw, fmt), order)), matrix.values())


def test_every_half_survives_widening_and_rounding() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    numbers = bits[~np.isnan(bits.view(np.float16))]
    assert np.array_equal(f32_to_f16(f16_to_f32(numbers)), numbers)
    numbers = bits[~np.isnan(bf16_to_f32(bits))]
    assert np.array_equal(f32_to_bf16(bf16_to_f32(numbers)), numbers)


@given(hnp.arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)))
def test_bf16_is_the_nearest_and_ties_go_to_even(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    rounded = f32_to_bf16(values)
    assert np.array_equal(np.isnan(values), np.isnan(bf16_to_f32(rounded)))
    for value, got in zip(values[np.isfinite(values)], rounded[np.isfinite(values)], strict=True):
        below = int(np.float32(value).view(np.uint32)) >> 16  # toward zero
        # The bf16 after the largest stands for infinity; 2^128 is where it would be.
        low, high = (float(v) if np.isfinite(v) else np.copysign(2.0**128, v) for v in _two_bf16(below))
        to_low, to_high = abs(float(value) - low), abs(float(value) - high)
        nearest = below if to_low < to_high or (to_low == to_high and below % 2 == 0) else below + 1
        assert int(got) == nearest


def _two_bf16(bits: int) -> np.ndarray:
    return bf16_to_f32(np.array([bits, bits + 1], np.uint16))


def test_bf16_keeps_a_nan_whose_payload_is_low() -> None:
    # Dropping the low half of this one, or rounding it up, would give infinity or zero.
    values = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_f32(f32_to_bf16(values))).all()


def slow_rtn(group: np.ndarray, four: bool) -> tuple[list[int], np.float32, np.float32]:
    """Codes by trying each one; scale and minimum by their definition."""
    minimum = np.float32(np.float16(min(group))) if four else np.float32(0)
    span = max(max(group) - minimum, np.float32(0)) if four else max(abs(w) for w in group)
    scale = np.float32(np.float16(np.float32(span) / np.float32(15 if four else 127)))
    codes = range(16) if four else range(-127, 128)
    if scale == 0:
        return [0] * len(group), scale, minimum
    ratios = [np.float32(np.float32(w - minimum) / scale) for w in group]
    return [min(codes, key=lambda q: (abs(float(r) - q), q % 2)) for r in ratios], scale, minimum


WEIGHTS = st.floats(-2.0, 2.0, width=32) | st.sampled_from([0.0, -0.0, 1e-8, -1e-30, 1.0, 0.5])


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_rtn_picks_the_nearest_code(fmt: str, data: st.DataObject) -> None:
    num_inputs = data.draw(st.integers(1, 40))
    weights = data.draw(hnp.arrays(np.float32, (1, num_inputs), elements=WEIGHTS))
    before = weights.copy()
    groups = quantize_rtn(weights, fmt)
    assert np.array_equal(before, weights)
    for g in range(-(-num_inputs // 32)):
        at = slice(32 * g, 32 * g + 32)
        codes, scale, minimum = slow_rtn(weights[0, at], fmt == "int4")
        assert groups.q[0, at].tolist() == codes
        assert groups.scale[0, g] == scale
        assert (0 if groups.minimum is None else groups.minimum[0, g]) == minimum


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_rtn_error_is_half_a_step(fmt: str) -> None:
    weights = np.random.default_rng(2).standard_normal((7, 100)).astype(np.float32)
    groups = quantize_rtn(weights, fmt)
    step = np.repeat(groups.scale, 32, axis=1)[:, :100]
    # Half a step, and what rounding scale and minimum to f16 (2^-11 of each) takes from the end of the range.
    assert (np.abs(groups.values() - weights) <= 0.5 * step + 16 * step * 2.0**-11 + 4 * 2.0**-11).all()


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -3.0, 1e-9, 1e-38])
def test_rtn_of_a_constant_group(fmt: str, value: float) -> None:
    weights = np.full((2, 48), value, np.float32)
    groups = quantize_rtn(weights, fmt)
    assert np.isfinite(groups.values()).all()
    # f16 keeps 2^-11 of a number, and nothing below 2^-25; int8's scale of 1e-9 is 0.
    assert np.abs(groups.values() - weights).max() <= abs(value) * 2.0**-11 + 2.0**-24


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rtn_marks_a_group_that_is_not_finite(fmt: str, bad: float) -> None:
    weights = np.ones((1, 64), np.float32)
    weights[0, 40] = bad
    groups = quantize_rtn(weights, fmt)
    assert np.isnan(groups.scale[0, 1])
    assert not groups.q[0, 32:].any()
    assert np.isfinite(groups.values()[0, :32]).all()
