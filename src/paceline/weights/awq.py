"""AWQ's planes (version "gemm") and a QuantizedMatrix, both ways.

Source: the layout of AutoAWQ's ``WQLinear_GEMM``, from its code.

Notation: N outputs, K inputs, G inputs a group; W = s (q - z), 4 bits. A word holds outputs 8 c ... 8 c + 7, and its
nibbles from the least significant one hold the outputs 0, 2, 4, 6, 1, 3, 5, 7 of these.

    qweight [K, N / 8] i32        q
    qzeros  [K / G, N / 8] i32    z, as it is
    scales  [K / G, N]            s

Departures: scales are kept as f16, see ``Planes.half_scales``: exact for what AutoAWQ writes.

Checked by: tests/unit/test_awq_planes.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.weights.planes import Codes, Planes, Words, pack_rows, unpack_rows
from paceline.weights.quantized_matrix import QuantizedMatrix

BITS = 4
WORD_CODES = 8
NIBBLE_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of a word's eight, in each nibble from the least significant one."""


@dataclass(frozen=True)
class AWQLayout:
    """How a module is stored: inputs a group (None: all of them)."""

    group: int | None
    bits: ClassVar[int] = BITS
    per_token: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    optional: ClassVar[tuple[str, ...]] = ()

    def shape(self, planes: Planes) -> tuple[int, int]:
        num_inputs, num_words = planes.matrix_shape("qweight")
        return WORD_CODES * num_words, num_inputs

    def unpack(self, planes: Planes) -> QuantizedMatrix:
        num_outputs, num_inputs = self.shape(planes)
        words = planes.array("qweight", np.int32, (num_inputs, num_outputs // WORD_CODES))
        num_groups = self._num_groups(planes)
        scale = planes.half_scales("scales", (num_groups, num_outputs))
        return QuantizedMatrix(
            _by_output(words),
            np.ascontiguousarray(scale.T),
            self.zero(planes),
            bits=BITS,
            group=num_inputs // num_groups,
        )

    def _num_groups(self, planes: Planes) -> int:
        return planes.num_groups(self.shape(planes)[1], self.group)

    def zero(self, planes: Planes) -> Codes:
        num_outputs, _ = self.shape(planes)
        return _by_output(planes.array("qzeros", np.int32, (self._num_groups(planes), num_outputs // WORD_CODES)))


def pack(matrix: QuantizedMatrix) -> dict[str, NDArray[Any]]:
    """The planes of a matrix of 4 bits with consecutive groups, f16 scales, and a multiple of 8 outputs."""
    assert matrix.bits == BITS, matrix.bits
    assert matrix.codes.shape[0] % WORD_CODES == 0, matrix.codes.shape
    assert matrix.order is None, "AWQ has no order of inputs"
    assert not matrix.per_token, "AWQ has no int8 activations"
    return {
        "qweight": _by_word(matrix.codes),
        "qzeros": _by_word(matrix.zero),
        "scales": np.ascontiguousarray(matrix.scale.T),
    }


def _by_output(words: Words) -> Codes:
    """Codes [N, rows] of words [rows, N / 8]."""
    num_rows, num_words = words.shape
    codes = unpack_rows(words, BITS, WORD_CODES * num_words).reshape(num_rows, num_words, WORD_CODES)
    in_order = codes[:, :, np.argsort(NIBBLE_OUTPUTS)]
    return np.ascontiguousarray(in_order.reshape(num_rows, -1).T)


def _by_word(codes: Codes) -> Words:
    """Words [rows, N / 8] of codes [N, rows]."""
    num_outputs, num_rows = codes.shape
    nibbles = codes.T.reshape(num_rows, num_outputs // WORD_CODES, WORD_CODES)[:, :, NIBBLE_OUTPUTS]
    return pack_rows(nibbles.reshape(num_rows, num_outputs), BITS)
