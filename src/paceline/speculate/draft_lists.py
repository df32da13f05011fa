"""What penalises, biases, bans and masks tokens, for a draft model that may have another vocabulary than the target."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.lists import ListsBuilder
from paceline.sampling.rows import SampleRows, mask_width


class DraftLists(ListsBuilder):
    """Lists for the draft model: without the ids that it lacks, and with those banned that the target lacks."""

    def __init__(self, rows: NDArray[np.void], vocab_size: int, surplus: NDArray[np.int32]) -> None:
        super().__init__(rows)
        self._vocab_size = vocab_size
        self._surplus = surplus
        self._without_ban = set(range(len(rows)))

    def add_counts(self, output: int, tokens: NDArray[np.int32], values: NDArray[np.int32]) -> None:
        """See ``ListsBuilder``."""
        has = tokens < self._vocab_size
        super().add_counts(output, tokens[has], values[has])

    def add_bias(self, output: int, tokens: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        """See ``ListsBuilder``."""
        has = tokens < self._vocab_size
        super().add_bias(output, tokens[has], values[has])

    def add_banned(self, output: int, tokens: NDArray[np.int32]) -> None:
        """See ``ListsBuilder``."""
        self._without_ban.discard(output)
        super().add_banned(output, np.concatenate([tokens[tokens < self._vocab_size], self._surplus]))

    def add_mask(self, output: int, words: NDArray[np.uint32]) -> None:
        """See ``ListsBuilder``."""
        fitting = np.zeros(mask_width(self._vocab_size), np.uint32)
        count = min(len(fitting), len(words))
        fitting[:count] = words[:count]  # the target's masks have no bits beyond its vocabulary
        super().add_mask(output, fitting)

    def build(self) -> SampleRows:
        """See ``ListsBuilder``."""
        for output in sorted(self._without_ban):
            super().add_banned(output, self._surplus)
        return super().build()
