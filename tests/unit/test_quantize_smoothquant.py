"""SmoothQuant's search against plain loops over tokens and outputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.quantize.folding import Producer
from paceline.quantize.grid import Table, range_grid
from paceline.quantize.scheme import Scheme
from paceline.quantize.smoothquant import rounded_per_token, search_smoothing

SCHEME = Scheme("smoothquant", bits=8, group=None, symmetric=True)
STRENGTHS = (0.25, 0.5, 0.75)
WIDTH = 32


def rounded(W: Table) -> Table:
    grid = range_grid(W, SCHEME, W.shape[1])
    return grid.values(grid.codes(W))


def inputs_with_outliers(rng: np.random.Generator, num_tokens: int = 24) -> Table:
    x = rng.standard_normal((num_tokens, WIDTH))
    x[:, 3] *= 60
    x[0, 9] = 300
    return x.astype(np.float32)


def plain_loss(W: Table, X: Table, scale: np.ndarray, token_weights: np.ndarray) -> float:
    """Token by token and output by output, in float64."""
    total = 0.0
    for t, x in enumerate(X.astype(np.float64)):
        step = np.abs(x / scale).max() / 127
        codes = np.rint(x / scale / step)
        for w in W.astype(np.float64):
            weight_step = np.abs(w * scale).max() / 127
            weight_codes = np.rint(w * scale / weight_step)
            total += (token_weights[t] * (codes @ weight_codes * step * weight_step - x @ w)) ** 2
    return total


@pytest.mark.parametrize("producer", [Producer("norm"), Producer("v", repeats=2, width=8)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_factors_are_the_best_of_all_that_were_tried(producer: Producer, weighted: bool) -> None:
    rng = np.random.default_rng(1)
    X, W = inputs_with_outliers(rng), rng.standard_normal((6, WIDTH)).astype(np.float32)
    token_weights = rng.uniform(0.1, 2, len(X)).astype(np.float32) if weighted else np.ones(len(X), np.float32)
    largest = np.abs(X).max(axis=0)
    found = search_smoothing(
        W,
        X,
        rounded,
        producer,
        largest=largest,
        token_weights=token_weights if weighted else None,
        strengths=STRENGTHS,
    )

    def shared(numbers: np.ndarray, reduce) -> np.ndarray:
        """Input head * 8 + d; query heads 0 and 1 share values, 2 and 3 do."""
        if producer.repeats == 1:
            return numbers
        return np.array(
            [reduce([numbers[i // 16 * 16 + i % 8], numbers[i // 16 * 16 + 8 + i % 8]]) for i in range(WIDTH)]
        )

    most_x, most_w = shared(largest, np.max), shared(np.abs(W).max(axis=0), np.max)
    rms = shared(np.sqrt((X.astype(np.float64) ** 2).mean(axis=0)), np.mean)
    losses = {("none", 0.0): plain_loss(W, X, np.ones(WIDTH), token_weights)}
    for strength in STRENGTHS:
        for family, factors in (("largest", most_x**strength / most_w ** (1 - strength)), ("rms", rms**strength)):
            scale = factors / np.sqrt(factors.max() * factors.min())
            losses[family, strength] = plain_loss(W, X, scale, token_weights)
    least = min(losses, key=losses.__getitem__)
    assert (found.family, found.strength) == least
    assert found.loss == pytest.approx(losses[least], rel=1e-3)
    assert found.plain_loss == pytest.approx(losses["none", 0.0], rel=1e-3)
    assert found.loss < 0.5 * found.plain_loss
    np.testing.assert_array_equal(found.scale, producer.spread(producer.pool(found.scale, np.mean)))


def test_uneven_weights_get_the_papers_factors() -> None:
    """max|X|^alpha / max|W|^(1 - alpha): only factors that look at the weights even them out."""
    rng = np.random.default_rng(4)
    X = rng.standard_normal((24, WIDTH)).astype(np.float32)
    W = (rng.standard_normal((6, WIDTH)) * 10.0 ** rng.uniform(-1.5, 1.5, WIDTH)).astype(np.float32)
    largest = np.abs(X).max(axis=0)
    found = search_smoothing(W, X, rounded, Producer("norm"), largest=largest, strengths=(0.75,))
    assert (found.family, found.strength) == ("largest", 0.75)
    factors = largest**0.75 / np.abs(W).max(axis=0) ** 0.25
    np.testing.assert_allclose(found.scale, factors / np.sqrt(factors.max() * factors.min()), rtol=1e-5)


def test_inputs_that_round_exactly_are_not_smoothed() -> None:
    rng = np.random.default_rng(2)
    X = rng.integers(-127, 128, (8, WIDTH)).astype(np.float32)
    W = rng.integers(-127, 128, (4, WIDTH)).astype(np.float32)
    X[:, 0], W[:, 0] = 127, -127
    found = search_smoothing(W, X, rounded, Producer("norm"), largest=np.abs(X).max(axis=0))
    assert (found.family, found.plain_loss) == ("none", 0.0)
    np.testing.assert_array_equal(found.scale, np.ones(WIDTH))


def test_inputs_that_are_always_zero_have_finite_factors() -> None:
    rng = np.random.default_rng(3)
    X, W = inputs_with_outliers(rng), rng.standard_normal((6, WIDTH)).astype(np.float32)
    X[:, 5] = 0
    W[:, 7] = 0
    found = search_smoothing(W, X, rounded, Producer("norm"), largest=np.abs(X).max(axis=0))
    assert np.isfinite(found.scale).all()
    assert (found.scale > 0).all()
    nothing = search_smoothing(W, 0 * X, rounded, Producer("norm"), largest=np.zeros(WIDTH, np.float32))
    np.testing.assert_array_equal(nothing.scale, np.ones(WIDTH))


def test_every_token_has_a_scale_of_its_own() -> None:
    X = np.zeros((3, WIDTH), np.float32)
    X[0, :3] = 127, -63.4, 0.5
    X[1, :3] = -1.27, 0.011, 0.004
    expected = np.zeros_like(X)
    expected[0, :3] = 127, -63, 0
    expected[1, :3] = -1.27, 0.01, 0
    np.testing.assert_allclose(rounded_per_token(X), expected, rtol=1e-6)


def test_a_scheme_that_is_not_w8a8_is_no_smoothquant() -> None:
    assert SCHEME.per_token
    assert not replace(SCHEME, method="rtn").per_token
