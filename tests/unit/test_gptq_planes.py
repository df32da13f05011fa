"""GPTQ's planes: against a dequantiser written from the format's definition, word by word; round trips; errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quantized_matrices import assert_equal, matrices, random_matrix

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights import gptq
from paceline.weights.gptq import GPTQLayout
from paceline.weights.planes import Planes
from paceline.weights.quantized_matrix import QuantizedMatrix

BITS = st.sampled_from(gptq.BITS)
VERSIONS = st.sampled_from((1, 2))


def planes_of(matrix: QuantizedMatrix, version: Literal[1, 2] = 2, **changed: np.ndarray | None) -> Planes:
    arrays = gptq.pack(matrix, version=version) | changed
    return Planes("model.safetensors", "layer", {name: array for name, array in arrays.items() if array is not None})


def layout_of(matrix: QuantizedMatrix, version: Literal[1, 2] = 2) -> GPTQLayout:
    return GPTQLayout(matrix.bits, matrix.group, version)


def code_at(words: np.ndarray, index: int, bits: int) -> int:
    """Code ``index`` of a row of words, bit by bit."""
    each = (index * bits + bit for bit in range(bits))
    return sum((int(np.uint32(words[at // 32])) >> at % 32 & 1) << bit for bit, at in enumerate(each))


def dequantized(arrays: dict[str, np.ndarray], bits: int, version: int) -> np.ndarray:
    """W [N, K]: v1 files have 1 taken from each code of a word, all at once."""
    num_inputs, num_outputs = len(arrays["g_idx"]), arrays["scales"].shape[1]
    zeros = arrays["qzeros"].astype(np.int64) & 0xFFFFFFFF
    if version == 1 and bits != 3:
        zeros = (zeros + sum(1 << at for at in range(0, 32, bits))) & 0xFFFFFFFF
    add = 1 if version == 1 and bits == 3 else 0
    weights = np.empty((num_outputs, num_inputs), np.float32)
    for k in range(num_inputs):
        group = arrays["g_idx"][k]
        for n in range(num_outputs):
            zero = (code_at(zeros[group], n, bits) + add) % (1 << bits)
            code = code_at(arrays["qweight"][:, n], k, bits)
            weights[n, k] = np.float32(arrays["scales"][group, n]) * np.float32(code - zero)
    return weights


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", gptq.BITS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_values_are_those_of_the_definition(bits: int, version: Literal[1, 2], shuffled: bool) -> None:
    matrix = random_matrix(bits, 32, 2, bits=bits, shuffled=shuffled)
    assert (matrix.zero == 0).any(), "the case in which words and codes differ"
    arrays = gptq.pack(matrix, version=version)
    assert np.array_equal(dequantized(arrays, bits, version), matrix.values())
    assert np.array_equal(layout_of(matrix, version).unpack(planes_of(matrix, version)).values(), matrix.values())


@given(matrices(BITS, st.integers(1, 40), shuffled=True), VERSIONS)
def test_planes_come_back(matrix: QuantizedMatrix, version: Literal[1, 2]) -> None:
    layout, planes = layout_of(matrix, version), planes_of(matrix, version)
    assert layout.shape(planes) == matrix.codes.shape
    assert np.array_equal(layout.zero(planes), matrix.zero)
    assert_equal(layout.unpack(planes), matrix)


def test_shapes_are_those_of_the_definition() -> None:
    arrays = gptq.pack(random_matrix(0, 32, 3, bits=3, group=64))
    shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    assert shapes == {
        "qweight": ("int32", (18, 32)),
        "qzeros": ("int32", (3, 3)),
        "scales": ("float16", (3, 32)),
        "g_idx": ("int32", (192,)),
    }


def test_a_zero_point_of_0_borrows_from_its_neighbour_in_version_1() -> None:
    matrix = random_matrix(0, 8, 1)
    matrix = replace(matrix, zero=np.uint8([[0], [5], [5], [5], [5], [5], [5], [5]]))
    assert gptq.pack(matrix, version=1)["qzeros"].view(np.uint32)[0, 0] == 0x5555_5550 - 0x1111_1111
    assert_equal(layout_of(matrix, 1).unpack(planes_of(matrix, 1)), matrix)


def test_one_group_of_all_inputs_and_no_g_idx() -> None:
    matrix = random_matrix(0, 16, 1, group=96)
    assert_equal(GPTQLayout(4, None, 2).unpack(planes_of(matrix, g_idx=None)), matrix)


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales", "g_idx"])
def test_a_truncated_plane_is_refused(name: str) -> None:
    matrix = random_matrix(0, 16, 2)
    cut = gptq.pack(matrix)[name][:-1]
    with pytest.raises((CheckpointError, UnsupportedError), match="layer"):
        layout_of(matrix).unpack(planes_of(matrix, **{name: cut}))


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
def test_a_missing_plane_is_named(name: str) -> None:
    matrix = random_matrix(0, 16, 2)
    with pytest.raises(CheckpointError, match=f"tensor 'layer.{name}': missing"):
        layout_of(matrix).unpack(planes_of(matrix, **{name: None}))


def test_what_is_no_whole_number_of_codes_is_refused() -> None:
    matrix = random_matrix(0, 16, 1, bits=4)
    with pytest.raises(CheckpointError, match="has 4 words an output, no whole number of 3-bit codes"):
        GPTQLayout(3, 32, 2).shape(planes_of(matrix))


def test_unequal_groups_are_refused() -> None:
    matrix = random_matrix(0, 16, 3, group=32)
    with pytest.raises(UnsupportedError, match="layer has 96 inputs in groups of 64, of which the last is smaller"):
        GPTQLayout(4, 64, 2).unpack(planes_of(matrix))
    uneven = np.zeros(96, np.int32)
    uneven[-1:], uneven[-2:-1] = 2, 1
    with pytest.raises(UnsupportedError, match=r"layer.g_idx' makes groups of 1 to 94 inputs"):
        layout_of(matrix).unpack(planes_of(matrix, g_idx=uneven))


@pytest.mark.parametrize("number", [np.inf, np.nan, np.float32(1e6)])
def test_scales_that_cannot_be_are_refused(number: float) -> None:
    matrix = random_matrix(0, 16, 2)
    scales = matrix.scale.T.astype(np.float32)
    scales[1, 3] = number
    with pytest.raises(CheckpointError, match=r"tensor 'layer.scales': .*(finite|f16)"):
        layout_of(matrix).unpack(planes_of(matrix, scales=scales))
