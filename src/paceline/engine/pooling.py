"""Embeddings: the mean of a prompt's hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.engine.outputs import Completion
from paceline.errors import PacelineError
from paceline.params import SamplingParams

EMBEDDING_PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)
"""A prompt is computed as for an answer of one token, which nobody sees."""


@dataclass(frozen=True)
class Embedding:
    """``vector`` [hidden] f32 of a prompt of ``num_tokens`` tokens."""

    vector: NDArray[np.float32]
    num_tokens: int


class MeanPool:
    """The mean of hidden states after the last layer, each divided by its root mean square.

    That is the final norm without its learned weights. Without it the mean would be that of one or two tokens: the
    residual stream of the first is a hundred times longer than the others'. Rows are added one by one in the order of
    their positions, in f64, so that the mean does not depend on how a prompt was cut into chunks.
    """

    def __init__(self) -> None:
        self._sum: NDArray[np.float64] = np.zeros(0)
        self._count = 0

    def add(self, position: int, hidden: NDArray[np.float32]) -> None:
        """Adds the rows [rows, hidden] of tokens from ``position`` on; at 0 it begins anew."""
        if position == 0:
            self._sum, self._count = np.zeros(hidden.shape[1]), 0
        assert position == self._count, "every row once, in order"
        rows = hidden.astype(np.float64)
        scales = np.sqrt(np.mean(rows * rows, axis=1))
        for row, scale in zip(rows, scales, strict=True):
            self._sum += row / (scale or 1.0)
        self._count += len(rows)

    def mean(self) -> NDArray[np.float32]:
        """The mean of all rows."""
        return (self._sum / self._count).astype(np.float32)


def embedding_of(completion: Completion, *, normalize: bool = False) -> Embedding:
    """What a completion of ``EMBEDDING_PARAMS`` says; raises its error."""
    if completion.error is not None:
        raise completion.error
    if completion.pooled is None:
        raise PacelineError("the embedding was given up before its prompt was computed")
    vector = completion.pooled
    if normalize:
        length = np.linalg.norm(vector.astype(np.float64))
        vector = (vector / (length or 1.0)).astype(np.float32)
    return Embedding(vector, completion.num_prompt_tokens)
