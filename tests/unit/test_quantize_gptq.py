"""GPTQ equals the textbook's update, meets what it is asked to meet, and beats rounding."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.quantize.gptq import Elimination, Problem, inverse_factor, proxy_loss, round_columns
from paceline.quantize.grid import Grid, range_grid
from paceline.quantize.moments import Moments
from paceline.quantize.recipe import Recipe, quantize_together
from paceline.quantize.scheme import Scheme

SCHEME = Scheme("gptq", 4, 32)


def problem(rng: np.random.Generator, outputs: int = 7, inputs: int = 96) -> tuple[np.ndarray, np.ndarray]:
    mixing = rng.standard_normal((inputs, inputs)) * rng.uniform(0.1, 3, inputs)
    X = mixing @ rng.standard_normal((inputs, 4 * inputs))
    return rng.standard_normal((outputs, inputs)).astype(np.float32), X @ X.T


def textbook(W: np.ndarray, H: np.ndarray, grid: Grid) -> np.ndarray:
    """Optimal brain surgeon, a column at a time, in order of falling diagonal: every column not yet rounded is moved
    by the error times a row of the inverse of what is left of H."""
    W = W.copy()
    order = list(np.argsort(-np.diagonal(H), kind="stable"))
    codes = np.zeros_like(W)
    while order:
        inverse = np.linalg.inv(H[np.ix_(order, order)])
        column = order[0]
        s, z = grid.scale[:, column // grid.group], grid.zero[:, column // grid.group]
        codes[:, column] = np.clip(np.rint(W[:, column] / s) + z, 0, grid.highest_code)
        error = W[:, column] - s * (codes[:, column] - z)
        W[:, order] -= np.outer(error / inverse[0, 0], inverse[0])
        order.pop(0)
    return codes


@pytest.mark.parametrize("block", [1, 5, 16, 32, 96, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_every_block_size_gives_the_textbook_codes(block: int, seed: int) -> None:
    W, G = problem(np.random.default_rng(seed))
    H = Problem(W, G).damped()
    grid = range_grid(W, SCHEME, 32)
    expected = textbook(W.astype(np.float64), H, grid)
    # Codes are whole numbers: a slice that is corrected twice, or not at all, changes hundreds of them.
    np.testing.assert_array_equal(round_columns(W.astype(np.float64), Elimination.of(H), grid, block=block), expected)


def test_the_loss_is_below_that_of_rounding() -> None:
    for seed in range(5):
        W, G = problem(np.random.default_rng(seed), outputs=20)
        H = Problem(W, G).damped()
        grid = range_grid(W, SCHEME, 32)
        exact = W.astype(np.float64)
        rounded = proxy_loss(exact, grid.values(grid.codes(W)), H)
        assert proxy_loss(exact, grid.values(round_columns(exact, Elimination.of(H), grid)), H) < 0.7 * rounded


def test_without_correlation_it_is_rounding() -> None:
    rng = np.random.default_rng(0)
    W = rng.standard_normal((6, 64)).astype(np.float32)
    H = np.diag(rng.uniform(1, 9, 64))
    grid = range_grid(W, SCHEME, 32)
    np.testing.assert_array_equal(round_columns(W.astype(np.float64), Elimination.of(H), grid), grid.codes(W))


def test_the_factor_is_of_the_inverse() -> None:
    _, H = problem(np.random.default_rng(0), inputs=40)
    U = inverse_factor(H)
    assert np.array_equal(U, np.triu(U))
    np.testing.assert_allclose(U.T @ U @ H, np.eye(40), atol=1e-6)


def test_importance_is_the_least_cost_of_an_error() -> None:
    """Move one weight by 1 and the others freely: the least e H e^T."""
    _, H = problem(np.random.default_rng(4), inputs=12)
    importance = Elimination.of(H).importance()
    for column in range(12):
        others = [other for other in range(12) if other != column]
        e = np.ones(12)
        e[others] = -np.linalg.solve(H[np.ix_(others, others)], H[others, column])
        assert importance[column] == pytest.approx(e @ H @ e, rel=1e-6)


def test_dead_inputs_do_not_break_the_factor_and_keep_their_nearest_codes() -> None:
    W, H = problem(np.random.default_rng(1))
    H[:, 5] = H[5] = 0
    damped = Problem(W, H).damped()
    grid = range_grid(W, SCHEME, 32)
    codes = round_columns(W.astype(np.float64), Elimination.of(damped), grid)
    np.testing.assert_array_equal(codes[:, 5], grid.codes(W)[:, 5])


def test_inputs_that_are_all_zero_are_rounded_to_nearest() -> None:
    W, H = problem(np.random.default_rng(1))
    nothing = Problem(W, 0 * H).damped()
    grid = range_grid(W, SCHEME, 32)
    codes = round_columns(W.astype(np.float64), Elimination.of(nothing), grid)
    np.testing.assert_array_equal(codes, grid.codes(W))


def test_how_large_all_moments_are_does_not_matter() -> None:
    """A dead input with a weight of its own would count for nothing, or for more than all others."""
    W, H = problem(np.random.default_rng(1))
    H[:, 5] = H[5] = 0
    found = []
    for factor in (1, 2.0**-30):  # exact
        moments = Moments(factor * H, {"w": factor * (W @ H)})
        found.append(quantize_together({"w": W}, moments, SCHEME, Recipe.named("best"))["w"].matrix)
    np.testing.assert_array_equal(found[0].codes, found[1].codes)
    np.testing.assert_array_equal(found[0].scale, found[1].scale)
    np.testing.assert_array_equal(found[0].zero, found[1].zero)


def test_the_target_is_the_least_squares_solution() -> None:
    """Against a solver that sees the tokens themselves: rows of damping below them."""
    rng = np.random.default_rng(2)
    W0 = rng.standard_normal((5, 24)).astype(np.float32)
    X = rng.standard_normal((24, 200))
    Y = W0 @ (X + 0.1 * rng.standard_normal(X.shape)) + 0.1 * rng.standard_normal((5, 200))
    problem = Problem(W0, X @ X.T, Y @ X.T)
    H = problem.damped()
    ridge = np.sqrt(H[0, 0] - problem.H[0, 0]) * np.eye(24)
    solution, *_ = np.linalg.lstsq(np.vstack([X.T, ridge]), np.vstack([Y.T, ridge @ W0.T]), rcond=None)
    np.testing.assert_allclose(problem.target(H), solution.T, atol=1e-9)
