"""A model whose matrices are rounded to nearest, without any method: what the tests of writers and readers hand on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.quantize.export.formats import is_layer_matrix
from paceline.quantize.scheme import Scheme
from paceline.weights.blocks import dequantize
from paceline.weights.quantized_matrix import QuantizedMatrix
from paceline.weights.raw import Checkpoint


@dataclass
class RoundedModel:
    """Implements ``QuantizedModel``. ``changed`` holds other values for tensors that are not quantised, ``orders`` the
    order of inputs of matrices.
    """

    checkpoint: Checkpoint
    scheme: Scheme
    changed: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    orders: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    left_alone: tuple[str, ...] = ()

    def matrix(self, name: str) -> QuantizedMatrix | None:
        if not is_layer_matrix(name) or name in self.left_alone:
            return None
        weights = dequantize(self.checkpoint.tensor(name))
        order = self.orders.get(name)
        return rounded(weights if order is None else weights[:, order], self.scheme, name=name, order=order)

    def values(self, name: str) -> NDArray[np.float32]:
        return self.changed[name] if name in self.changed else dequantize(self.checkpoint.tensor(name))


def rounded(
    weights: NDArray[np.float32], scheme: Scheme, *, name: str = "W", order: NDArray[np.int32] | None = None
) -> QuantizedMatrix:
    """Each group between its extremes, or by its largest magnitude when symmetric."""
    group = scheme.group_of(weights.shape[1], tensor=name)
    groups = weights.reshape(weights.shape[0], -1, group)
    middle, top = 1 << (scheme.bits - 1), scheme.highest_code
    if scheme.symmetric:
        scale = np.abs(groups).max(axis=2) / np.float32(middle - 1)
        zero = np.full(scale.shape, middle, np.float32)
    else:
        low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        scale = (high - low) / np.float32(top)
        zero = np.rint(-low / np.where(scale > 0, scale, 1)).astype(np.float32)
    stored = scale.astype(np.float32 if scheme.per_token else np.float16)
    divisor = np.where(stored > 0, stored.astype(np.float32), np.float32(1))[:, :, None]
    codes = np.clip(np.rint(groups / divisor) + zero[:, :, None], 0, top).astype(np.uint8).reshape(weights.shape)
    return QuantizedMatrix(
        codes, stored, np.clip(zero, 0, top).astype(np.uint8), scheme.bits, group, scheme.per_token, order
    )
