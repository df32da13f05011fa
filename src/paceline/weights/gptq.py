"""GPTQ's planes and a QuantizedMatrix, both ways.

Source: the layout of AutoGPTQ (v1) and GPTQModel (v2, ``checkpoint_format: gptq_v2``), from their code.

Notation: N outputs, K inputs, G inputs a group, b bits; W = s (q - z).

    qweight [K b / 32, N] i32          q, packed along the inputs
    qzeros  [K / G, ceil(N b / 32)]    z (v2) or z - 1 (v1), packed along the outputs
    scales  [K / G, N]                 s
    g_idx   [K] i32                    the group of each input; absent means consecutive groups

Version 1 stores z - 1 by subtracting 1 from every code of a whole word, so z = 0 borrows from its neighbour (0x11111111
for 4 bits): it is added back to the whole word, and code by code would be wrong. With 3 bits, where codes reach over
the end of a word, both directions go code by code, modulo 8, as GPTQModel does.

Departures: inputs are put in the order of their groups (stable) and keep it, ``QuantizedMatrix.order``, when ``g_idx``
is not consecutive. Scales are kept as f16, see ``Planes.half_scales``: exact for what GPTQModel writes.

Checked by: tests/unit/test_gptq_planes.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.weights.planes import Codes, Planes, Words, pack_rows, unpack_rows, words_of
from paceline.weights.quantized_matrix import QuantizedMatrix

BITS = (2, 3, 4, 8)
WORD_OFFSETS = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""1 in every code of a word."""


@dataclass(frozen=True)
class GPTQLayout:
    """How a module is stored: bits of a code, inputs a group (None: all of them), version, and whether groups need not
    be consecutive, so that ``g_idx`` must be there.
    """

    bits: int
    group: int | None
    version: Literal[1, 2]
    ordered: bool = False
    per_token: ClassVar[bool] = False

    @property
    def required(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales", *(("g_idx",) if self.ordered else ()))

    @property
    def optional(self) -> tuple[str, ...]:
        return () if self.ordered else ("g_idx",)

    def shape(self, planes: Planes) -> tuple[int, int]:
        num_words, num_outputs = planes.matrix_shape("qweight")
        if num_words * 32 % self.bits:
            raise planes.error("qweight", f"has {num_words} words an output, no whole number of {self.bits}-bit codes")
        return num_outputs, num_words * 32 // self.bits

    def unpack(self, planes: Planes) -> QuantizedMatrix:
        num_outputs, num_inputs = self.shape(planes)
        words = planes.array("qweight", np.int32, (words_of(num_inputs, self.bits), num_outputs))
        codes = unpack_rows(words.T, self.bits, num_inputs)
        num_groups = self._num_groups(planes)
        scale = planes.half_scales("scales", (num_groups, num_outputs))
        order = planes.order("g_idx", num_inputs, num_groups)
        if order is not None:
            codes = codes[:, order]
        return QuantizedMatrix(
            codes,
            np.ascontiguousarray(scale.T),
            self.zero(planes),
            bits=self.bits,
            group=num_inputs // num_groups,
            order=order,
        )

    def _num_groups(self, planes: Planes) -> int:
        return planes.num_groups(self.shape(planes)[1], self.group)

    def zero(self, planes: Planes) -> Codes:
        num_outputs, _ = self.shape(planes)
        shape = (self._num_groups(planes), words_of(num_outputs, self.bits))
        stored: Words = planes.array("qzeros", np.int32, shape)
        if self.version == 1 and self.bits in WORD_OFFSETS:
            stored = (stored.view(np.uint32) + np.uint32(WORD_OFFSETS[self.bits])).view(np.int32)
        zero = unpack_rows(stored, self.bits, num_outputs)
        if self.version == 1 and self.bits not in WORD_OFFSETS:
            zero = (zero + np.uint8(1)) & np.uint8((1 << self.bits) - 1)
        return np.ascontiguousarray(zero.T)


def pack(matrix: QuantizedMatrix, *, version: Literal[1, 2] = 2) -> dict[str, NDArray[Any]]:
    """The planes of a matrix of 2, 3, 4 or 8 bits whose inputs are a multiple of 32 and whose scales are f16."""
    num_outputs, num_inputs = matrix.codes.shape
    assert matrix.bits in BITS, matrix.bits
    assert num_inputs % 32 == 0, num_inputs
    assert not matrix.per_token, "GPTQ has no int8 activations"
    codes = matrix.codes
    g_idx = np.arange(num_inputs, dtype=np.int32) // np.int32(matrix.group)
    if matrix.order is not None:
        place = np.argsort(matrix.order)
        codes, g_idx = codes[:, place], g_idx[place]
    zero = matrix.zero.T
    if version == 1 and matrix.bits not in WORD_OFFSETS:
        zero = (zero - np.uint8(1)) & np.uint8((1 << matrix.bits) - 1)
    words = pack_rows(np.ascontiguousarray(zero), matrix.bits)
    if version == 1 and matrix.bits in WORD_OFFSETS:
        words = (words.view(np.uint32) - np.uint32(WORD_OFFSETS[matrix.bits])).view(np.int32)
    assert words.shape == (num_inputs // matrix.group, words_of(num_outputs, matrix.bits))
    return {
        "qweight": np.ascontiguousarray(pack_rows(codes, matrix.bits).T),
        "qzeros": words,
        "scales": np.ascontiguousarray(matrix.scale.T),
        "g_idx": g_idx,
    }
