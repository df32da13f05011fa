"""The planes of compressed-tensors: against a dequantiser written from the format's definition; round trips; errors.

``tests/golden/test_compressed_tensors.py`` has the library's own files.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantized_matrices import assert_equal, matrices, random_matrix

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights import compressed_tensors
from paceline.weights.compressed_tensors import Int8Layout, PackedLayout
from paceline.weights.planes import Planes
from paceline.weights.quantized_matrix import QuantizedMatrix

OUTPUTS = st.integers(1, 40)


def planes_of(arrays: dict[str, np.ndarray], **changed: np.ndarray | None) -> Planes:
    arrays = arrays | changed
    return Planes("model.safetensors", "layer", {name: array for name, array in arrays.items() if array is not None})


def packed_planes(matrix: QuantizedMatrix, **changed: np.ndarray | None) -> Planes:
    return planes_of(compressed_tensors.pack(matrix), **changed)


def int8_planes(matrix: QuantizedMatrix, **changed: np.ndarray | None) -> Planes:
    return planes_of(compressed_tensors.pack_int8(matrix), **changed)


def packed_layout(matrix: QuantizedMatrix) -> PackedLayout:
    return PackedLayout(matrix.bits, matrix.group, matrix.is_symmetric)


def int8_layout(matrix: QuantizedMatrix) -> Int8Layout:
    return Int8Layout(matrix.bits, matrix.group, matrix.is_symmetric, matrix.per_token)


def code_at(words: np.ndarray, index: int, bits: int) -> int:
    each = (index * bits + bit for bit in range(bits))
    return sum((int(np.uint32(words[at // 32])) >> at % 32 & 1) << bit for bit, at in enumerate(each))


def dequantized(arrays: dict[str, np.ndarray], bits: int) -> np.ndarray:
    num_outputs, num_inputs = arrays["weight_shape"]
    group = num_inputs // arrays["weight_scale"].shape[1]
    g_idx = arrays.get("weight_g_idx", np.arange(num_inputs) // group)
    zeros = arrays.get("weight_zero_point")
    weights = np.empty((num_outputs, num_inputs), np.float32)
    for n in range(num_outputs):
        for k in range(num_inputs):
            middle = 1 << (bits - 1)
            value = code_at(arrays["weight_packed"][n], k, bits) - middle
            zero = 0 if zeros is None else code_at(zeros[:, g_idx[k]], n, bits) - middle
            weights[n, k] = np.float32(arrays["weight_scale"][n, g_idx[k]]) * np.float32(value - zero)
    return weights


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
def test_values_are_those_of_the_definition(bits: int, symmetric: bool, shuffled: bool) -> None:
    matrix = random_matrix(bits, 33, 2, bits=bits, symmetric=symmetric, shuffled=shuffled)
    arrays = compressed_tensors.pack(matrix)
    assert ("weight_zero_point" in arrays) is not symmetric
    assert np.array_equal(dequantized(arrays, bits), matrix.values())
    assert np.array_equal(packed_layout(matrix).unpack(planes_of(arrays)).values(), matrix.values())


@given(matrices(st.integers(2, 8), OUTPUTS, shuffled=True))
def test_packed_planes_come_back(matrix: QuantizedMatrix) -> None:
    layout, planes = packed_layout(matrix), packed_planes(matrix)
    assert layout.shape(planes) == matrix.codes.shape
    assert np.array_equal(layout.zero(planes), matrix.zero)
    assert_equal(layout.unpack(planes), matrix)


@given(matrices(st.integers(2, 8), OUTPUTS))
def test_int8_planes_come_back(matrix: QuantizedMatrix) -> None:
    layout, planes = int8_layout(matrix), int8_planes(matrix)
    assert layout.shape(planes) == matrix.codes.shape
    assert np.array_equal(layout.zero(planes), matrix.zero)
    assert_equal(layout.unpack(planes), matrix)


@given(st.integers(0, 2**32 - 1), OUTPUTS, st.sampled_from([32, 96, 128]))
def test_weights_for_int8_activations_keep_f32_scales(seed: int, num_outputs: int, num_inputs: int) -> None:
    matrix = random_matrix(seed, num_outputs, 1, bits=8, group=num_inputs, symmetric=True, per_token=True)
    arrays = compressed_tensors.pack_int8(matrix)
    assert arrays["weight"].dtype == np.int8
    assert arrays["weight_scale"].dtype == np.float32
    assert_equal(Int8Layout(8, None, True, True).unpack(planes_of(arrays)), matrix)


@pytest.mark.parametrize("shape", [(24, 1), (24,), (1,), ()])
def test_one_scale_an_output_or_a_tensor(shape: tuple[int, ...]) -> None:
    matrix = random_matrix(3, 24, 1, bits=8, group=96, symmetric=True)
    scale = np.linspace(0.5, 2, 24 if 24 in shape else 1).astype(np.float16).reshape(shape)
    expected = np.broadcast_to(scale.reshape(-1, 1), (24, 1)) * (matrix.codes.astype(np.float32) - 128)
    for layout, planes in (
        (PackedLayout(8, None, True), packed_planes(matrix, weight_scale=scale)),
        (Int8Layout(8, None, True, False), int8_planes(matrix, weight_scale=scale)),
    ):
        assert np.array_equal(layout.unpack(planes).values(), expected)


def test_zero_points_may_lie_unpacked_and_those_of_a_symmetric_matrix_be_0() -> None:
    matrix = random_matrix(4, 16, 2)
    unpacked = (matrix.zero.astype(np.int16) - 8).astype(np.int8)
    assert_equal(packed_layout(matrix).unpack(packed_planes(matrix, weight_zero_point=unpacked)), matrix)
    middle = random_matrix(4, 16, 2, symmetric=True)
    zeros = np.zeros((16, 2), np.int8)
    assert_equal(PackedLayout(4, 32, True).unpack(packed_planes(middle, weight_zero_point=zeros)), middle)
    with pytest.raises(CheckpointError, match="zero points other than 0 in a model that says it is symmetric"):
        PackedLayout(4, 32, True).unpack(packed_planes(matrix, weight_zero_point=unpacked))
    with pytest.raises(CheckpointError, match=r"weight_zero_point': has values from 8 to 8, not 4 bits"):
        PackedLayout(4, 32, False).unpack(packed_planes(matrix, weight_zero_point=zeros + np.int8(8)))


def test_int8_values_beyond_their_bits_are_refused() -> None:
    matrix = random_matrix(4, 16, 2, symmetric=True)
    weight = compressed_tensors.pack_int8(matrix)["weight"].copy()
    weight[3, 3] = -9
    with pytest.raises(CheckpointError, match=r"tensor 'layer.weight': has values from -9 to 7, not 4 bits"):
        Int8Layout(4, 32, True, False).unpack(int8_planes(matrix, weight=weight))


@pytest.mark.parametrize("name", PackedLayout(4, 32, False, ordered=True).required)
def test_a_packed_plane_that_is_truncated_or_missing_is_named(name: str) -> None:
    matrix = random_matrix(0, 16, 2, shuffled=True)
    cut = compressed_tensors.pack(matrix)[name][:-1]
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor 'layer.weight_"):
        packed_layout(matrix).unpack(packed_planes(matrix, **{name: cut}))
    if name != "weight_g_idx":
        with pytest.raises(CheckpointError, match=f"tensor 'layer.{name}': missing"):
            packed_layout(matrix).unpack(packed_planes(matrix, **{name: None}))


@pytest.mark.parametrize("name", Int8Layout(8, 32, False, False).required)
def test_an_int8_plane_that_is_truncated_or_missing_is_named(name: str) -> None:
    matrix = random_matrix(0, 16, 2, bits=8)
    cut = compressed_tensors.pack_int8(matrix)[name][:-1]
    with pytest.raises(CheckpointError, match=r"model.safetensors: tensor 'layer.weight_"):
        int8_layout(matrix).unpack(int8_planes(matrix, **{name: cut}))
    with pytest.raises(CheckpointError, match=f"tensor 'layer.{name}': missing"):
        int8_layout(matrix).unpack(int8_planes(matrix, **{name: None}))


@pytest.mark.parametrize("shape", [(16, 65), (16, -64), (17, 64), (0, 0), (16, 2**62)])
def test_a_shape_that_the_words_do_not_have_is_refused(shape: tuple[int, int]) -> None:
    matrix = random_matrix(0, 16, 2)
    with pytest.raises(CheckpointError, match=r"weight_shape': is .* where weight_packed has 16 x 8 words"):
        packed_layout(matrix).shape(packed_planes(matrix, weight_shape=np.array(shape)))


def test_unequal_groups_are_refused() -> None:
    matrix = random_matrix(0, 16, 3)
    for layout, planes in (
        (PackedLayout(4, 64, False), packed_planes(matrix)),
        (Int8Layout(4, 64, False, False), int8_planes(matrix)),
    ):
        with pytest.raises(UnsupportedError, match="layer has 96 inputs in groups of 64, of which the last is smaller"):
            layout.unpack(planes)


@pytest.mark.parametrize("number", [np.inf, np.nan, np.float32(1e6)])
def test_scales_that_cannot_be_are_refused(number: float) -> None:
    matrix = random_matrix(0, 16, 2)
    scale = matrix.scale.astype(np.float32)
    scale[3, 1] = number
    for layout, planes in (
        (packed_layout(matrix), packed_planes(matrix, weight_scale=scale)),
        (int8_layout(matrix), int8_planes(matrix, weight_scale=scale)),
    ):
        with pytest.raises(CheckpointError, match=r"tensor 'layer.weight_scale': .*(finite|f16)"):
            layout.unpack(planes)
