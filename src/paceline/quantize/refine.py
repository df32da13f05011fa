"""Coordinate descent on the proxy loss: each code, scale and zero point in turn takes the value that is best for it.

Source: the quadratic of GPTQ (Frantar et al. 2210.17323, equation 1); descent over codes as in QuantEase (Behdin et al.
2309.01885); scales in closed form as this project's own addition.

Notation: Ŵ = s (q - z), E = W - Ŵ, G = E H [N, K], half of the loss's negative gradient. Changing column k by d
changes the loss by -2 d G_k + d^2 H_kk, so the best d is G_k / H_kk; a group's scale moves Ŵ along c = q - z, its zero
point along -s 1.

Departures: none of the steps is relaxed: each is taken only if the loss falls, so sweeps can be stopped anywhere. A
dead input (H_kk = damping only) is moved like any other.
Checked by: tests/unit/test_quantize_refine.py: the loss never rises, a sweep equals the plain loop, brute force on tiny
cases.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.quantize.gptq import Floats
from paceline.quantize.grid import LARGEST_SCALE, SMALLEST_SCALE, Doubles, Grid, Table

BLOCK = 64


def refine(
    W: Floats, H: Doubles, codes: Table, grid: Grid, *, sweeps: int, symmetric: bool, f16_scales: bool = True
) -> tuple[Table, Grid]:
    """Codes and grid after ``sweeps`` passes over all groups, in the precision of W; does not modify its arguments."""
    state = _Descent(W, H, codes, grid, f16_scales=f16_scales)
    for _ in range(sweeps):
        for group in range(len(state.scale)):
            state.move_codes(group)
            state.move_scale(group)
            if not symmetric:
                state.move_zero(group)
    scale, zero = (np.ascontiguousarray(part.T, np.float32) for part in (state.scale, state.zero))
    return np.ascontiguousarray(state.codes.T, np.float32), Grid(scale, zero, grid.group, grid.highest_code)


class _Descent:
    """Where it stands. All arrays are transposed, so that a column lies in one piece of memory: G, codes [K, N], scale
    and zero [groups, N]."""

    def __init__(self, W: Floats, H: Doubles, codes: Table, grid: Grid, *, f16_scales: bool) -> None:
        self._H: Any = H.astype(W.dtype)
        self._grid = grid
        self._f16_scales = f16_scales
        self.codes: Any = codes.T.astype(W.dtype, order="C")
        self.scale: Any = grid.scale.T.astype(W.dtype, order="C")
        self.zero: Any = grid.zero.T.astype(W.dtype, order="C")
        self._G: Any = self._H @ np.ascontiguousarray((W - grid.values(codes)).T)

    def move_codes(self, index: int) -> None:
        """Each column of a group in turn; G of what is outside a block is brought up to date once a block."""
        s = self.scale[index]
        group = self._columns(index)
        for start in range(group.start, group.stop, BLOCK):
            block = slice(start, min(start + BLOCK, group.stop))
            G = self._G[block].copy()
            H = self._H[block, block]
            moves = np.empty_like(G)
            for at in range(len(G)):
                q = self.codes[start + at]
                best = np.clip(np.rint(q + G[at] / (H[at, at] * s)), 0, self._grid.highest_code)
                np.multiply(best - q, s, out=moves[at])
                self.codes[start + at] = best
                G[at + 1 :] -= np.outer(H[at, at + 1 :], moves[at])
            self._G -= self._H[:, block] @ moves

    def move_scale(self, index: int) -> None:
        """The best one that a file can hold, if it is better than the one there is."""
        group = self._columns(index)
        c = self.codes[group] - self.zero[index]
        s = self.scale[index]
        slope = np.einsum("kn,kn->n", self._G[group], c)
        curvature = np.einsum("kn,kn->n", self._H[group, group] @ c, c)
        best = s + np.divide(slope, curvature, out=np.zeros_like(slope), where=curvature > 0)
        if self._f16_scales:
            best = np.clip(best, SMALLEST_SCALE, LARGEST_SCALE).astype(np.float16).astype(s.dtype)
        step = best - s
        step[(step * (step * curvature - 2 * slope) >= 0) | (best <= 0)] = 0
        self.scale[index] += step
        self._G -= self._H[:, group] @ (c * step)

    def move_zero(self, index: int) -> None:
        """Likewise; all weights of the group move by the same amount."""
        group = self._columns(index)
        s, z = self.scale[index], self.zero[index]
        slope = self._G[group].sum(axis=0)
        curvature = self._H[group, group].sum()
        best = np.clip(np.rint(z - slope / (curvature * s)), 0, self._grid.highest_code)
        step = (z - best) * s
        worse = step * (step * curvature - 2 * slope) >= 0
        best[worse], step[worse] = z[worse], 0
        self.zero[index] = best
        self._G -= np.outer(self._H[:, group].sum(axis=1), step)

    def _columns(self, index: int) -> slice:
        return slice(index * self._grid.group, (index + 1) * self._grid.group)
