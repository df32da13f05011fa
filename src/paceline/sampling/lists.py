"""Collects the variable-length parts of a step's sampling records: counts, biases, bans and masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.rows import SampleRows

_NO_IDS = np.zeros(0, np.int32)
_NO_VALUES = np.zeros(0, np.float32)
_NO_MASKS = np.zeros((0, 0), np.uint32)


class ListsBuilder:
    """Writes where each list lies into the records ``rows`` [outputs] and concatenates the lists."""

    def __init__(self, rows: NDArray[np.void]) -> None:
        self._rows: Any = rows
        self._counts: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []
        self._biases: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        self._banned: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.uint32]] = []
        self._num_counts = self._num_biases = self._num_banned = 0

    def add_counts(self, output: int, tokens: NDArray[np.int32], values: NDArray[np.int32]) -> None:
        """Distinct tokens that were seen, and how often each is in the output, for what is drawn at ``output``."""
        self._rows[output]["counts_start"], self._rows[output]["counts_len"] = self._num_counts, len(tokens)
        self._num_counts += len(tokens)
        self._counts.append((tokens, values))

    def add_bias(self, output: int, tokens: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        """What is added to the logits of ``tokens``."""
        self._rows[output]["bias_start"], self._rows[output]["bias_len"] = self._num_biases, len(tokens)
        self._num_biases += len(tokens)
        self._biases.append((tokens, values))

    def add_banned(self, output: int, tokens: NDArray[np.int32]) -> None:
        """Tokens that must not be drawn."""
        self._rows[output]["banned_start"], self._rows[output]["banned_len"] = self._num_banned, len(tokens)
        self._num_banned += len(tokens)
        self._banned.append(tokens)

    def add_mask(self, output: int, words: NDArray[np.uint32]) -> None:
        """Which tokens may be drawn: a bit for each, of as many words as all masks of the step have."""
        self._rows[output]["mask"] = len(self._masks)
        self._masks.append(words)

    def build(self) -> SampleRows:
        """The records with their lists."""
        return SampleRows(
            self._rows,
            np.concatenate([_NO_IDS, *(tokens for tokens, _ in self._counts)]),
            np.concatenate([_NO_IDS, *(values for _, values in self._counts)]),
            np.concatenate([_NO_IDS, *(tokens for tokens, _ in self._biases)]),
            np.concatenate([_NO_VALUES, *(values for _, values in self._biases)]),
            np.concatenate([_NO_IDS, *self._banned]),
            np.stack(self._masks) if self._masks else _NO_MASKS,
        )
