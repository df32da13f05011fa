"""The random choices of verification: whether a proposal is accepted, and which token stands in for a rejected one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.sampling.draw import acceptance_uniforms

_BATCH = 32
"""Uniforms drawn at once: 32 cost what one does (the generator's numpy calls), and few steps need more."""


class Chance(Protocol):
    """Independent random choices."""

    def happens(self, probability: float) -> bool:
        """True with this probability: never at 0, always at 1."""
        ...

    def choose(self, p: NDArray[np.float64]) -> int:
        """A token drawn from the distribution ``p`` [vocab]; never one of probability 0. Does not modify ``p``."""
        ...


class PhiloxChance:
    """Choices that depend on nothing but (seed, position) and how many were made before.

    position  in the sequence, of the first token that the step draws. Every step draws one at least, so no two steps
              of a request share a position, nor a random number.
    """

    def __init__(self, seed: int, position: int) -> None:
        self._seed, self._position = seed, position
        self._batch: list[float] = []
        self._num_drawn = 0

    def happens(self, probability: float) -> bool:
        return self._uniform() < probability

    def choose(self, p: NDArray[np.float64]) -> int:
        return token_at(p, self._uniform())

    def _uniform(self) -> float:
        at = self._num_drawn % _BATCH
        if at == 0:
            self._batch = acceptance_uniforms(self._seed, self._position, self._num_drawn, _BATCH).tolist()
        self._num_drawn += 1
        return self._batch[at]


def token_at(p: NDArray[np.float64], u: float) -> int:
    """The token whose part of the unit interval, divided in proportion to ``p`` [vocab], holds 0 < u < 1."""
    mass = np.cumsum(p)
    # "right" passes over tokens of probability 0, and scaling u by the sum keeps rounding from leading past the end.
    return int(np.searchsorted(mass, u * mass[-1], side="right"))
