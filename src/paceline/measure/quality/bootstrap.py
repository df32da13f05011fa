"""Confidence intervals of a mean over the tokens of a text, which are not independent of each other.

Source: Carlstein (1986), non-overlapping blocks; Efron (1979), the percentile interval.

Notation: n tokens in b blocks of l consecutive ones (the last may be shorter). A resample draws b blocks with
replacement; its mean is the sum of their values over the number of their tokens.

Departures: none. The interval ends at the 2.5th and 97.5th percentile of the resampled means. With few blocks it is
too short (about 93 % for 20 independent ones, 94.5 % for 80), so there is none below ``MIN_BLOCKS``.

Checked by: tests/unit/test_quality_bootstrap.py, which counts how often it covers the mean of correlated series.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 64
"""Some sentences: scores of neighbouring tokens are correlated, those of tokens 64 apart hardly."""

MIN_BLOCKS = 20
NUM_RESAMPLES = 2000
LEVEL = 0.95


def mean_interval(
    values: NDArray[np.float64], *, block: int = BLOCK_TOKENS, seed: int = 0, level: float = LEVEL
) -> tuple[float, float] | None:
    """The interval of the mean of ``values`` [n]; None for fewer than ``MIN_BLOCKS`` blocks. The same seed and n give
    the same resamples, whatever the values."""
    starts = np.arange(0, len(values), block)
    if len(starts) < MIN_BLOCKS:
        return None
    sums = np.add.reduceat(values, starts)
    counts = np.diff([*starts, len(values)])
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(starts), (NUM_RESAMPLES, len(starts)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
