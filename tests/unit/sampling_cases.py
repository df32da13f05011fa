"""The sampling kernel, and rows and logits that try all of it: what tests of draws and of distributions share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import _native
from paceline.sampling.distribution import NoTokenError, ranking, transform
from paceline.sampling.draw import scores
from paceline.sampling.rows import SampledRows, SampleRows, greedy_rows

COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"num_logprobs": 0},
    {"num_logprobs": 5},
    {"forced": 0, "num_logprobs": 3, "temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "num_logprobs": 2},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 1.5, "top_k": 1000},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 1e-6},
    {"temperature": 1.0, "top_p": 0.94},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "num_logprobs": 4},
    {"repetition_penalty": 1.4, "counts": {0: 1}},
    {
        "temperature": 0.8,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.6,
        "frequency_penalty": -0.7,
        "counts": {0: 2},
    },
    {"temperature": 0.8, "bias": {0: 6.5}, "num_logprobs": 1},
    {"temperature": 0.8, "banned": [0], "num_logprobs": 1},
]


def sample_native(isa: str, logits: NDArray[np.float32], samples: SampleRows) -> tuple[SampledRows, NDArray[np.uint32]]:
    """What the kernel chose for each row of logits, and its status."""
    count = len(logits)
    width = max(0, int(samples.rows["num_logprobs"].max())) if count else 0
    result = SampledRows(
        np.zeros(count, np.int32),
        np.zeros(count, np.float32),
        np.zeros((count, width), np.int32),
        np.zeros((count, width), np.float32),
    )
    status = np.full(count, 99, np.uint32)
    _native.sample(
        isa,
        logits,
        np.ascontiguousarray(samples.rows).view(np.uint8).reshape(-1),
        samples.count_tokens,
        samples.count_values,
        samples.bias_tokens,
        samples.bias_values,
        samples.banned_tokens,
        samples.mask_words,
        result.tokens,
        result.logprobs,
        result.top_tokens,
        result.top_logprobs,
        status,
    )
    return result, status


def decision_margin(logits: NDArray[np.float32], samples: SampleRows, i: int) -> float:
    """How far row i's choice is from another one, over the rounding that the kernel may differ by; infinite if exact.

    A score is z + G rounded once (|score| * 2^-24), with G off by at most 5e-6: 4e-7 from -log u, and 3 ulp of a
    logarithm below 23. Masses are sums of exponentials in float32, off by less than 1e-5 of the total.
    """
    row = samples.rows[i]
    if row["forced"] >= 0 or row["temperature"] == 0:
        return np.inf
    try:
        z = transform(logits[i], row, samples)
    except NoTokenError:
        return np.inf
    margins = [np.inf]
    ranked = np.sort(scores(z, row))[::-1]
    best, others = ranked[0], ranked[1:][np.isfinite(ranked[1:])]
    if len(others):
        margins.append(((best - others) / (1e-5 + (np.abs(best) + np.abs(others)) * 2.0**-24)).min())
    if row["top_p"] < 1:
        order = ranking(z)
        order = order[z[order] > -np.inf]
        if row["top_k"] > 0:
            order = order[: row["top_k"]]
        mass = np.cumsum(np.exp(z[order].astype(np.float64) - z.max()))
        if len(mass) > 1:
            margins.append(np.abs(mass[:-1] / mass[-1] - row["top_p"]).min() / 1e-5)
    return float(min(margins))


def language_model_like(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    """A few thousand plausible tokens over a broad floor."""
    x = rng.standard_normal(size) * 2.0
    x[: size // 20] += np.linspace(16, 0, size // 20)
    return rng.permutation(x).astype(np.float32)


def mixed_rows(rng: np.random.Generator, count: int) -> SampleRows:
    """That many rows of many parameters, without lists."""
    samples = greedy_rows(count)
    samples.rows["seed"] = rng.integers(0, 2**63, count)
    samples.rows["position"] = rng.integers(0, 2**20, count)
    samples.rows["temperature"] = rng.choice([0.0, 0.5, 1.0, 2.0], count)
    samples.rows["top_k"] = rng.choice([0, 0, 3, 50], count)
    samples.rows["top_p"] = rng.choice([1.0, 0.9, 0.3], count)
    samples.rows["min_p"] = rng.choice([0.0, 0.0, 0.1], count)
    samples.rows["num_logprobs"] = rng.choice([-1, 0, 10], count)
    return samples
