"""AWQ's planes: against a dequantiser written from the format's definition; round trips; errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantized_matrices import assert_equal, matrices, random_matrix

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights import awq
from paceline.weights.awq import AWQLayout
from paceline.weights.planes import Planes
from paceline.weights.quantized_matrix import QuantizedMatrix


def planes_of(matrix: QuantizedMatrix, **changed: np.ndarray | None) -> Planes:
    arrays = awq.pack(matrix) | changed
    return Planes("model.safetensors", "layer", {name: array for name, array in arrays.items() if array is not None})


def code_at(words: np.ndarray, output: int) -> int:
    """Output ``output`` of a row of words: its nibble of the word is where the format's order has it."""
    nibble = (0, 4, 1, 5, 2, 6, 3, 7)[output % 8]
    return int(np.uint32(words[output // 8])) >> (4 * nibble) & 15


def dequantized(arrays: dict[str, np.ndarray], group: int) -> np.ndarray:
    num_inputs, num_outputs = arrays["qweight"].shape[0], arrays["scales"].shape[1]
    weights = np.empty((num_outputs, num_inputs), np.float32)
    for k in range(num_inputs):
        for n in range(num_outputs):
            centred = code_at(arrays["qweight"][k], n) - code_at(arrays["qzeros"][k // group], n)
            weights[n, k] = np.float32(arrays["scales"][k // group, n]) * np.float32(centred)
    return weights


def test_values_are_those_of_the_definition() -> None:
    matrix = random_matrix(1, 24, 3)
    assert np.array_equal(dequantized(awq.pack(matrix), 32), matrix.values())
    assert np.array_equal(AWQLayout(32).unpack(planes_of(matrix)).values(), matrix.values())


def test_nibbles_are_in_the_order_of_the_format() -> None:
    codes = np.arange(8, dtype=np.uint8)[:, None].repeat(32, axis=1)
    matrix = QuantizedMatrix(codes, np.ones((8, 1), np.float16), np.zeros((8, 1), np.uint8), 4, 32)
    assert (awq.pack(matrix)["qweight"].view(np.uint32) == 0x75316420).all()


@given(matrices(st.just(4), st.sampled_from([8, 16, 40])))
def test_planes_come_back(matrix: QuantizedMatrix) -> None:
    layout, planes = AWQLayout(matrix.group), planes_of(matrix)
    assert layout.shape(planes) == matrix.codes.shape
    assert np.array_equal(layout.zero(planes), matrix.zero)
    assert_equal(layout.unpack(planes), matrix)


def test_one_group_of_all_inputs() -> None:
    matrix = random_matrix(0, 16, 1, group=96)
    assert_equal(AWQLayout(None).unpack(planes_of(matrix)), matrix)


@pytest.mark.parametrize("name", AWQLayout.required)
def test_a_plane_that_is_truncated_or_missing_is_named(name: str) -> None:
    matrix = random_matrix(0, 16, 2)
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor 'layer.{name}': missing"):
        AWQLayout(32).unpack(planes_of(matrix, **{name: None}))
    with pytest.raises((CheckpointError, UnsupportedError), match="layer"):
        AWQLayout(32).unpack(planes_of(matrix, **{name: awq.pack(matrix)[name][:-1]}))


def test_a_smaller_last_group_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="layer has 96 inputs in groups of 64, of which the last is smaller"):
        AWQLayout(64).unpack(planes_of(random_matrix(0, 16, 3)))


@pytest.mark.parametrize("number", [np.inf, np.nan, np.float32(1e6)])
def test_scales_that_cannot_be_are_refused(number: float) -> None:
    matrix = random_matrix(0, 16, 2)
    scales = matrix.scale.T.astype(np.float32)
    scales[1, 3] = number
    with pytest.raises(CheckpointError, match=r"tensor 'layer.scales': .*(finite|f16)"):
        AWQLayout(32).unpack(planes_of(matrix, scales=scales))
