"""What the steps of a recipe are joined to: how far to the original's outputs, and the better grid of each row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.quantize.gptq import Elimination, Problem, round_columns, row_losses
from paceline.quantize.grid import range_grid, searched_grid
from paceline.quantize.moments import Moments
from paceline.quantize.recipe import Recipe, quantize_together
from paceline.quantize.scheme import Scheme

SCHEME = Scheme("gptq", 3, 32)
NAMES = ("first", "second")


def stage(rng: np.random.Generator) -> tuple[dict[str, np.ndarray], Moments]:
    """Two matrices with one input, and outputs that are not quite theirs."""
    mixing = rng.standard_normal((64, 64)) * rng.uniform(0.1, 3, 64)
    X = mixing @ rng.standard_normal((64, 300))
    tables = {name: rng.standard_t(3, (12, 64)).astype(np.float32) for name in NAMES}
    lacking = X + 0.3 * rng.standard_normal(X.shape)
    return tables, Moments(X @ X.T, {name: W @ lacking @ X.T for name, W in tables.items()})


def codes(tables: dict[str, np.ndarray], moments: Moments, recipe: Recipe) -> np.ndarray:
    found = quantize_together(tables, moments, SCHEME, recipe)
    return np.concatenate([found[name].matrix.codes for name in NAMES])


def test_the_strength_is_a_part_of_the_way() -> None:
    tables, moments = stage(np.random.default_rng(0))
    own = {name: W.astype(np.float64) @ moments.H for name, W in tables.items()}
    whole = Recipe(asymmetric=True, strength=1.0)
    for strength in (0.0, 0.25, 1.0):
        part = {name: own[name] + strength * (moments.YX[name] - own[name]) for name in NAMES}
        expected = codes(tables, Moments(moments.H, part), whole)
        np.testing.assert_array_equal(codes(tables, moments, replace(whole, strength=strength)), expected)
    np.testing.assert_array_equal(
        codes(tables, moments, replace(whole, strength=0.0)), codes(tables, moments, Recipe())
    )
    assert not np.array_equal(codes(tables, moments, replace(whole, strength=0.25)), codes(tables, moments, whole))


def test_every_row_has_the_grid_that_loses_less() -> None:
    tables, moments = stage(np.random.default_rng(1))
    W = np.concatenate([tables[name] for name in NAMES])
    H = Problem(W, moments.H).damped()
    elimination = Elimination.of(H)
    losses = []
    for grid in (range_grid(W, SCHEME, 32), searched_grid(W, SCHEME, 32, elimination.importance())):
        losses.append(row_losses(W, grid.values(round_columns(W, elimination, grid)), H))
    found = quantize_together(tables, moments, SCHEME, Recipe(search=True))
    values = np.concatenate([found[name].matrix.values() for name in NAMES])
    np.testing.assert_allclose(row_losses(W, values, H), np.minimum(*losses), rtol=1e-9)
    assert (losses[0] < losses[1]).any()
    assert (losses[0] > losses[1]).any()


def test_the_error_is_that_of_the_outputs() -> None:
    tables, moments = stage(np.random.default_rng(2))
    found = quantize_together(tables, moments, SCHEME, Recipe())
    root = np.linalg.cholesky(moments.H)
    for name, W in tables.items():
        lost = np.linalg.norm((W - found[name].matrix.values()) @ root) / np.linalg.norm(W @ root)
        np.testing.assert_allclose(found[name].error, lost, rtol=1e-6)
