"""The packed layout, byte by byte as ``weights/packed.py`` describes it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.weights.blocks import MXFP4_DOUBLED, AffineGroups, f32_to_bf16, quantize_rtn
from paceline.weights.packed import CHOSEN_FORMATS, NATIVE_FORMATS, TILE, PackedFormat, PackedMatrix
from paceline.weights.tiling import pack, unpack

FORMATS = sorted({*NATIVE_FORMATS.values(), *CHOSEN_FORMATS.values()}, key=str)


def random_groups(fmt: PackedFormat, num_outputs: int, num_inputs: int, seed: int = 0) -> AffineGroups:
    """Codes over the whole range, scales and minima that f16 holds (i8c: f32), zero points to the ends."""
    rng = np.random.default_rng(seed)
    low, high = (0, 16) if fmt.has_four_bits else (-128, 128)
    codes = rng.integers(low, high, (num_outputs, num_inputs)).astype(np.int8)
    if fmt.per_token:
        return AffineGroups(codes, rng.standard_normal((num_outputs, 1)).astype(np.float32), None, num_inputs)
    shape = (num_outputs, -(-num_inputs // fmt.group))
    scale, minimum = (rng.standard_normal(shape).astype(np.float16).astype(np.float32) for _ in range(2))
    if fmt.offset == "zero":
        low, high = (0, 256) if fmt.kind == "u4" else (-128, 128)
        zero = rng.choice([low, high - 1, *rng.integers(low, high, 6)], shape).astype(np.int16)
        return AffineGroups(codes, scale, None, fmt.group, zero)
    if fmt.kind == "e2m1":
        return AffineGroups(codes, scale, None, fmt.group, levels=MXFP4_DOUBLED)
    if fmt.offset == "none":
        return AffineGroups(codes, scale, np.float32(-8) * scale if fmt.kind == "u4" else None, fmt.group)
    return AffineGroups(codes, scale, minimum, fmt.group)


def random_matrix(fmt: PackedFormat, num_outputs: int, num_inputs: int, seed: int = 0) -> AffineGroups | np.ndarray:
    if fmt.group:
        return random_groups(fmt, num_outputs, num_inputs, seed)
    values = np.random.default_rng(seed).standard_normal((num_outputs, num_inputs)).astype(np.float32)
    return values if fmt.kind == "f32" else unpack(PackedMatrix("t", fmt, *values.shape, pack(values, fmt)))


def weight_of(data: bytes, fmt: PackedFormat, num_inputs: int, output: int, k: int) -> np.float32:
    """One weight, read with the words of the documentation."""
    tile = data[output // TILE * fmt.tile_bytes(num_inputs) :]
    lane = output % TILE
    group = tile[k // fmt.group_inputs * fmt.group_bytes :]

    def half(at: int) -> np.float32:
        return np.float32(np.frombuffer(group[at : at + 2], np.float16)[0])

    if fmt.kind == "f32":
        return np.frombuffer(group[lane * 4 : lane * 4 + 4], np.float32)[0]
    if fmt.kind == "f16":
        return half(lane * 2)
    if fmt.kind == "bf16":
        word = int.from_bytes(group[lane * 4 : lane * 4 + 4], "little")
        bits = word & 0xFFFF if k % 2 == 0 else word >> 16
        return np.uint32(bits << 16).view(np.float32)
    run, i = k % fmt.group // 32, k % 32 if fmt.group >= 32 else k % fmt.group
    if fmt.has_four_bits:
        byte = group[run * 256 + (i % 16) // 4 * 64 + lane * 4 + i % 4]
        q = byte & 15 if i < 16 else byte >> 4
        if fmt.kind == "e2m1":
            q = (0, 1, 2, 3, 4, 6, 8, 12)[q & 7] * (-1 if q > 7 else 1)
    else:
        byte = group[run * 512 + i // 4 * 64 + lane * 4 + i % 4]
        q = byte - 256 if byte > 127 else byte
    if fmt.per_token:
        scales_at = -(-num_inputs // 32) * 512
        return np.float32(q) * np.frombuffer(tile[scales_at + 4 * lane :][:4], np.float32)[0]
    scales_at = fmt.group * (8 if fmt.has_four_bits else 16)
    scale = half(scales_at + 2 * lane)
    if fmt.offset == "zero":
        z = group[scales_at + 32 + lane]
        return scale * np.float32(q - (z - 256 if fmt.kind == "i8" and z > 127 else z))
    product = scale * np.float32(q)
    if fmt.offset == "min":
        return product + half(scales_at + 32 + 2 * lane)
    return product + np.float32(-8) * scale if fmt.kind == "u4" else product


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 64), (19, 67), (1, 1)])
def test_layout_is_the_documented_one(fmt: PackedFormat, num_outputs: int, num_inputs: int) -> None:
    matrix = random_matrix(fmt, num_outputs, num_inputs)
    values = matrix.values() if isinstance(matrix, AffineGroups) else matrix
    data = pack(matrix, fmt)
    assert data.nbytes == fmt.matrix_bytes(num_outputs, num_inputs)
    raw = data.tobytes()
    for output in range(num_outputs):
        for k in range(num_inputs):
            assert weight_of(raw, fmt, num_inputs, output, k) == values[output, k]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(FORMATS), st.integers(1, 40), st.integers(1, 100), st.integers(0, 10**6))
def test_unpack_inverts_pack(fmt: PackedFormat, num_outputs: int, num_inputs: int, seed: int) -> None:
    matrix = random_matrix(fmt, num_outputs, num_inputs, seed)
    values = matrix.values() if isinstance(matrix, AffineGroups) else matrix
    packed = PackedMatrix("t", fmt, num_outputs, num_inputs, pack(matrix, fmt))
    assert np.array_equal(unpack(packed), values)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_padding_is_zero(fmt: PackedFormat) -> None:
    num_outputs, num_inputs = 3, fmt.group_inputs * 2
    data = pack(random_matrix(fmt, num_outputs, num_inputs), fmt)
    whole = unpack(PackedMatrix("t", fmt, TILE, num_inputs, data))
    assert not whole[num_outputs:].any()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_one_wrong_byte_is_seen(fmt: PackedFormat) -> None:
    data = pack(random_matrix(fmt, 16, 64), fmt)
    before = unpack(PackedMatrix("t", fmt, 16, 64, data))
    data[5] ^= 0x40
    after = unpack(PackedMatrix("t", fmt, 16, 64, data))
    assert np.count_nonzero(before != after) == 1


def test_pack_rounds_scales_to_f16_and_keeps_codes() -> None:
    weights = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    groups = quantize_rtn(weights, "int4")
    assert np.array_equal(
        unpack(PackedMatrix("t", CHOSEN_FORMATS["int4"], 4, 64, pack(groups, CHOSEN_FORMATS["int4"]))), groups.values()
    )


def test_pack_refuses_codes_that_do_not_fit() -> None:
    groups = random_groups(PackedFormat("i8", 32, "min"), 16, 32)
    with pytest.raises(AssertionError):
        pack(groups, PackedFormat("u4", 32, "min"))


def test_bf16_pairs_share_a_word() -> None:
    values = np.arange(1, 33, dtype=np.float32).reshape(16, 2)
    words = pack(values, PackedFormat("bf16")).view(np.uint32)
    bits = f32_to_bf16(values).astype(np.uint32)
    assert words.tolist() == (bits[:, 0] | bits[:, 1] << 16).tolist()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_unpack_puts_columns_where_the_layer_has_them(fmt: PackedFormat) -> None:
    matrix, order = random_matrix(fmt, 17, 256), np.random.default_rng(4).permutation(256).astype(np.int32)
    values = matrix.values() if isinstance(matrix, AffineGroups) else matrix
    restored = unpack(PackedMatrix("t", fmt, 17, 256, pack(matrix, fmt), order))
    for column, place in enumerate(order):
        assert np.array_equal(restored[:, place], values[:, column])
