"""The planes of compressed-tensors' integer formats and a QuantizedMatrix, both ways.

Source: compressed-tensors (vLLM project), formats ``pack-quantized`` and ``int-quantized``, from its code.

Notation: N outputs, K inputs, G inputs a group, b bits, c = 2^(b-1); the file's weights are v = q - c, in -c ... c - 1,
and its zero points u = z - c, so W = s (v - u) = s (q - z). Symmetric means u = 0 and no plane for it.

    pack-quantized  weight_packed     [N, ceil(K b / 32)] i32    q, packed along the inputs
                    weight_scale      [N, K / G]                 s
                    weight_zero_point [ceil(N b / 32), K / G]    z, packed along the outputs; or [N, K / G] i8: u
                    weight_shape      [2] i64                    N, K
                    weight_g_idx      [K] i32                    the group of each input; absent: consecutive groups
    int-quantized   weight            [N, K] i8                  v
                    weight_scale      [N, K / G]                 s
                    weight_zero_point [N, K / G] i8              u

One scale an output (strategy channel) is K / G = 1, and may come as [N]; one scale a tensor is [1] or a number.

Departures: weights that meet int8 activations (W8A8, ``per_token``) keep their scales in f32, exact whatever they are.
Others keep them in f16, see ``Planes.half_scales``; a weight is off by at most 2^b times what its scale is.

Checked by: tests/unit/test_compressed_tensors_planes.py, tests/golden/test_compressed_tensors.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.weights.planes import Codes, Planes, pack_rows, unpack_rows, words_of
from paceline.weights.quantized_matrix import QuantizedMatrix


@dataclass(frozen=True)
class PackedLayout:
    """How a module is stored as pack-quantized: bits of a code, inputs a group (None: all), symmetric or not, and
    whether groups need not be consecutive, so that ``weight_g_idx`` must be there.
    """

    bits: int
    group: int | None
    symmetric: bool
    ordered: bool = False
    per_token: ClassVar[bool] = False

    @property
    def required(self) -> tuple[str, ...]:
        zero_point = () if self.symmetric else ("weight_zero_point",)
        g_idx = ("weight_g_idx",) if self.ordered else ()
        return ("weight_packed", "weight_scale", "weight_shape", *zero_point, *g_idx)

    @property
    def optional(self) -> tuple[str, ...]:
        return tuple(name for name in ("weight_zero_point", "weight_g_idx") if name not in self.required)

    def shape(self, planes: Planes) -> tuple[int, int]:
        shape = planes.array("weight_shape", np.int64, (2,))
        num_outputs, num_inputs = int(shape[0]), int(shape[1])
        packed = planes.matrix_shape("weight_packed")
        if num_inputs < 1 or packed != (num_outputs, words_of(num_inputs, self.bits)):
            problem = f"is {num_outputs} x {num_inputs} where weight_packed has {packed[0]} x {packed[1]} words"
            raise planes.error("weight_shape", problem)
        return num_outputs, num_inputs

    def unpack(self, planes: Planes) -> QuantizedMatrix:
        num_outputs, num_inputs = self.shape(planes)
        num_groups = planes.num_groups(num_inputs, self.group)
        words = planes.array("weight_packed", np.int32, (num_outputs, words_of(num_inputs, self.bits)))
        codes = unpack_rows(words, self.bits, num_inputs)
        scale = _each_output(planes.half_scales("weight_scale", *_scale_shapes(num_outputs, num_groups)), num_outputs)
        order = planes.order("weight_g_idx", num_inputs, num_groups)
        return QuantizedMatrix(
            codes if order is None else codes[:, order],
            scale,
            self.zero(planes),
            bits=self.bits,
            group=num_inputs // num_groups,
            order=order,
        )

    def zero(self, planes: Planes) -> Codes:
        num_outputs, num_inputs = self.shape(planes)
        num_groups = planes.num_groups(num_inputs, self.group)
        stored = planes.arrays.get("weight_zero_point")
        if self.symmetric or (stored is not None and stored.dtype == np.int8):
            return _zero_points(planes, num_outputs, num_groups, self.bits, symmetric=self.symmetric)
        words = planes.array("weight_zero_point", np.int32, (words_of(num_outputs, self.bits), num_groups))
        return np.ascontiguousarray(unpack_rows(words.T, self.bits, num_outputs).T)


@dataclass(frozen=True)
class Int8Layout:
    """How a module is stored as int-quantized: bits of a code, inputs a group (None: all of them), symmetric or not,
    and whether activations are rounded to int8 with one scale a token.
    """

    bits: int
    group: int | None
    symmetric: bool
    per_token: bool

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight", "weight_scale", *(() if self.symmetric else ("weight_zero_point",)))

    @property
    def optional(self) -> tuple[str, ...]:
        return ("weight_zero_point",) if self.symmetric else ()

    def shape(self, planes: Planes) -> tuple[int, int]:
        return planes.matrix_shape("weight")

    def unpack(self, planes: Planes) -> QuantizedMatrix:
        num_outputs, num_inputs = self.shape(planes)
        num_groups = planes.num_groups(num_inputs, self.group)
        weight = planes.array("weight", np.int8, (num_outputs, num_inputs))
        shapes = _scale_shapes(num_outputs, num_groups)
        scale: NDArray[Any]
        if self.per_token:
            scale = planes.scales("weight_scale", *shapes)
        else:
            scale = planes.half_scales("weight_scale", *shapes)
        return QuantizedMatrix(
            _codes(planes, "weight", weight, self.bits),
            _each_output(scale, num_outputs),
            self.zero(planes),
            bits=self.bits,
            group=num_inputs // num_groups,
            per_token=self.per_token,
        )

    def zero(self, planes: Planes) -> Codes:
        num_outputs, num_inputs = self.shape(planes)
        num_groups = planes.num_groups(num_inputs, self.group)
        return _zero_points(planes, num_outputs, num_groups, self.bits, symmetric=self.symmetric)


def pack(matrix: QuantizedMatrix) -> dict[str, NDArray[Any]]:
    """The planes of a matrix as pack-quantized: any bits, f16 scales; zero points only when it is not symmetric."""
    assert not matrix.per_token, "weights that meet int8 activations are stored by pack_int8"
    codes = matrix.codes
    planes: dict[str, NDArray[Any]] = {}
    if matrix.order is not None:
        place = np.argsort(matrix.order)
        codes = codes[:, place]
        planes["weight_g_idx"] = (place // matrix.group).astype(np.int32)
    if not matrix.is_symmetric:
        packed = pack_rows(np.ascontiguousarray(matrix.zero.T), matrix.bits)
        planes["weight_zero_point"] = np.ascontiguousarray(packed.T)
    return planes | {
        "weight_packed": pack_rows(codes, matrix.bits),
        "weight_scale": matrix.scale,
        "weight_shape": np.array(codes.shape, np.int64),
    }


def pack_int8(matrix: QuantizedMatrix) -> dict[str, NDArray[Any]]:
    """The planes of a matrix as int-quantized: any bits, scales as they are; zero points only when not symmetric."""
    assert matrix.order is None, "int-quantized has no order of inputs"
    planes: dict[str, NDArray[Any]] = {
        "weight": _centred(matrix.codes, matrix.bits),
        "weight_scale": matrix.scale,
    }
    if not matrix.is_symmetric:
        planes["weight_zero_point"] = _centred(matrix.zero, matrix.bits)
    return planes


def _scale_shapes(num_outputs: int, num_groups: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that scales may have."""
    if num_groups > 1:
        return ((num_outputs, num_groups),)
    return (num_outputs, 1), (num_outputs,), (1,), ()


