"""From the logits of one output to the distribution its token is drawn from: what native sampling must equal.

Source: top-k (Fan et al. 2018, 1805.04833), top-p (Holtzman et al. 2019, 1904.09751), min-p (Nguyen et al. 2024,
2407.01082), repetition penalty (Keskar et al. 2019, 1909.05858).

Notation
    x [vocab]  the model's own logits, float32
    z [vocab]  after bias, bans, mask, penalties and temperature; float32, rounded at each operation, as natively
    m          max z
    p [vocab]  the distribution that is drawn from, float64

Order: logit_bias, banned, mask, repetition penalty, frequency penalty, presence penalty, temperature, top_k, top_p,
min_p. Each filter sees the distribution that the one before left, renormalised. Tokens are ranked by z descending, then
by id ascending.

Departures: none of the filters can empty the set, since the first-ranked token always passes.

Checked by: tests/unit/test_sampling_distribution.py (against loops over sorted lists), tests/native/test_sample.py.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.rows import BAD_TOKEN, NOT_FINITE, NOTHING_LEFT, SampleRows


class NoTokenError(ValueError):
    """No token can be chosen: a logit is not finite, every token is banned or masked, or an id lies outside the
    vocabulary; ``status`` tells which, as in ``sampling.rows``."""

    def __init__(self, message: str, status: int) -> None:
        self.status = status
        super().__init__(message)


def transform(logits: NDArray[np.float32], row: np.void, lists: SampleRows) -> NDArray[np.float32]:
    """Returns z: logits after bias, bans, mask, penalties and temperature (0 leaves it out). ``logits`` stays.

    logits [vocab] f32; ``row`` one SAMPLE_ROW whose starts and counts address the flat arrays of ``lists``.
    Raises ``NoTokenError``.
    """
    z = np.array(logits, np.float32)
    if not np.isfinite(z).all():
        raise NoTokenError("a logit is not finite", NOT_FINITE)
    vocab_size = len(z)

    def part(values: NDArray[np.int32], name: str) -> NDArray[np.int32]:
        start, count = int(row[f"{name}_start"]), int(row[f"{name}_len"])
        tokens = values[start : start + count]
        if count < 0 or len(tokens) != count or (count and not 0 <= tokens.min() <= tokens.max() < vocab_size):
            raise NoTokenError(f"the {name} list reaches outside the vocabulary or the step's arrays", BAD_TOKEN)
        return tokens

    bias_start, counts_start = int(row["bias_start"]), int(row["counts_start"])
    for j, token in enumerate(part(lists.bias_tokens, "bias")):
        z[token] += lists.bias_values[bias_start + j]
    z[part(lists.banned_tokens, "banned")] = -np.inf
    if row["mask"] >= 0:
        if row["mask"] >= len(lists.mask_words):
            raise NoTokenError("the mask lies outside the step's arrays", BAD_TOKEN)
        z[~allowed_tokens(lists.mask_words[row["mask"]], vocab_size)] = -np.inf
    repetition = np.float32(row["repetition_penalty"])
    frequency = np.float32(row["frequency_penalty"])
    presence = np.float32(row["presence_penalty"])
    for j, token in enumerate(part(lists.count_tokens, "counts")):
        count = np.float32(lists.count_values[counts_start + j])
        z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
        z[token] -= frequency * count
        if count > 0:
            z[token] -= presence
    if row["temperature"] > 0:
        z /= np.float32(row["temperature"])
    if not np.isfinite(z.max()):
        raise NoTokenError("every token is banned or masked, or a logit overflows", NOTHING_LEFT)
    return z


def allowed_tokens(words: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """Which tokens [vocab] a mask [ceil(vocab / 32)] allows."""
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), count=vocab_size, bitorder="little")
    return bits.astype(np.bool_)


def ranking(z: NDArray[np.floating]) -> NDArray[np.int64]:
    """Token ids from most to least likely; equal logits by ascending id."""
    return np.argsort(-z, kind="stable")


def kept(z: NDArray[np.float32], row: np.void) -> NDArray[np.bool_]:
    """Which tokens [vocab] survive top_k, top_p and min_p; at least one."""
    order = ranking(z)
    m = z[order[0]]
    order = order[z[order] > -np.inf]
    if row["top_k"] > 0:
        order = order[: int(row["top_k"])]
    if row["top_p"] < 1:
        mass = np.cumsum(np.exp(z[order].astype(np.float64) - np.float64(m)))
        order = order[: int(np.searchsorted(mass, np.float64(row["top_p"]) * mass[-1])) + 1]
    if row["min_p"] > 0:
        order = order[z[order] - m >= np.float32(math.log(row["min_p"]))]
    keep = np.zeros(len(z), np.bool_)
    keep[order] = True
    return keep


def probabilities(logits: NDArray[np.float32], row: np.void, lists: SampleRows) -> NDArray[np.float64]:
    """The exact distribution p [vocab] that the token of ``row`` is drawn from; at temperature 0 it is one token.

    A forced token is not a draw and is ignored here. Raises ``NoTokenError``.
    """
    z = transform(logits, row, lists)
    p = np.zeros(len(z))
    if row["temperature"] == 0:
        p[np.argmax(z)] = 1.0
        return p
    keep = kept(z, row)
    p[keep] = np.exp(z[keep].astype(np.float64) - np.float64(z.max()))
    p /= p.sum()
    return p


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logarithms of softmax over the last axis, computed in float64."""
    x = np.asarray(logits, np.float64)
    shifted = x - x.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def top_alternatives(logits: NDArray[np.float32], count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The ``count`` most likely ids (or the whole vocabulary) and their log-probabilities, descending, ties by id."""
    tokens = ranking(logits)[:count]
    return tokens.astype(np.int32), log_softmax(logits)[tokens].astype(np.float32)
