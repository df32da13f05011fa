"""Coordinate descent: the loss never rises, the blocked sweep is the plain one, and a fixed point is a fixed point."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.quantize.gptq import Elimination, Problem, proxy_loss, round_columns
from paceline.quantize.grid import Grid, range_grid
from paceline.quantize.refine import refine
from paceline.quantize.scheme import Scheme


def start(seed: int, *, symmetric: bool = False, bits: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray, Grid]:
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((9, 128)).astype(np.float32)
    X = (rng.standard_normal((128, 128)) * rng.uniform(0.1, 3, 128)) @ rng.standard_normal((128, 500))
    H = Problem(W, X @ X.T).damped()
    grid = range_grid(W, Scheme("gptq", bits, 64, symmetric), 64)
    exact = W.astype(np.float64)
    return exact, H, round_columns(exact, Elimination.of(H), grid), grid


def plain_sweep(W: np.ndarray, H: np.ndarray, codes: np.ndarray, grid: Grid) -> np.ndarray:
    """One pass over codes alone, with the whole gradient computed anew for each column."""
    codes = codes.copy()
    for column in range(len(H)):
        G = (W - grid.values(codes)) @ H
        s = grid.scale[:, column // grid.group]
        codes[:, column] = np.clip(
            np.rint(codes[:, column] + G[:, column] / (H[column, column] * s)), 0, grid.highest_code
        )
    return codes


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_each_sweep_lowers_the_loss(symmetric: bool, bits: int) -> None:
    for seed in range(4):
        W, H, codes, grid = start(seed, symmetric=symmetric, bits=bits)
        before = proxy_loss(W, grid.values(codes), H)
        first = before
        for _ in range(4):
            codes, grid = refine(W, H, codes, grid, sweeps=1, symmetric=symmetric)
            loss = proxy_loss(W, grid.values(codes), H)
            assert loss <= before * (1 + 1e-9)
            before = loss
        assert before < 0.95 * first
        assert ((codes >= 0) & (codes <= grid.highest_code) & (codes == np.rint(codes))).all()
        np.testing.assert_array_equal(grid.scale, grid.scale.astype(np.float16))
        assert not symmetric or (grid.zero == 1 << (bits - 1)).all()


def test_a_sweep_over_codes_is_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.quantize.refine._Descent.move_scale", lambda *args: None)
    monkeypatch.setattr("paceline.quantize.refine.BLOCK", 24)
    W, H, codes, grid = start(0)
    swept, _ = refine(W, H, codes, grid, sweeps=1, symmetric=True)
    np.testing.assert_array_equal(swept, plain_sweep(W, H, codes, grid))
    assert not np.array_equal(swept, codes)


@pytest.mark.parametrize("symmetric", [False, True])
def test_where_it_ends_no_single_step_is_better(symmetric: bool) -> None:
    """Brute force on a tiny case: every code, every zero point and scales about each, one at a time."""
    W, H, codes, grid = start(2, symmetric=symmetric)
    W = W[:2]
    codes, grid = codes[:2], Grid(grid.scale[:2], grid.zero[:2], 64, grid.highest_code)
    codes, grid = refine(W, H, codes, grid, sweeps=60, symmetric=symmetric)
    least = proxy_loss(W, grid.values(codes), H) * (1 - 1e-9)
    for row, column in np.ndindex(codes.shape):
        for code in range(grid.highest_code + 1):
            tried = codes.copy()
            tried[row, column] = code
            assert proxy_loss(W, grid.values(tried), H) >= least
    for row, group in np.ndindex(grid.scale.shape):
        for zero in [] if symmetric else range(grid.highest_code + 1):
            other = grid.zero.copy()
            other[row, group] = zero
            assert proxy_loss(W, Grid(grid.scale, other, 64, grid.highest_code).values(codes), H) >= least
        stored = np.float16(grid.scale[row, group])
        for scale in {*np.linspace(0.5, 2, 61).astype(np.float16) * stored, np.nextafter(stored, np.float16(0))}:
            moved = grid.scale.copy()
            moved[row, group] = scale
            assert proxy_loss(W, Grid(moved, grid.zero, 64, grid.highest_code).values(codes), H) >= least


def test_zero_points_move_where_that_helps_and_only_if_they_may() -> None:
    """Half of the weights are below all that a zero point of 0 can reach, whatever the scale."""
    codes = np.random.default_rng(0).choice([0, 7], (3, 64)).astype(np.float32)
    grid = Grid(np.ones((3, 1), np.float32), np.zeros((3, 1), np.float32), 64, 7)
    W = codes.astype(np.float64) - 3
    _, free = refine(W, np.eye(64), codes, grid, sweeps=4, symmetric=False)
    assert (free.zero > 0).all()
    _, fixed = refine(W, np.eye(64), codes, grid, sweeps=4, symmetric=True)
    np.testing.assert_array_equal(fixed.zero, grid.zero)


def test_the_arguments_are_not_modified_and_what_cannot_improve_stays() -> None:
    W, H, codes, grid = start(1)
    kept = codes.copy(), grid.scale.copy(), grid.zero.copy()
    refine(W, H, codes, grid, sweeps=2, symmetric=False)
    for table, before in zip((codes, grid.scale, grid.zero), kept, strict=True):
        np.testing.assert_array_equal(table, before)
    exact = grid.values(codes).astype(np.float64)
    again, same = refine(exact, H, codes, grid, sweeps=2, symmetric=False)
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(same.scale, grid.scale)
