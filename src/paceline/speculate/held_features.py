"""What a drafter over hidden states keeps of a request between its drafts: which rows are computed, what waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]


@dataclass
class HeldFeatures:
    """What is kept of a request.

    first         b: the token of its first feature
    num_computed  of its rows: their keys and values are in the pages of ``slot`` (None: it has no pages yet)
    waiting       features [n, hidden] of the rows behind these, ``num_waiting`` in all
    last          [1, hidden] that of the last computed row
    """

    first: int
    slot: int | None = None
    num_computed: int = 0
    num_waiting: int = 0
    waiting: deque[Features] = field(default_factory=deque)
    last: Features | None = None

    @property
    def end(self) -> int:
        """The token behind its last feature."""
        return self.first + self.num_computed + self.num_waiting

    def restart(self, first: int) -> None:
        """Forgets all rows; features begin with token ``first``."""
        self.first, self.num_computed, self.last = first, 0, None

    def add(self, features: Features, max_waiting: int) -> None:
        """Appends a copy of features, and gives up the oldest ones where too many wait."""
        num_lost = max(0, len(features) - max_waiting)
        features = features[num_lost:]
        while self.waiting and self.num_waiting + len(features) > max_waiting:
            num_lost += len(self.waiting[0])
            self.num_waiting -= len(self.waiting.popleft())
        if num_lost:
            self.restart(self.first + self.num_computed + num_lost)
        self.waiting.append(features.copy())
        self.num_waiting += len(features)

    def take(self) -> Features:
        """All that waits, and at least one row: the last computed one will be computed again then."""
        if not self.waiting:
            assert self.last is not None
            self.num_computed -= 1
            return self.last
        features = np.concatenate(self.waiting)
        self.waiting.clear()
        self.num_waiting = 0
        return features
