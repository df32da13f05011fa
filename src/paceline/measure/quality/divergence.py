"""What one token's distributions say of two models: log-probability, KL divergence, and whether the likeliest agree.

Source: Kullback and Leibler (1951); per token as in llama.cpp's ``--kl-divergence``.

Notation: r, m logits [vocab] of the reference and of the model; Z = sum exp(logit - max) and log Z' = max + log Z its
partition; p = exp(r) / Z'_r. KL(p || q) = sum p (r - m) - log Z'_r + log Z'_m, in nats.

Departures: exponentials are f32 (numpy's, within 2 ulp), their sums f64; both partitions of a model compared with
itself are the same number, so that its KL is exactly 0. The rounding of x = logit - max moves a term by |x| 2^-24,
so log Z' is right to about 1e-6 and mostly to 1e-7, and KL to about 1e-6 a token, with either sign; a mean over
thousands of tokens is much better than that.

Checked by: tests/unit/test_quality_divergence.py, against a plain f64 definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class ScoredRows:
    """A model's scores: ``log_partition`` [rows] f64, ``nll`` [rows] f64 in nats, ``top`` [rows] the likeliest id."""

    log_partition: NDArray[np.float64]
    nll: NDArray[np.float64]
    top: NDArray[np.int64]


def score_rows(logits: Logits, targets: NDArray[np.int32], weights: Logits | None = None) -> ScoredRows:
    """Scores of the tokens ``targets`` [rows] under ``logits`` [rows, vocab], which it does not modify.

    ``weights`` [rows, vocab], when given, receives p. The first of equally likely ids counts as the likeliest.
    """
    num_rows, vocab = logits.shape
    top = np.argmax(logits, axis=1)
    log_partition = np.empty(num_rows)
    scratch = np.empty(vocab, np.float32)
    # Row by row: a row of 49k fits the cache, and whole matrices of temporaries cost 20 times as much in page faults.
    for row in range(num_rows):
        values = scratch if weights is None else weights[row]
        largest = logits[row, top[row]]
        np.subtract(logits[row], largest, out=values)
        np.exp(values, out=values)
        partition = float(values.sum(dtype=np.float64))
        log_partition[row] = float(largest) + np.log(partition)
        if weights is not None:
            np.multiply(values, np.float32(1.0 / partition), out=values)
    chosen = logits[np.arange(num_rows), targets].astype(np.float64)
    return ScoredRows(log_partition, log_partition - chosen, top)


def kl_rows(
    reference_logits: Logits, reference: ScoredRows, weights: Logits, logits: Logits, model: ScoredRows
) -> NDArray[np.float64]:
    """KL(reference || model) of each row [rows], in nats; ``weights`` are those that ``score_rows`` left of the
    reference."""
    num_rows, vocab = logits.shape
    weighted = np.empty(num_rows)
    scratch = np.empty(vocab, np.float32)
    for row in range(num_rows):
        np.subtract(reference_logits[row], logits[row], out=scratch)
        np.multiply(scratch, weights[row], out=scratch)
        weighted[row] = scratch.sum(dtype=np.float64)
    return weighted - reference.log_partition + model.log_partition
