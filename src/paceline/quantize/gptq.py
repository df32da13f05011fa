"""GPTQ: columns are rounded one after the other, and those not yet rounded make up for the error.

Source: Frantar, Ashkboos, Hoefler, Alistarh 2210.17323, algorithm 1; the target of ``Problem.target`` after Li et al.
2504.02692 (GPTAQ: asymmetric calibration).

Notation: X [K, T] inputs of calibration tokens, H = X X^T [K, K], W [N, K] the weights that should be met, U upper
triangular with U^T U = H^-1. The loss is the proxy tr((W - Ŵ) H (W - Ŵ)^T).

Departures:
- U comes from the Cholesky factor of H with rows and columns reversed: H = R R^T with R upper gives U = R^-1. That
  takes no inverse of H, which loses half of the digits.
- The order of columns (by falling diagonal of H: act-order) moves columns only while they are rounded. Groups stay runs
  of the stored columns, with grids computed beforehand ("static groups"), so files need no g_idx.
- GPTAQ subtracts, column by column, what the inputs of the quantised model lack. Here all of it goes into the weights
  before the first column is rounded: W = argmin |Y - W X|^2 + d |W - W0|^2 in closed form. The objective is the same.
Checked by: tests/unit/test_quantize_gptq.py: the textbook's column by column update, the objective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.quantize.grid import Doubles, Grid, Table

Floats = NDArray[np.float32] | NDArray[np.float64]

BLOCK = 64
DAMPING = 0.01


@dataclass(frozen=True)
class Problem:
    """What a matrix is quantised for: weights W0 [N, K], H [K, K], and Y X^T [N, K], the products of the outputs that
    should be met with the inputs that are there; None when they are W0 X."""

    W0: Table
    H: Doubles
    YX: Doubles | None = None

    def damped(self, damping: float = DAMPING) -> Doubles:
        """H with ``damping`` times its mean diagonal added to the diagonal; ``damping`` itself where H is 0."""
        H = self.H.copy()
        H[np.diag_indices_from(H)] += damping * (np.diagonal(H).mean() or 1.0)
        return H

    def target(self, H: Doubles) -> Doubles:
        """The weights W [N, K] to be met, given ``H`` damped: W0 + (Y X^T - W0 X X^T) H^-1."""
        W0 = self.W0.astype(np.float64)
        if self.YX is None:
            return W0
        return W0 + np.linalg.solve(H, (self.YX - W0 @ self.H).T).T


def inverse_factor(H: Doubles) -> Doubles:
    """U [K, K] upper triangular with U^T U = H^-1."""
    L = np.linalg.cholesky(H[::-1, ::-1])
    return np.asarray(np.triu(np.linalg.inv(L)[::-1, ::-1]))


@dataclass(frozen=True)
class Elimination:
    """The order in which columns are rounded, and U for columns in that order."""

    order: NDArray[np.intp]
    U: Doubles

    @classmethod
    def of(cls, H: Doubles) -> Elimination:
        """Of a damped H."""
        order = np.argsort(-np.diagonal(H), kind="stable")
        return cls(order, inverse_factor(H[np.ix_(order, order)]))

    def importance(self) -> Doubles:
        """1 / (H^-1)_kk [K]: what an error of one weight costs when all others make up for it as well as they can."""
        importance = np.empty(len(self.U))
        importance[self.order] = 1 / np.einsum("ik,ik->k", self.U, self.U)
        return importance


def round_columns(W: Floats, elimination: Elimination, grid: Grid, *, block: int = BLOCK) -> Table:
    """Codes [N, K] of GPTQ for weights W, in the precision of W. ``block`` changes the speed and not the result, but
    for rounding.

    Errors of a block's columns go to its later columns at once and to those after the block together, in one product.
    Arrays are transposed, so that a column lies in one piece of memory.
    """
    order, U = elimination.order, elimination.U.astype(W.dtype)
    rest: Any = np.ascontiguousarray(W.T[order])
    scale, zero = (part.T.astype(W.dtype) for part in (grid.scale, grid.zero))
    codes = np.empty(rest.shape, np.float32)
    for start in range(0, len(rest), block):
        end = min(start + block, len(rest))
        errors = np.empty((end - start, len(W)), W.dtype)
        for column in range(start, end):
            s, z = (part[order[column] // grid.group] for part in (scale, zero))
            w = rest[column]
            q = np.clip(np.rint(w / s) + z, 0, grid.highest_code)
            codes[order[column]] = q
            error = (w - (q - z) * s) / U[column, column]
            later = rest[column + 1 : end]
            later -= np.outer(U[column, column + 1 : end], error)
            errors[column - start] = error
        after = rest[end:]
        after -= U[start:end, end:].T @ errors
    return np.ascontiguousarray(codes.T)


def row_losses(W: Floats, values: Table, H: Doubles) -> Doubles:
    """The loss of each output [N]: the diagonal of (W - Ŵ) H (W - Ŵ)^T."""
    error = (W - values).astype(np.float64)
    return np.asarray(np.einsum("nk,nk->n", error @ H, error))


def proxy_loss(W: Floats, values: Table, H: Doubles) -> float:
    """tr((W - Ŵ) H (W - Ŵ)^T)."""
    return float(row_losses(W, values, H).sum())
