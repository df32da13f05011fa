"""How a stage's matrices become codes: rounding to nearest, GPTQ, GPTAQ, and the best that is known here.

The best joins, in this order: what is to be met lies ``STRENGTH`` of the way to the original's outputs and residual
stream (GPTAQ, ``moments``), a search over the ranges of each group, GPTQ with these and with the whole ranges, of which
every row keeps what loses less, and coordinate descent over codes, scales and zero points. What each is worth stands in
docs/LOG.md.

Checked by: tests/unit/test_quantize_recipe.py, tests/unit/test_quantize_pipeline.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paceline.quantize.gptq import DAMPING, Elimination, Problem, round_columns, row_losses
from paceline.quantize.grid import Grid, Table, range_grid, searched_grid
from paceline.quantize.moments import Moments
from paceline.quantize.refine import refine
from paceline.quantize.rtn import quantize_rtn
from paceline.quantize.scheme import Scheme
from paceline.weights.quantized_matrix import QuantizedMatrix

RecipeName = Literal["plain", "gptaq", "best"]
RECIPES: tuple[RecipeName, ...] = ("best", "gptaq", "plain")


STRENGTH = 0.25
"""The whole way fits calibration tokens and not others: SmolLM2 with six layers quantised from 8,192 tokens, mean KL
0.048 at 1, 0.039 at 0.25, 0.041 at 0."""


@dataclass(frozen=True)
class Recipe:
    """Steps beyond rounding column by column.

    ``asymmetric``: meet the original's outputs, given the quantised model's inputs, or go ``strength`` of the way from
    the matrix's own outputs there; with it ``follow_residual``: also make up for what the residual stream lacks, and
    ``weigh_tokens``: errors count relative to the residual stream. ``search``: grids by search where that is better.
    ``sweeps`` of coordinate descent afterwards.
    """

    asymmetric: bool = False
    strength: float = 1.0
    follow_residual: bool = False
    weigh_tokens: bool = False
    search: bool = False
    sweeps: int = 0
    damping: float = DAMPING

    @classmethod
    def named(cls, name: RecipeName) -> Recipe:
        """The steps of a recipe."""
        if name == "plain":
            return cls()
        if name == "gptaq":
            return cls(asymmetric=True, strength=STRENGTH)
        return cls(asymmetric=True, strength=STRENGTH, follow_residual=True, weigh_tokens=True, search=True, sweeps=3)


@dataclass(frozen=True)
class Quantised:
    """A matrix, and its error: of its outputs over the calibration tokens, relative to theirs (root mean square); of
    its weights where there are no tokens."""

    matrix: QuantizedMatrix
    error: float


def quantize_rounding(tables: Mapping[str, Table], scheme: Scheme) -> dict[str, Quantised]:
    """Matrices by name, each rounded to nearest."""
    found = {}
    for name, W in tables.items():
        matrix = quantize_rtn(W, scheme, scheme.group_of(W.shape[1], tensor=name))
        found[name] = Quantised(matrix, ratio(np.vdot(E := matrix.values() - W, E), np.vdot(W, W)))
    return found


def quantize_together(
    tables: Mapping[str, Table], moments: Moments, scheme: Scheme, recipe: Recipe
) -> dict[str, Quantised]:
    """Matrices with one input, by name: they share H, and rows know nothing of each other, so they are one problem."""
    names = list(tables)
    W0 = np.concatenate([tables[name] for name in names])
    group = scheme.group_of(W0.shape[1], tensor=names[0])
    YX = None
    if recipe.asymmetric:
        own = W0.astype(np.float64) @ moments.H
        YX = own + recipe.strength * (np.concatenate([moments.YX[name] for name in names]) - own)
    problem = Problem(W0, moments.H, YX)
    H = problem.damped(recipe.damping)
    W = problem.target(H)
    single = W.astype(np.float32)
    elimination = Elimination.of(H)
    grid = range_grid(single, scheme, group)
    codes = round_columns(single, elimination, grid)
    if recipe.search:
        searched = searched_grid(single, scheme, group, elimination.importance())
        other = round_columns(single, elimination, searched)
        worse = row_losses(W, grid.values(codes), H) > row_losses(W, searched.values(other), H)
        codes = np.where(worse[:, None], other, codes)
        grid = grid.with_rows(worse, searched)
    if recipe.sweeps:
        codes, grid = refine(
            single, H, codes, grid, sweeps=recipe.sweeps, symmetric=scheme.symmetric, f16_scales=not scheme.per_token
        )
    E = W - grid.values(codes)
    found: dict[str, Quantised] = {}
    start = 0
    for name in names:
        rows = slice(start, start + len(tables[name]))
        part = Grid(grid.scale[rows], grid.zero[rows], group, grid.highest_code)
        error = ratio(np.vdot(E[rows] @ moments.H, E[rows]), np.vdot(W[rows] @ moments.H, W[rows]))
        found[name] = Quantised(part.matrix(codes[rows], scheme), error)
        start = rows.stop
    return found


def ratio(squared_error: np.floating[Any], squared: np.floating[Any]) -> float:
    """The root of the quotient; 0 where nothing was to be met."""
    return math.sqrt(squared_error / squared) if squared > 0 else 0.0
