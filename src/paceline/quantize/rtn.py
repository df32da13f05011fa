"""Round to nearest: each weight becomes the nearest code of its group's grid, and no other weight hears of it.

Notation: as in ``grid``. Checked by: tests/unit/test_quantize_grid.py.
"""

from __future__ import annotations

from paceline.quantize.grid import Table, range_grid
from paceline.quantize.scheme import Scheme
from paceline.weights.quantized_matrix import QuantizedMatrix


def quantize_rtn(W: Table, scheme: Scheme, group: int) -> QuantizedMatrix:
    """W [N, K] f32, finite, on the grid of its groups' ranges."""
    grid = range_grid(W, scheme, group)
    return grid.matrix(grid.codes(W), scheme)
