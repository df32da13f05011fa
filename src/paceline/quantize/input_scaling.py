"""Methods that scale a matrix's inputs before it is rounded, AWQ and SmoothQuant, on a stage of the walk.

They look at the original's inputs: scales are searched before anything is rounded, and each stage for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.quantize.awq import clipped_grid, scaled_moments, search_scale
from paceline.quantize.folding import Producer
from paceline.quantize.forward import Stage, Values
from paceline.quantize.grid import Doubles, Grid, Table, range_grid
from paceline.quantize.moments import power, residual_of
from paceline.quantize.recipe import Quantised, ratio
from paceline.quantize.scheme import Scheme
from paceline.quantize.smoothquant import rounded_per_token, search_smoothing

SAMPLE_TOKENS = 768
"""Tokens over which SmoothQuant compares outputs: an evaluation of a stage of SmolLM2 then takes some 0.1 s."""


class InputStatistics:
    """What the methods need to know of a stage's inputs, added up while the original runs through it: an ``Observer``.

    H [K, K] = X^T w X and ``largest`` [K] over all tokens; of a sample X [tokens, K] and ``token_weights`` [tokens],
    the roots of w. w is 1, or 1 / mean square of the residual stream after the product, see ``moments``.
    """

    def __init__(self, stage: Stage, shape: tuple[int, int]) -> None:
        """``shape`` is that of the calibration tokens: sequences, length."""
        assert stage.linear is not None
        self._stage = stage
        self._residual = residual_of(stage)
        self._length = shape[1]
        num_tokens = shape[0] * shape[1]
        # Drawn, not every so many: a stride that divides the length would take the first token of every sequence.
        drawn = np.random.default_rng(0).permutation(num_tokens)[:SAMPLE_TOKENS]
        self._is_sampled = np.zeros(num_tokens, bool)
        self._is_sampled[drawn] = True
        width = stage.linear.inputs[0].width
        self.H: Doubles = np.zeros((width, width))
        self.largest: Table = np.zeros(width, np.float32)
        self._samples: list[Table] = []
        self._weights: list[Table] = []

    @property
    def X(self) -> Table:  # noqa: N802
        """The sample's inputs."""
        return np.concatenate(self._samples)

    @property
    def token_weights(self) -> Table:
        """The sample's weights."""
        return np.concatenate(self._weights)

    def __call__(self, part: slice, original: Values) -> None:
        x = original[self._stage.input]
        x = x.reshape(-1, x.shape[-1])
        root = np.ones(len(x), np.float32)
        if self._residual is not None:
            after = original[self._residual] + original[self._stage.matrices[0]]
            root = np.asarray(1 / np.sqrt(power(after.reshape(len(x), -1))), np.float32)
        weighted = x * root[:, None]
        # A copy, because numpy would see that both are one matrix and take a routine of half the speed a product.
        self.H += weighted.T @ weighted.copy()
        self.largest = np.maximum(self.largest, np.abs(x).max(axis=0))
        chosen = self._is_sampled[part.start * self._length :][: len(x)]
        self._samples.append(x[chosen])
        self._weights.append(root[chosen])


@dataclass(frozen=True)
class ScaledStage:
    """A stage's matrices, made for inputs divided by ``divisor``, one number for each row of the producer; None: the
    inputs are as they were."""

    quantised: dict[str, Quantised]
    divisor: Table | None


def quantize_awq(
    tables: Mapping[str, Table], seen: InputStatistics, scheme: Scheme, producer: Producer | None
) -> ScaledStage:
    """Matrices with one input by AWQ: scale search, where somebody can absorb scales, then clipping."""
    W = np.concatenate(list(tables.values()))
    group = scheme.group_of(W.shape[1], tensor=next(iter(tables)))
    scale = np.ones(W.shape[1], np.float32)
    if producer is not None:
        scale = search_scale(W, seen.H, lambda W: _nearest(W, range_grid(W, scheme, group)), producer).scale
    grid = clipped_grid(W * scale, scaled_moments(seen.H, scale), scheme, group)
    quantised = {}
    for name, rows in _rows(tables).items():
        found = Grid(grid.scale[rows], grid.zero[rows], group, grid.highest_code)
        codes = found.codes(W[rows] * scale)
        E = found.values(codes) / scale - W[rows]
        error = ratio(np.vdot(E @ seen.H, E), np.vdot(W[rows] @ seen.H, W[rows]))
        quantised[name] = Quantised(found.matrix(codes, scheme), error)
    return ScaledStage(quantised, _divisor(scale, producer))


def quantize_smoothquant(
    tables: Mapping[str, Table], seen: InputStatistics, scheme: Scheme, producer: Producer | None
) -> ScaledStage:
    """Matrices with one input by SmoothQuant, for activations that are rounded to int8 with one scale a token."""
    W = np.concatenate(list(tables.values()))
    scale = np.ones(W.shape[1], np.float32)
    X, token_weights = seen.X, seen.token_weights
    if producer is not None:
        scale = search_smoothing(
            W,
            X,
            lambda W: _nearest(W, range_grid(W, scheme, W.shape[1])),
            producer,
            largest=seen.largest,
            token_weights=token_weights,
        ).scale
    rounded = rounded_per_token(X / scale)
    quantised = {}
    for name, rows in _rows(tables).items():
        grid = range_grid(W[rows] * scale, scheme, W.shape[1])
        codes = grid.codes(W[rows] * scale)
        exact = X @ W[rows].T * token_weights[:, None]
        E = rounded @ grid.values(codes).T * token_weights[:, None] - exact
        quantised[name] = Quantised(grid.matrix(codes, scheme), ratio(np.vdot(E, E), np.vdot(exact, exact)))
    return ScaledStage(quantised, _divisor(scale, producer))


def _nearest(W: Table, grid: Grid) -> Table:
    return grid.values(grid.codes(W))


def _rows(tables: Mapping[str, Table]) -> dict[str, slice]:
    """Where each matrix is when they stand one above the other."""
    ends = np.cumsum([len(W) for W in tables.values()]).tolist()
    return {name: slice(end - len(tables[name]), end) for name, end in zip(tables, ends, strict=True)}


def _divisor(scale: Table, producer: Producer | None) -> Table | None:
    if producer is None or (scale == 1).all():
        return None
    return producer.pool(scale, np.max)
