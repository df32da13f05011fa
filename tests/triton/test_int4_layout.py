"""4-bit weights as they lie in a GPU's memory hold the values of their files, exactly."""

from __future__ import annotations

import numpy as np
import pytest
from int4_matrices import gguf, quantized

from paceline.errors import UnsupportedError
from paceline.executors.triton.int4_layout import pack_affine, pack_quantized, pack_tensor
from paceline.weights.blocks import AffineGroups, dequantize
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import RawTensor


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 128), (3, 384), (40, 256)])
@pytest.mark.parametrize(("bits", "zero"), [(4, 8), (4, 0), (4, None), (3, None), (2, 2)])
def test_quantised_matrices_keep_their_values(
    outputs: int, inputs: int, group: int, bits: int, zero: int | None
) -> None:
    matrix = quantized(outputs, inputs, group, bits=bits, zero=zero)
    packed = pack_quantized(matrix, "w")
    assert np.array_equal(packed.values(), matrix.values())
    assert packed.offset_kind == ("middle" if (matrix.zero == 8).all() else "zero")


@pytest.mark.parametrize(("kind", "offset"), [("Q4_0", "middle"), ("Q4_1", "minimum"), ("Q4_K", "minimum")])
@pytest.mark.parametrize("inputs", [256, 768])
def test_gguf_blocks_keep_their_values(kind: str, offset: str, inputs: int) -> None:
    raw = gguf(kind, 5, inputs)
    packed = pack_tensor(raw)
    assert packed.offset_kind == offset
    assert packed.group == 32
    assert np.array_equal(packed.values(), dequantize(raw))


def test_scales_are_f16_only_where_that_is_exact() -> None:
    assert pack_tensor(gguf("Q4_1", 2, 256)).scale.dtype == np.float16
    assert pack_tensor(gguf("Q4_K", 2, 256)).scale.dtype == np.float32


def test_inputs_that_fill_no_block() -> None:
    matrix = quantized(4, 160, 32)
    packed = pack_quantized(matrix, "w")
    assert packed.codes.shape == (2, 4, 16)
    assert packed.scale.shape == (8, 4)
    assert np.array_equal(packed.values(), matrix.values())


def test_where_a_code_lies() -> None:
    codes = np.zeros((3, 256), np.uint8)
    codes[2, 128 + 16 * 5 + 7] = 11
    packed = pack_quantized(
        QuantizedMatrix(codes, np.ones((3, 2), np.float16), np.zeros((3, 2), np.uint8), 4, 128), "w"
    )
    assert packed.codes[1, 2, 7] == 11 << 20
    assert np.count_nonzero(packed.codes) == 1


def test_the_order_of_inputs_is_kept() -> None:
    matrix = quantized(2, 128, 64)
    order = np.random.default_rng(0).permutation(128).astype(np.int32)
    ordered = QuantizedMatrix(matrix.codes, matrix.scale, matrix.zero, 4, 64, order=order)
    packed = pack_quantized(ordered, "w")
    assert packed.order is not None
    restored = np.empty((2, 128), np.float32)
    restored[:, packed.order] = packed.values()
    assert np.array_equal(restored, ordered.values())


def test_what_has_no_4_bit_codes_is_refused() -> None:
    eight = RawTensor("w", (2, 32), "Q8_0", np.full(2 * 34, 77, np.uint8))
    with pytest.raises(UnsupportedError, match="codes from"):
        pack_tensor(eight)
    with pytest.raises(UnsupportedError, match="codes of 8 bits"):
        pack_quantized(quantized(2, 32, 32, bits=8), "w")
    with pytest.raises(UnsupportedError, match="no multiple of 32"):
        pack_quantized(quantized(2, 96, 48), "w")
    with pytest.raises(UnsupportedError, match="groups of 16"):
        pack_affine(AffineGroups(np.ones((1, 32), np.int8), np.ones((1, 2), np.float32), None, 16), "w")
    with pytest.raises(UnsupportedError, match="looked up"):
        pack_tensor(RawTensor("w", (2, 32), "MXFP4", np.full(2 * 17, 100, np.uint8)))
    with pytest.raises(UnsupportedError, match="BF16 has no"):
        pack_tensor(RawTensor("w", (2, 32), "BF16", np.zeros(128, np.uint8)))
