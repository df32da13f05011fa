"""Scores of rows against their definition in f64, written word by word."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.measure.quality.divergence import kl_rows, score_rows


def log_probabilities(logits: np.ndarray) -> list[float]:
    """log-softmax of one row in f64."""
    values = [float(value) for value in logits]
    partition = math.log(sum(math.exp(value - max(values)) for value in values)) + max(values)
    return [value - partition for value in values]


def divergence(reference: np.ndarray, model: np.ndarray) -> float:
    """KL(reference || model) of one row in f64."""
    p, q = log_probabilities(reference), log_probabilities(model)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def cases() -> list[tuple[np.ndarray, np.ndarray]]:
    """Logits of two models: near each other, far apart, flat, peaked, and far from 0."""
    rng = np.random.default_rng(1)
    plain = (rng.standard_normal((6, 11)) * 3).astype(np.float32)
    flat = np.zeros((6, 11), np.float32)
    peaked = plain.copy()
    peaked[:, 4] = 60
    return [
        (plain, plain + (rng.standard_normal(plain.shape) * 0.1).astype(np.float32)),
        (plain, plain[::-1].copy()),
        (flat, plain),
        (peaked, plain),
        (plain, peaked),
        (plain + np.float32(500), plain - np.float32(500)),
    ]


@pytest.mark.parametrize(("reference", "model"), cases())
def test_scores_are_their_definition(reference: np.ndarray, model: np.ndarray) -> None:
    targets = np.array([0, 3, 10, 4, 4, 7], np.int32)
    before = reference.copy(), model.copy()
    p = np.empty_like(reference)
    scored, other = score_rows(reference, targets, p), score_rows(model, targets)
    kl = kl_rows(reference, scored, p, model, other)
    # An f32 logit of size s is known to s 2^-24, and here sizes go up to 500.
    size = max(float(np.abs(reference).max()), float(np.abs(model).max()))
    bound = 1e-6 * max(1.0, size)
    for row, target in enumerate(targets):
        expected = log_probabilities(reference[row])
        assert scored.nll[row] == pytest.approx(-expected[target], abs=bound)
        assert scored.top[row] == int(np.argmax(expected))
        assert kl[row] == pytest.approx(divergence(reference[row], model[row]), rel=1e-6, abs=bound)
        assert p[row].astype(np.float64) == pytest.approx(np.exp(expected), rel=1e-5, abs=1e-12)
    assert (before[0] == reference).all()
    assert (before[1] == model).all()


def test_a_model_is_nothing_away_from_itself() -> None:
    logits = (np.random.default_rng(2).standard_normal((50, 1001)) * 5).astype(np.float32)
    targets = np.zeros(50, np.int32)
    p = np.empty_like(logits)
    one = score_rows(logits, targets, p)
    assert (kl_rows(logits, one, p, logits.copy(), score_rows(logits.copy(), targets)) == 0.0).all()


def test_first_of_equal_logits_is_the_likeliest() -> None:
    assert score_rows(np.array([[1, 2, 2, 0]], np.float32), np.zeros(1, np.int32)).top.tolist() == [1]