def _each_output(scale: NDArray[Any], num_outputs: int) -> NDArray[Any]:
    """Scales [N, groups] of scales in any of ``_scale_shapes``."""
    if scale.ndim < 2:
        scale = scale.reshape(-1, 1)
    return np.ascontiguousarray(np.broadcast_to(scale, (num_outputs, scale.shape[1])))


def _zero_points(planes: Planes, num_outputs: int, num_groups: int, bits: int, *, symmetric: bool) -> Codes:
    """z [N, groups] of zero points that are i8; the middle code for a symmetric matrix, whose plane may be all 0."""
    middle = np.full((num_outputs, num_groups), 1 << (bits - 1), np.uint8)
    name = "weight_zero_point"
    if name not in planes.arrays and symmetric:
        return middle
    stored = planes.arrays.get(name)
    shapes = _scale_shapes(num_outputs, num_groups)
    shape = stored.shape if stored is not None and stored.shape in shapes else shapes[0]
    zero = _codes(planes, name, planes.array(name, np.int8, shape), bits)
    if symmetric and (zero != middle.flat[0]).any():
        raise planes.error(name, "has zero points other than 0 in a model that says it is symmetric")
    return _each_output(zero, num_outputs)


def _codes(planes: Planes, name: str, values: NDArray[np.int8], bits: int) -> Codes:
    """values + 2^(bits - 1), which must be codes."""
    middle = 1 << (bits - 1)
    if bits < 8 and (values.min() < -middle or values.max() >= middle):
        raise planes.error(name, f"has values from {values.min()} to {values.max()}, not {bits} bits")
    return values.view(np.uint8) + np.uint8(middle)


def _centred(codes: Codes, bits: int) -> NDArray[np.int8]:
    """codes - 2^(bits - 1)."""
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)
