"""Draws that depend on nothing but (seed, position, token): Philox random words and the Gumbel-max rule.

Source: Philox4x32-10 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Gumbel-max (Gumbel 1954).

Notation
    w  32-bit word of the generator for one token
    u  (w + 1/2) / 2^32, so 0 < u < 1
    G  -log(-log u), standard Gumbel noise
    z, p  as in sampling/distribution.py

argmax_i (z_i + G_i) over the kept tokens is a draw from p, and the noise of a token does not depend on which others are
kept.

Departures: native code computes G in float32, so where the two best scores differ by less than about 1e-5 it may choose
the other.

Checked by: tests/unit/test_sampling_draw.py (Random123's known answers, frequencies against ``probabilities``),
tests/native/test_sample.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.distribution import NoTokenError, kept, log_softmax, top_alternatives, transform
from paceline.sampling.rows import BAD_TOKEN, NOT_FINITE, SampledRows, SampleRows

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Ten rounds of Philox: ``counter`` [n, 4] u32 and two 32-bit key words give words [n, 4] u32."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def words(seed: int, position: int, count: int) -> NDArray[np.uint32]:
    """The words [count] u32 of tokens 0..count-1 for the draw at ``position``."""
    blocks = -(-count // 4)
    counter = np.zeros((blocks, 4), np.uint32)
    counter[:, 0] = np.arange(blocks)
    counter[:, 1] = position
    return philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:count]


def uniforms(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """Numbers strictly between 0 and 1, one a token."""
    return (words(seed, position, count).astype(np.float64) + 0.5) * 2.0**-32


def acceptance_uniforms(seed: int, position: int, start: int, count: int) -> NDArray[np.float64]:
    """Numbers ``start`` .. ``start + count - 1`` of a step whose first drawn token is at ``position``, strictly between
    0 and 1: what speculative verification accepts by.

    Number i has counter (i, position, 1, 0); the noise of tokens has 0 in the third word, so none is used twice. It is
    (k + 1/2) / 2^52 with k the first 52 bits: 32 would never choose a token of probability 1e-10.
    """
    counter = np.zeros((count, 4), np.uint32)
    counter[:, 0] = np.arange(start, start + count)
    counter[:, 1] = position
    counter[:, 2] = 1
    drawn = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).astype(np.uint64)
    k = (drawn[:, 0] << np.uint64(20)) | (drawn[:, 1] >> np.uint64(12))
    return (k.astype(np.float64) + 0.5) * 2.0**-52


def gumbel(seed: int, position: int, count: int) -> NDArray[np.float64]:
    """Standard Gumbel noise, one a token."""
    u = uniforms(seed, position, count)
    # -log(u) = -log1p(u - 1) keeps its precision where u is close to 1, which decides the largest noise.
    noise: NDArray[np.float64] = -np.log(-np.where(u < 0.5, np.log(u), np.log1p(u - 1.0)))
    return noise


def scores(z: NDArray[np.float32], row: np.void) -> NDArray[np.float64]:
    """z + G [vocab], -inf for tokens that top_k, top_p and min_p remove; the token drawn is its argmax."""
    noisy = z.astype(np.float64) + gumbel(int(row["seed"]), int(row["position"]), len(z))
    return np.where(kept(z, row), noisy, -np.inf)


def choose(logits: NDArray[np.float32], row: np.void, lists: SampleRows) -> int:
    """The token of one output. Raises ``NoTokenError``."""
    if row["forced"] >= 0:
        if row["forced"] >= len(logits):
            raise NoTokenError("the forced token lies outside the vocabulary", BAD_TOKEN)
        if not np.isfinite(logits).all():
            raise NoTokenError("a logit is not finite", NOT_FINITE)
        return int(row["forced"])
    z = transform(logits, row, lists)
    return int(np.argmax(z if row["temperature"] == 0 else scores(z, row)))


def sample_reference(logits: NDArray[np.float32], samples: SampleRows) -> SampledRows:
    """Chooses the token of every output and reports log-probabilities of the model's own logits [outputs, vocab].

    An output for which no token can be chosen gets token -1, its status, and reports nothing.
    """
    rows = samples.rows
    width = max(0, int(rows["num_logprobs"].max())) if len(rows) else 0
    tokens = np.full(len(rows), -1, np.int32)
    logprobs = np.full(len(rows), np.nan, np.float32)
    top_tokens = np.full((len(rows), width), -1, np.int32)
    top_logprobs = np.full((len(rows), width), np.nan, np.float32)
    status = np.zeros(len(rows), np.uint32)
    for i, row in enumerate(rows):
        try:
            tokens[i] = choose(logits[i], row, samples)
        except NoTokenError as error:
            status[i] = error.status
            continue
        if row["num_logprobs"] >= 0:
            logprobs[i] = log_softmax(logits[i])[tokens[i]]
            ids, values = top_alternatives(logits[i], int(row["num_logprobs"]))
            top_tokens[i, : len(ids)], top_logprobs[i, : len(ids)] = ids, values
    return SampledRows(tokens, logprobs, top_tokens, top_logprobs, status)
