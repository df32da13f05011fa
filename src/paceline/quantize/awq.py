"""AWQ: inputs that matter get larger weights before rounding, and each group's range is clipped where that helps.

Source: Lin, Tang, Tang, Yang, Xiao, Han 2306.00978, equations 4 and 5 (scales), section 3.2 and the authors' code
(clipping).
Notation: X [T, K] inputs of calibration tokens, H = X^T X [K, K], W [N, K] the weights of all matrices that read them,
s [K] scales, Q rounding to the nearest code. Rounded are the weights W diag(s); the inputs X diag(1/s) come from a
producer that was divided by s (``folding``). The loss of s is |X (Q(W diag(s)) diag(1/s) - W)^T|^2.
Departures:
- Losses are tr(E H E^T) with E the error of the weights: the same number as over all tokens of H, and cheaper than over
  the sample that the authors take.
- The importance of an input is its root mean square, the diagonal of H, not its mean magnitude. Loss after the search,
  SmolLM2: equal for inputs that come from a norm, 2 to 4 % less for those of ``ffn_down``.
- The end of a group's range below 0 and the one above are clipped apart, and q and k are clipped like any other matrix.
Checked by: tests/unit/test_quantize_awq.py: the loss against the outputs of tokens, both searches against plain loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from paceline.quantize.folding import Producer
from paceline.quantize.grid import Doubles, Grid, Table, spanning_grid
from paceline.quantize.scheme import Scheme

ALPHAS = tuple(step / 20 for step in range(21))
SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Parts of a range's two ends that are tried."""
SMALLEST_IMPORTANCE = 1e-4
"""Of the largest one: inputs that are nearly always 0 would else have scales that no norm can absorb."""


@dataclass(frozen=True)
class InputScale:
    """``scale`` [K] for the inputs of some matrices; ``loss`` with it and ``plain_loss`` without any."""

    scale: Table
    alpha: float
    loss: float
    plain_loss: float


def scale_of(importance: Table, alpha: float) -> Table:
    """importance^alpha, divided by the geometric mean of the largest and the smallest one; f32.

    ``importance`` [rows of the producer] is not negative.
    """
    largest = float(importance.max())
    if largest == 0:
        return np.ones_like(importance, np.float32)
    scale = np.maximum(importance / largest, SMALLEST_IMPORTANCE).astype(np.float64) ** alpha
    return np.asarray(scale / np.sqrt(scale.max() * scale.min()), np.float32)


def search_scale(
    W: Table,
    H: Doubles,
    rounded: Callable[[Table], Table],
    producer: Producer,
    *,
    alphas: Sequence[float] = ALPHAS,
) -> InputScale:
    """The scale of the alpha with the least loss; all ones where none is better than no scale.

    ``W`` are the matrices that share the input, one above the other; ``rounded`` gives what is left of weights after
    rounding; ``producer`` says which inputs share a scale.
    """
    single = H.astype(np.float32)
    importance = producer.pool(np.sqrt(np.diagonal(single)), np.mean)
    plain_loss = output_loss(rounded(W) - W, single)
    best = InputScale(np.ones(W.shape[1], np.float32), 0.0, plain_loss, plain_loss)
    for alpha in alphas:
        scale = producer.spread(scale_of(importance, alpha))
        loss = output_loss(rounded(W * scale) / scale - W, single)
        if loss < best.loss:
            best = InputScale(scale, alpha, loss, plain_loss)
    return best


def output_loss(E: Table, H: Table) -> float:
    """tr(E H E^T): the squared error of all outputs over all tokens, when weights are off by E."""
    return float(np.einsum("nk,nk->", E @ H, E, dtype=np.float64))


def scaled_moments(H: Doubles, scale: Table) -> Doubles:
    """X^T X of the inputs divided by ``scale``."""
    return np.asarray(H / scale[:, None] / scale)


def clipped_grid(W: Table, H: Doubles, scheme: Scheme, group: int, *, shrinks: Sequence[float] = SHRINKS) -> Grid:
    """Of the grids over parts of each group's range the one with the least error of the group's own part of the output.

    Symmetric ranges have one end, others two. H is that of the inputs as W multiplies them.
    """
    starts = range(0, len(H), group)
    blocks = np.stack([H[start : start + group, start : start + group] for start in starts]).astype(np.float32)
    grouped = W.reshape(len(W), -1, group)
    low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
    pairs = [(shrink, shrink) for shrink in shrinks] if scheme.symmetric else list(product(shrinks, repeat=2))
    best: Grid | None = None
    least: Table | None = None
    for below, above in pairs:
        grid = spanning_grid(low * np.float32(below), high * np.float32(above), scheme, group)
        loss = group_losses(grid.values(grid.codes(W)) - W, blocks)
        if best is None or least is None:
            best, least = grid, loss
            continue
        better = loss < least
        least = np.where(better, loss, least)
        scale, zero = np.where(better, grid.scale, best.scale), np.where(better, grid.zero, best.zero)
        best = Grid(scale, zero, group, grid.highest_code)
    assert best is not None, "at least one part of the range is tried"
    return best


def group_losses(E: Table, blocks: Table) -> Table:
    """e H_g e^T [N, groups] of each group's errors e, for the diagonal blocks of H [groups, group, group]."""
    grouped = np.ascontiguousarray(E.reshape(len(E), len(blocks), -1).transpose(1, 0, 2))
    return np.asarray(np.einsum("gnk,gnk->ng", grouped @ blocks, grouped), np.float32)
