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

import numpy as np

from paceline.quantize.grid import LARGEST_SCALE, SMALLEST_SCALE, Doubles, Grid, Table

BLOCK = 64


def refine(
    W: Doubles, H: Doubles, codes: Table, grid: Grid, *, sweeps: int, symmetric: bool, f16_scales: bool = True
) -> tuple[Table, Grid]:
    """Codes and grid after ``sweeps`` passes over all groups; does not modify its arguments."""
    codes = codes.copy()
    scale, zero = grid.scale.astype(np.float64), grid.zero.astype(np.float64)
    G = (W - grid.values(codes)) @ H
    for _ in range(sweeps):
        for index in range(scale.shape[1]):
            group = slice(index * grid.group, (index + 1) * grid.group)
            _move_codes(G, H, codes, scale[:, index], zero[:, index], group, grid.highest_code)
            _move_scale(G, H, codes, scale, zero, index, group, f16_scales=f16_scales)
            if not symmetric:
                _move_zero(G, H, scale, zero, index, group, grid.highest_code)
    return codes, Grid(scale.astype(np.float32), zero.astype(np.float32), grid.group, grid.highest_code)


def _move_codes(G: Doubles, H: Doubles, codes: Table, s: Doubles, z: Doubles, group: slice, highest_code: int) -> None:
    """Each column of a group in turn; G of the columns outside a block is brought up to date once a block."""
    for start in range(group.start, group.stop, BLOCK):
        block = slice(start, min(start + BLOCK, group.stop))
        G_block = G[:, block].copy()
        H_block = H[block, block]
        moves = np.empty_like(G_block)
        for at in range(G_block.shape[1]):
            q = codes[:, start + at]
            best = np.clip(np.rint(q + G_block[:, at] / (H_block[at, at] * s)), 0, highest_code)
            moves[:, at] = (best - q) * s
            codes[:, start + at] = best
            G_block -= moves[:, at, None] * H_block[at]
        G -= moves @ H[block]


def _move_scale(
    G: Doubles, H: Doubles, codes: Table, scale: Doubles, zero: Doubles, index: int, group: slice, *, f16_scales: bool
) -> None:
    c = codes[:, group] - zero[:, index, None]
    s = scale[:, index]
    slope = np.einsum("nk,nk->n", G[:, group], c)
    curvature = np.einsum("nk,nk->n", c @ H[group, group], c)
    best = s + np.divide(slope, curvature, out=np.zeros_like(slope), where=curvature > 0)
    if f16_scales:
        best = np.clip(best, SMALLEST_SCALE, LARGEST_SCALE).astype(np.float16).astype(np.float64)
    step = best - s
    step[(step * (step * curvature - 2 * slope) >= 0) | (best <= 0)] = 0
    scale[:, index] += step
    G -= (c * step[:, None]) @ H[group]


def _move_zero(
    G: Doubles, H: Doubles, scale: Doubles, zero: Doubles, index: int, group: slice, highest_code: int
) -> None:
    s, z = scale[:, index], zero[:, index]
    slope = G[:, group].sum(axis=1)
    curvature = H[group, group].sum()
    best = np.clip(np.rint(z - slope / (curvature * s)), 0, highest_code)
    step = (z - best) * s
    step[step * (step * curvature - 2 * slope) >= 0] = 0
    zero[:, index] = np.where(step == 0, z, best)
    G -= step[:, None] * H[group].sum(axis=0)
