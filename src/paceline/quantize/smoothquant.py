"""SmoothQuant: what makes activations hard to round to int8 with one scale a token moves into the weights.

Source: Xiao, Lin, Seznec, Wu, Demouth, Han 2211.10438, equations 3 and 4.
Notation: X [T, K] inputs of calibration tokens, W [N, K] the weights of all matrices that read them, s [K] the
smoothing factors: X diag(1/s) is rounded with one scale a token, W diag(s) with one an output. alpha is the migration
strength.
Departures:
- alpha is searched for each input, by the error of the outputs with both roundings.
- Beside the paper's s = max|X|^alpha / max|W|^(1 - alpha) a second family is tried, s = rms(X)^alpha. What is large for
  one token in a thousand costs that token's precision only; the weights would pay for it with every token.
- o and down are smoothed too (``folding`` says how), where the authors' code leaves them alone.
- Tokens can count differently, see ``search_smoothing``.
Checked by: tests/unit/test_quantize_smoothquant.py, against plain loops over tokens and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.ops.reference import quantise_activations
from paceline.quantize.folding import Producer
from paceline.quantize.grid import Table

STRENGTHS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
Family = Literal["none", "largest", "rms"]
SMALLEST_MAGNITUDE = 1e-4
"""Of the largest one: inputs that are nearly always 0 would else have factors that nothing can absorb."""


@dataclass(frozen=True)
class Smoothing:
    """``scale`` [K] for the inputs of some matrices; ``loss`` with it and ``plain_loss`` without any."""

    scale: Table
    family: Family
    strength: float
    loss: float
    plain_loss: float


def search_smoothing(
    W: Table,
    X: Table,
    rounded: Callable[[Table], Table],
    producer: Producer,
    *,
    largest: Table,
    token_weights: Table | None = None,
    strengths: Sequence[float] = STRENGTHS,
) -> Smoothing:
    """The factors of the family and strength with the least squared error of the outputs; ones where none is better.

    ``W`` are the matrices that share the input, one above the other; ``rounded`` gives what is left of weights after
    rounding; ``X`` is a sample of tokens, and ``largest`` [K] the largest magnitude of each input over all of them: a
    sample misses what is rare. ``token_weights`` [T] multiply the errors of tokens.
    """
    exact = X @ W.T
    weights = np.ones(len(X), np.float32) if token_weights is None else token_weights

    def loss_of(scale: Table) -> float:
        error = rounded_per_token(X / scale) @ rounded(W * scale).T - exact
        return float(np.einsum("tn,tn,t->", error, error, (weights * weights).astype(np.float64)))

    ones = np.ones(W.shape[1], np.float32)
    plain_loss = loss_of(ones)
    best = Smoothing(ones, "none", 0.0, plain_loss, plain_loss)
    most_input = producer.pool(largest, np.max)
    most_weight = producer.pool(np.abs(W).max(axis=0), np.max)
    rms = producer.pool(np.sqrt(np.einsum("tk,tk->k", X, X) / np.float32(len(X))), np.mean)
    for strength in strengths:
        families: dict[Family, Table] = {
            "largest": _bounded(most_input) ** strength / _bounded(most_weight) ** (1 - strength),
            "rms": _bounded(rms) ** strength,
        }
        for family, factors in families.items():
            scale = producer.spread(_centred(factors))
            loss = loss_of(scale)
            if loss < best.loss:
                best = Smoothing(scale, family, strength, loss, plain_loss)
    return best


def rounded_per_token(x: Table) -> Table:
    """x [tokens, K] rounded to int8 with one scale a token, as the engine does it."""
    codes, scale = quantise_activations(x, group=x.shape[1])
    return np.asarray(codes * scale, np.float32)


def _bounded(magnitudes: Table) -> Table:
    largest = float(magnitudes.max())
    if largest == 0:
        return np.ones_like(magnitudes)
    return np.maximum(magnitudes, np.float32(largest * SMALLEST_MAGNITUDE))


def _centred(factors: Table) -> Table:
    """Divided by the geometric mean of the largest and the smallest one."""
    return np.asarray(factors / np.sqrt(float(factors.max()) * float(factors.min())), np.float32)
