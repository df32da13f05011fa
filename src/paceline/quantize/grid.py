"""Scales and zero points: the grid of values that a group's codes stand for, and rounding to it.

Notation: W [N, K] weights, q codes 0 .. qmax, s and z [N, groups] scale and zero point: W ~ s (q - z). The loss of a
grid is sum_k h_k (w_k - s (q_k - z))^2 with importances h [K] of the inputs.

Departures: scales are rounded to f16 before codes are computed, since files hold f16; so codes are the nearest ones to
what is stored. An asymmetric range always holds 0, as formats with unsigned zero points need.
Checked by: tests/unit/test_quantize_grid.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.quantize.scheme import Scheme
from paceline.weights.quantized_matrix import QuantizedMatrix

Table = NDArray[np.float32]
Doubles = NDArray[np.float64]

SMALLEST_SCALE = float(np.finfo(np.float16).smallest_subnormal)
LARGEST_SCALE = float(np.finfo(np.float16).max)
SHRINKS = tuple(float(shrink) for shrink in np.arange(20, 8, -1) / 20)
"""Parts of a group's range that ``searched_grid`` tries: 1 down to 0.45."""


@dataclass(frozen=True)
class Grid:
    """``scale`` [N, groups] f32 holding values that f16 has exactly (any f32 with ``per_token``), ``zero`` [N, groups]
    f32 holding whole numbers 0 .. ``highest_code``; ``group`` inputs share both."""

    scale: Table
    zero: Table
    group: int
    highest_code: int

    def codes(self, W: Table) -> Table:
        """The nearest codes [N, K], as f32."""
        grouped = W.reshape(len(W), -1, self.group)
        codes = np.rint(grouped / self.scale[:, :, None]) + self.zero[:, :, None]
        return np.asarray(np.clip(codes, 0, self.highest_code).reshape(W.shape), np.float32)

    def values(self, codes: Table) -> Table:
        """What codes stand for [N, K]."""
        grouped = codes.reshape(len(codes), -1, self.group)
        return ((grouped - self.zero[:, :, None]) * self.scale[:, :, None]).reshape(codes.shape)

    def with_rows(self, chosen: NDArray[np.bool_], other: Grid) -> Grid:
        """This grid with the rows that are ``chosen`` [N] from another."""
        scale = np.where(chosen[:, None], other.scale, self.scale)
        return Grid(scale, np.where(chosen[:, None], other.zero, self.zero), self.group, self.highest_code)

    def matrix(self, codes: Table, scheme: Scheme) -> QuantizedMatrix:
        """The codes with their grid, as files hold them."""
        scale = self.scale if scheme.per_token else self.scale.astype(np.float16)
        zero = self.zero.astype(np.uint8)
        return QuantizedMatrix(codes.astype(np.uint8), scale, zero, scheme.bits, self.group, scheme.per_token)


def range_grid(W: Table, scheme: Scheme, group: int, *, shrink: float = 1.0) -> Grid:
    """The grid that spans each group's values, or the part ``shrink`` of their range."""
    grouped = W.reshape(len(W), -1, group)
    part = np.float32(shrink)
    low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
    return spanning_grid(low * part, high * part, scheme, group)


def spanning_grid(low: Table, high: Table, scheme: Scheme, group: int) -> Grid:
    """The grid that spans each group's range from ``low`` <= 0 to ``high`` >= 0 [N, groups].

    Symmetric: the largest magnitude is (qmax - z) s, z = 2^(bits-1). A group of zeros has the smallest scale.
    """
    qmax = scheme.highest_code
    if scheme.symmetric:
        middle = 1 << (scheme.bits - 1)
        largest = np.maximum(-low, high)
        scale = _stored(np.asarray(largest / np.float32(qmax - middle), np.float32), scheme)
        return Grid(scale, np.full_like(scale, middle), group, qmax)
    scale = _stored((high - low) / np.float32(qmax), scheme)
    return Grid(scale, np.clip(np.rint(-low / scale), 0, qmax).astype(np.float32), group, qmax)


def searched_grid(W: Table, scheme: Scheme, group: int, h: Doubles) -> Grid:
    """Of the grids over parts of each group's range the one with the least loss, group by group."""
    best = range_grid(W, scheme, group)
    least = _loss(W, best, h)
    scale, zero = best.scale, best.zero
    for shrink in SHRINKS[1:]:
        tried = range_grid(W, scheme, group, shrink=shrink)
        loss = _loss(W, tried, h)
        better = loss < least
        least = np.where(better, loss, least)
        scale, zero = np.where(better, tried.scale, scale), np.where(better, tried.zero, zero)
    return Grid(scale, zero, group, scheme.highest_code)


def _loss(W: Table, grid: Grid, h: Doubles) -> Table:
    error = (W - grid.values(grid.codes(W))) ** 2 * h.astype(np.float32)
    return np.asarray(error.reshape(len(W), -1, grid.group).sum(axis=2), np.float32)


def _stored(scale: Table, scheme: Scheme) -> Table:
    """As files hold it: f16, or f32 for W8A8; never 0, never infinite."""
    if scheme.per_token:
        return np.maximum(scale, np.finfo(np.float32).tiny)
    clipped = np.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)
    return clipped.astype(np.float16).astype(np.float32)
