"""How a stage's matrices become codes: rounding to nearest, GPTQ, GPTAQ, and the best that is known here.

The best joins, in this order: what is to be met are the original's outputs and its residual stream (GPTAQ,
``moments``), a search over the ranges of each group weighted by the diagonal of H, GPTQ, and coordinate descent over
codes, scales and zero points. What each is worth stands in docs/LOG.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.quantize.gptq import DAMPING, Problem, round_columns
from paceline.quantize.grid import Grid, Table, range_grid, searched_grid
from paceline.quantize.moments import Moments
from paceline.quantize.refine import refine
from paceline.quantize.rtn import quantize_rtn
from paceline.quantize.scheme import Scheme
from paceline.weights.quantized_matrix import QuantizedMatrix

RecipeName = Literal["plain", "gptaq", "best"]
RECIPES: tuple[RecipeName, ...] = ("best", "gptaq", "plain")


@dataclass(frozen=True)
class Recipe:
    """Steps beyond rounding column by column.

    ``asymmetric``: meet the original's outputs, given the quantised model's inputs; with it ``follow_residual``: also
    make up for what the residual stream lacks, and ``weigh_tokens``: errors count relative to the residual stream.
    ``search``: grids by search instead of the groups' ranges. ``sweeps`` of coordinate descent afterwards.
    """

    asymmetric: bool = False
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
            return cls(asymmetric=True)
        return cls(asymmetric=True, follow_residual=True, weigh_tokens=True, search=True, sweeps=3)


def quantize_rounding(tables: Mapping[str, Table], scheme: Scheme) -> dict[str, QuantizedMatrix]:
    """Matrices by name, each rounded to nearest."""
    return {name: quantize_rtn(W, scheme, scheme.group_of(W.shape[1], tensor=name)) for name, W in tables.items()}


def quantize_together(
    tables: Mapping[str, Table], moments: Moments, scheme: Scheme, recipe: Recipe
) -> dict[str, QuantizedMatrix]:
    """Matrices with one input, by name: they share H, and rows know nothing of each other, so they are one problem."""
    names = list(tables)
    W0 = np.concatenate([tables[name] for name in names])
    group = scheme.group_of(W0.shape[1], tensor=names[0])
    YX = np.concatenate([moments.YX[name] for name in names]) if recipe.asymmetric else None
    problem = Problem(W0, moments.H, YX)
    H = problem.damped(recipe.damping)
    W = problem.target(H)
    single = W.astype(np.float32)
    grid = searched_grid(single, scheme, group, np.diagonal(H)) if recipe.search else range_grid(single, scheme, group)
    codes = round_columns(W, H, grid)
    if recipe.sweeps:
        codes, grid = refine(
            W, H, codes, grid, sweeps=recipe.sweeps, symmetric=scheme.symmetric, f16_scales=not scheme.per_token
        )
    matrices: dict[str, QuantizedMatrix] = {}
    start = 0
    for name in names:
        rows = slice(start, start + len(tables[name]))
        part = Grid(grid.scale[rows], grid.zero[rows], group, grid.highest_code)
        matrices[name] = part.matrix(codes[rows], scheme)
        start = rows.stop
    return matrices
