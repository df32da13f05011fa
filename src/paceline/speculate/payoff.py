"""Which numbers of drafted nodes are worth their rows, by what steps cost: the arithmetic of ``Controller``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.speculate.cost import StepCost
from paceline.speculate.draft import MAX_NODES

START_GAIN, STAY_GAIN = 1.05, 1.02
"""Expected rate over plain decoding's from which speculation begins, and from which it goes on: estimates err."""

SMALL_BATCH = 2
"""Requests up to which a row costs so little that drafts are taken at their word."""

BATCH_START_GAIN, BATCH_STAY_GAIN = 1.10, 1.06
"""The same for larger batches, where rows cost nearly what tokens do and Python's work on drafts grows with requests:
with the gains above, four requests at a time lost 7 % (SmolLM2 on two Zen 3 cores)."""


def gains(num_requests: int) -> tuple[float, float]:
    """The gains from which speculation begins and goes on."""
    if num_requests <= SMALL_BATCH:
        return START_GAIN, STAY_GAIN
    return BATCH_START_GAIN, BATCH_STAY_GAIN


MAX_BATCHES = 1024
"""Batches of which ``Bounds`` are kept."""


@dataclass(frozen=True)
class Bounds:
    """Of a batch, whatever is drafted for it.

    most_to_start, most_to_stay  most nodes that would be worth it if all of them were taken
    break_even                   probability of a node from which the cheapest rows are worth it
    """

    most_to_start: int
    most_to_stay: int
    break_even: float


class Payoff:
    """Rates of steps of up to ``max_rows`` rows, at the speed of the table ``cost``."""

    def __init__(self, cost: StepCost, max_rows: int) -> None:
        self._cost = cost
        self._max_rows = max_rows
        self._bounds: dict[tuple[int, int], Bounds] = {}
        self._version = cost.version

    def bounds(self, num_rows: int, num_requests: int) -> Bounds:
        """Of a step that runs ``num_rows`` anyway and gives ``num_requests`` requests a token."""
        if self._version != self._cost.version or len(self._bounds) >= MAX_BATCHES:
            self._bounds.clear()
            self._version = self._cost.version
        bounds = self._bounds.get((num_rows, num_requests))
        if bounds is None:
            bounds = self._bounds[num_rows, num_requests] = self._find_bounds(num_rows, num_requests)
        return bounds

    def _find_bounds(self, num_rows: int, num_requests: int) -> Bounds:
        room = max(0, min(MAX_NODES, self._max_rows - num_rows))
        shape = self._cost.shape(num_rows + room)
        if num_requests <= 0 or room == 0:
            return Bounds(0, 0, float("inf"))
        plain = num_requests / shape[num_rows]

        def most(gain: float) -> int:
            pays = (k for k in range(room, 0, -1) if num_requests + k >= gain * plain * shape[num_rows + k])
            return next(pays, 0)

        cheapest_s = min((shape[num_rows + k] - shape[num_rows]) / k for k in range(1, room + 1))
        start, stay = gains(num_requests)
        return Bounds(most(start), most(stay), plain * cheapest_s)

    def best_count(
        self,
        reach: Sequence[float],
        num_rows: int,
        num_tokens: float,
        margin: float,
        *,
        sunk_s: float = 0.0,
        drafting_s: Sequence[float] | None = None,
    ) -> int:
        """How many of the nodes, ``reach`` falling, give the highest rate beside ``num_tokens`` that come anyway; 0
        where it is not ``margin`` times that of none. Seconds of drafting: ``sunk_s`` have been spent;
        ``drafting_s[i]`` will be where the count is i + 1."""
        shape = self._cost.shape(num_rows + len(reach))
        best, count = margin * num_tokens / (shape[num_rows] + sunk_s), 0
        tokens, size = num_tokens, num_rows
        spent_s = sunk_s
        for node, p in enumerate(reach):
            tokens += p
            size += 1
            if drafting_s is not None:
                spent_s = sunk_s + drafting_s[node]
            if tokens > best * (shape[size] + spent_s):
                best, count = tokens / (shape[size] + spent_s), size - num_rows
        return count

    def gain_s(self, reach: Sequence[float], num_rows: int, num_tokens: float) -> float:
        """The most that drafting may have taken so that the best of these nodes, with it, are as fast as plain
        decoding without; 0 where none are."""
        shape = self._cost.shape(num_rows + len(reach))
        tokens, gain_s = num_tokens, 0.0
        token_s = shape[num_rows] / num_tokens
        for size, p in enumerate(reach, num_rows + 1):
            tokens += p
            gain_s = max(gain_s, tokens * token_s - shape[size])
        return gain_s
