"""Codes in words, against a packer that goes bit by bit, and what is wrong with a plane."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CheckpointError, UnsupportedError
from paceline.weights.planes import Planes, pack_rows, unpack_rows, words_of

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 130))


def packed_bit_by_bit(codes: np.ndarray, bits: int) -> np.ndarray:
    words = np.zeros((codes.shape[0], -(-codes.shape[1] * bits // 32)), np.uint32)
    for row in range(codes.shape[0]):
        for index in range(codes.shape[1]):
            for bit in range(bits):
                word, place = divmod(index * bits + bit, 32)
                words[row, word] |= np.uint32((int(codes[row, index]) >> bit & 1) << place)
    return words.view(np.int32)


@given(SHAPES, st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_words_are_those_of_a_packer_that_goes_bit_by_bit_and_come_back(
    shape: tuple[int, int], bits: int, seed: int
) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, shape, np.uint8)
    words = pack_rows(codes, bits)
    assert words.shape == (shape[0], words_of(shape[1], bits))
    assert np.array_equal(words, packed_bit_by_bit(codes, bits))
    assert np.array_equal(unpack_rows(words, bits, shape[1]), codes)


def test_words_may_be_columns_of_an_array() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (3, 40), np.uint8)
    assert np.array_equal(unpack_rows(np.asfortranarray(pack_rows(codes, 4)), 4, 40), codes)


def planes(**arrays: np.ndarray) -> Planes:
    return Planes("model.safetensors", "model.layers.0.mlp.up_proj", arrays)


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (None, "missing"),
        (np.zeros((2, 3), np.int64), r"is int64 \(2, 3\), expected int32 \(2, 3\)"),
        (np.zeros((2, 2), np.int32), r"is int32 \(2, 2\), expected int32 \(2, 3\)"),
    ],
)
def test_a_plane_that_is_missing_or_other_is_named(array: np.ndarray | None, problem: str) -> None:
    arrays = {} if array is None else {"qweight": array}
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor 'model.*up_proj.qweight': {problem}"):
        planes(**arrays).array("qweight", np.int32, (2, 3))


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (1, 2, 3)])
def test_a_plane_of_a_matrix_has_two_dimensions(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match="expected two dimensions"):
        planes(qweight=np.zeros(shape, np.int32)).matrix_shape("qweight")
    with pytest.raises(CheckpointError, match="missing"):
        planes().matrix_shape("qweight")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused(dtype: type, number: float) -> None:
    with pytest.raises(CheckpointError, match=r"up_proj.scales': a scale is infinite or not a number"):
        planes(scales=np.array([[1, number]], dtype)).scales("scales", (1, 2))


def test_a_scale_that_f16_cannot_hold_is_refused_with_the_number() -> None:
    assert planes(scales=np.float32([65519])).half_scales("scales", (1,)) == 65504
    with pytest.raises(CheckpointError, match="has the scale 65520, and f16 ends at 65504"):
        planes(scales=np.float32([1, -65520])).half_scales("scales", (2,))


def test_scales_are_floats_of_a_known_shape() -> None:
    for array in (np.zeros(3, np.int32), np.zeros(2, np.float16)):
        with pytest.raises(CheckpointError, match=r"expected floats \(3,\) or \(3, 1\)"):
            planes(scales=array).scales("scales", (3,), (3, 1))
    with pytest.raises(CheckpointError, match="missing"):
        planes().scales("scales", (3,))


def test_rounding_of_scales_stays_within_what_the_docstring_says() -> None:
    """f16 has 11 significant bits and steps of 2^-24 at the bottom; bf16 has 8, whose last is 2^-24 at 2^-17."""
    numbers = np.random.default_rng(1).uniform(-1, 1, 4096).astype(np.float32)
    numbers *= np.exp2(np.random.default_rng(2).integers(-30, 15, 4096)).astype(np.float32)
    error = np.abs(planes(scales=numbers).half_scales("scales", (4096,)).astype(np.float32) - numbers)
    size = np.abs(numbers)
    assert (error <= np.where(size >= 2.0**-14, size * np.float32(2.0**-11), np.float32(2.0**-25))).all()
    brain = (numbers.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    large = brain[np.abs(brain) >= 2.0**-17]
    assert np.array_equal(planes(scales=large).half_scales("scales", large.shape).astype(np.float32), large)


def test_groups_are_of_equal_size() -> None:
    assert planes().num_groups(96, 32) == 3
    assert planes().num_groups(96, None) == 1
    with pytest.raises(UnsupportedError, match="up_proj has 96 inputs in groups of 64, of which the last is smaller"):
        planes().num_groups(96, 64)


def test_the_order_of_inputs_is_that_of_their_groups() -> None:
    def order(*groups: int) -> list[int] | None:
        found = planes(g_idx=np.int32(groups)).order("g_idx", len(groups), 2)
        return None if found is None else found.tolist()

    assert planes().order("g_idx", 4, 2) is None
    assert order(0, 0, 1, 1) is None
    assert order(1, 0, 1, 0) == [1, 3, 0, 2]
    with pytest.raises(UnsupportedError, match=r"up_proj.g_idx' makes groups of 1 to 3 inputs"):
        order(0, 0, 0, 1)
    with pytest.raises(UnsupportedError, match=r"groups of 0 to 4 inputs"):
        order(0, 0, 0, 0)
    for groups in ((0, 0, 1, 2), (-1, 0, 1, 1)):
        with pytest.raises(CheckpointError, match=r"up_proj.g_idx': names groups from"):
            order(*groups)
