"""Products of activations with one weight matrix, as a step runs them.

A float32 matrix on a CPU is packed for oneDNN where torch has it: a product of one row then takes as long as a plain
one, larger ones less (64 rows of SmolLM2: 247 ms instead of 281 on one core), and all have one order of sums
(``rows``). A bfloat16 matrix is multiplied with activations rounded to bfloat16, and the result is rounded as well;
between products everything stays float32.

Checked by: tests/unit/test_torch_rows.py, tests/native/test_torch_executor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paceline.executors.torch.rows import BLOCK, Rows, Rowwise, steady_rows
from paceline.weights.packed import PackedMatrix
from paceline.weights.tiling import unpack

MakeProduct = Callable[[Sequence[PackedMatrix], torch.dtype], "Product"]
"""From the matrices whose outputs lie side by side to their product."""


class Product:
    """x [rows, inputs] f32 -> x W^T [rows, outputs] f32."""

    def __init__(self, multiply: Rowwise, num_bytes: int, rows: Rows) -> None:
        self._multiply = multiply
        self.num_bytes = num_bytes
        self.rows = rows

    def __call__(self, x: Tensor) -> Tensor:
        """The product, of any number of rows."""
        return self._multiply(x) if self.rows.are_any else self.rows.apply(self._multiply, x)


class ProductMaker:
    """Makes products on one device; how many rows are steady is tried once a shape."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[int, int, torch.dtype], Rows] = {}

    def __call__(self, matrices: Sequence[PackedMatrix], dtype: torch.dtype) -> Product:
        """See ``MakeProduct``."""
        return self.of_values(np.concatenate([unpack(matrix) for matrix in matrices]), dtype)

    def of_values(self, values: np.ndarray[Any, np.dtype[np.float32]], dtype: torch.dtype) -> Product:
        """The product with W [outputs, inputs] f32."""
        weight = torch.from_numpy(values).to(self._device, dtype)
        multiply = packed_product(weight) if _can_pack(weight) else plain_product(weight)
        key = (*values.shape, dtype)
        if key not in self._known:
            self._known[key] = steady_rows(multiply, values.shape[1], device=self._device)
        return Product(multiply, weight.numel() * weight.element_size(), self._known[key])


def plain_product(weight: Tensor) -> Rowwise:
    """The product that torch chooses, in the type of ``weight``."""
    if weight.dtype == torch.float32:
        return lambda x: functional.linear(x, weight)
    return lambda x: functional.linear(x.to(weight.dtype), weight).float()


def packed_product(weight: Tensor) -> Rowwise:
    """oneDNN's product with a copy of ``weight`` in the layout that it likes for a block of rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, packed, None, "none", [], "")


def _can_pack(weight: Tensor) -> bool:
    """Whether this torch has oneDNN's product, which it keeps for its own compiler."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and known
