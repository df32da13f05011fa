"""AWQ's two searches against plain loops over tokens, groups and rows."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.quantize.awq import clipped_grid, output_loss, scale_of, scaled_moments, search_scale
from paceline.quantize.folding import Producer
from paceline.quantize.grid import Table, range_grid
from paceline.quantize.scheme import Scheme

ASYMMETRIC = Scheme("awq", bits=4, group=32)
SYMMETRIC = Scheme("awq", bits=4, group=32, symmetric=True)
BOTH = [ASYMMETRIC, SYMMETRIC]


def uneven_inputs(rng: np.random.Generator, num_tokens: int = 40, width: int = 64) -> Table:
    """Some inputs are a hundred times as large as others, neighbours are correlated."""
    x = rng.standard_normal((num_tokens, width)) @ (np.eye(width) + 0.5 * np.eye(width, k=1))
    return (x * 10.0 ** rng.uniform(-1, 1, width)).astype(np.float32)


def moments(X: Table) -> np.ndarray:
    return X.T.astype(np.float64) @ X


def rounding(scheme: Scheme):
    return lambda W: (grid := range_grid(W, scheme, 32)).values(grid.codes(W))


def test_the_loss_is_that_of_all_outputs_over_all_tokens() -> None:
    rng = np.random.default_rng(1)
    X, E = uneven_inputs(rng), rng.standard_normal((5, 64)).astype(np.float32)
    expected = sum(float(np.dot(x.astype(np.float64), e)) ** 2 for x in X for e in E)
    assert output_loss(E, moments(X).astype(np.float32)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scheme", BOTH)
@pytest.mark.parametrize("producer", [Producer("norm"), Producer("v", repeats=2, width=16)])
def test_the_scale_is_the_best_of_all_that_were_tried(scheme: Scheme, producer: Producer) -> None:
    rng = np.random.default_rng(2)
    X, W = uneven_inputs(rng), rng.standard_normal((24, 64)).astype(np.float32)
    alphas = (0.0, 0.25, 0.5, 0.75, 1.0)
    found = search_scale(W, moments(X), rounding(scheme), producer, alphas=alphas)

    losses = []
    for alpha in alphas:
        importance = np.sqrt((X.astype(np.float64) ** 2).sum(axis=0))
        if producer.repeats > 1:  # inputs head * 16 + d, two query heads for each of two heads of values
            shared = [(importance[h * 32 + d] + importance[h * 32 + 16 + d]) / 2 for h in range(2) for d in range(16)]
            importance = np.array([shared[i // 32 * 16 + i % 16] for i in range(64)])
        s = importance**alpha
        s /= np.sqrt(s.max() * s.min())
        inputs, weights = X / s, rounding(scheme)((W * s).astype(np.float32))
        losses.append(sum(float(((inputs[t] @ weights.T - X[t] @ W.T) ** 2).sum()) for t in range(len(X))))
    assert found.alpha == alphas[int(np.argmin(losses))] > 0
    assert found.loss == pytest.approx(min(losses), rel=1e-3)
    assert found.plain_loss == pytest.approx(losses[0], rel=1e-3)
    assert found.loss < 0.9 * found.plain_loss
    shared_scales = producer.spread(producer.pool(found.scale, np.mean))
    np.testing.assert_allclose(found.scale, shared_scales, rtol=1e-6)


def test_inputs_that_are_alike_need_no_scale() -> None:
    rng = np.random.default_rng(3)
    W = (rng.integers(-8, 8, (8, 64)) / 8).astype(np.float32)
    W[:, ::32], W[:, 1::32] = -1, 7 / 8
    found = search_scale(W, np.eye(64), rounding(ASYMMETRIC), Producer("norm"))
    assert (found.alpha, found.plain_loss) == (0.0, 0.0)
    np.testing.assert_array_equal(found.scale, np.ones(64))


def test_scales_stay_within_bounds() -> None:
    importance = np.array([0, 1e-30, 3, 1e8], np.float32)
    for alpha in (0.0, 0.5, 1.0):
        scale = scale_of(importance, alpha)
        assert scale.max() * scale.min() == pytest.approx(1, rel=1e-5)
        assert scale.max() / scale.min() <= 1.001e4
    np.testing.assert_array_equal(scale_of(np.zeros(3, np.float32), 0.5), np.ones(3))


@pytest.mark.parametrize("scheme", BOTH)
def test_ranges_are_the_best_of_all_that_were_tried(scheme: Scheme) -> None:
    rng = np.random.default_rng(4)
    X, W = uneven_inputs(rng), rng.standard_t(3, (6, 64)).astype(np.float32)
    shrinks = (1.0, 0.75, 0.5)
    found = clipped_grid(W, moments(X), scheme, 32, shrinks=shrinks)
    values = found.values(found.codes(W))
    clipped = 0
    for row in range(6):
        for group in (slice(0, 32), slice(32, 64)):
            w, x = W[row, group], X[:, group].astype(np.float64)
            losses = []
            for below in shrinks:
                for above in shrinks:
                    if scheme.symmetric and below != above:
                        continue
                    losses.append(float(((x @ (nearest(w, scheme, below, above) - w)) ** 2).sum()))
            loss = float(((x @ (values[row, group] - w)) ** 2).sum())
            assert loss == pytest.approx(min(losses), rel=1e-3)
            clipped += loss < 0.99 * losses[0]
    assert clipped >= 4


def nearest(w: Table, scheme: Scheme, below: float, above: float) -> Table:
    """A group's weights rounded to the 16 values over a part of its range."""
    low, high = min(float(w.min()), 0.0) * below, max(float(w.max()), 0.0) * above
    if scheme.symmetric:
        scale, zero = np.float32(np.float16(max(-low, high) / 7)), 8.0
    else:
        scale = np.float32(np.float16((high - low) / 15))
        zero = float(np.clip(np.rint(-low / scale), 0, 15))
    return scale * (np.clip(np.rint(w / scale) + zero, 0, 15) - zero)


def test_scaled_inputs_have_scaled_moments() -> None:
    rng = np.random.default_rng(5)
    X, scale = uneven_inputs(rng), rng.uniform(0.5, 2, 64).astype(np.float32)
    np.testing.assert_allclose(scaled_moments(moments(X), scale), moments(X / scale), rtol=1e-4, atol=1e-5)
