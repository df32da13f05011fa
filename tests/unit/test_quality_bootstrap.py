"""The interval of a mean covers it as often as it says, also where neighbours are correlated."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.measure.quality.bootstrap import BLOCK_TOKENS, MIN_BLOCKS, mean_interval


def series(rng: np.random.Generator, length: int, memory: float) -> np.ndarray:
    """A stationary series of mean 2 in which each value keeps a part of the one before."""
    noise = rng.standard_normal(length)
    values = np.empty(length)
    values[0] = noise[0] / np.sqrt(1 - memory**2)
    for at in range(1, length):
        values[at] = memory * values[at - 1] + noise[at]
    return values + 2.0


def coverage(memory: float, block: int, *, num_series: int = 400) -> float:
    """How often the interval holds the true mean."""
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(num_series):
        interval = mean_interval(series(rng, 40 * BLOCK_TOKENS, memory), block=block)
        assert interval is not None
        hits += interval[0] <= 2.0 <= interval[1]
    return hits / num_series


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8])
def test_interval_covers_the_mean(memory: float) -> None:
    # 400 draws of 95 % deviate by 1.1 %; 40 blocks are a little too sure.
    assert 0.91 <= coverage(memory, BLOCK_TOKENS) <= 0.985


def test_blocks_are_needed() -> None:
    assert coverage(0.8, 1) < 0.65


def test_interval_of_what_is_constant_is_a_point() -> None:
    assert mean_interval(np.full(5000, 0.25)) == (0.25, 0.25)


def test_last_block_counts_by_its_tokens() -> None:
    # Of 20 blocks 19 are whole zeros and the last is a single one: a resample's mean is far below 1/20.
    values = np.zeros(19 * BLOCK_TOKENS + 1)
    values[-1] = 1.0
    interval = mean_interval(values)
    assert interval is not None
    assert interval[1] < 0.01


def test_short_texts_have_no_interval_and_seeds_repeat() -> None:
    values = np.random.default_rng(0).standard_normal(MIN_BLOCKS * BLOCK_TOKENS)
    assert mean_interval(values[: (MIN_BLOCKS - 1) * BLOCK_TOKENS]) is None
    assert mean_interval(values) == mean_interval(values)
    assert mean_interval(values) != mean_interval(values, seed=1)
