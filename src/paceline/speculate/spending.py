"""What a drafter's proposals cost, and when one that does not pay is tried again.

A draft model that was given up gives no more evidence of its own, so it is probed: after 1, 2, 4, ... steps, so the
number of probes grows with the logarithm of the steps until the gap has reached its largest. A probe that went well is
followed by another at once, because one alone moves no estimate far.
"""

from __future__ import annotations

MEMORY = 0.95
"""What a draft's time leaves of the weight of those before it."""

PRIOR_SPREAD = 0.01
"""Of lengths, in tokens squared: how much variation it takes before a part is believed to be fixed."""

MAX_BACKOFF = 8
"""Largest gap between probes is 2**MAX_BACKOFF steps: the length of an answer."""


AGED_WEIGHT = 0.25
"""Of all times together after the drafter was not asked for a while: the next one counts for four times as much."""


class DraftCost:
    """Seconds of drafts of which the longest has x tokens, fixed + per_token * x: a running regression. A drafter's
    passes go by the longest draft and hardly by how many requests share them. Without variation in x all of it counts
    as per token."""

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.per_token_s = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def age(self) -> None:
        """The drafter has not been asked for a while: what it took then may be what no draft takes again."""
        kept = min(1.0, AGED_WEIGHT / self._weight) if self._weight else 1.0
        self._weight *= kept
        self._x *= kept
        self._y *= kept
        self._xx *= kept
        self._xy *= kept

    def observe(self, longest: int, elapsed_s: float) -> None:
        """Takes in the time of drafts of up to ``longest`` tokens."""
        self._weight = self._weight * MEMORY + 1.0
        self._x = self._x * MEMORY + longest
        self._y = self._y * MEMORY + elapsed_s
        self._xx = self._xx * MEMORY + longest**2
        self._xy = self._xy * MEMORY + longest * elapsed_s
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        ratio = mean_y / mean_x
        spread = self._xx / self._weight - mean_x**2
        together = self._xy / self._weight - mean_x * mean_y
        slope = (together + PRIOR_SPREAD * ratio) / (spread + PRIOR_SPREAD)
        self.per_token_s = min(ratio, max(0.0, slope))
        self.fixed_s = mean_y - self.per_token_s * mean_x


class Probing:
    """Whether a drafter that does not pay is to be asked nevertheless."""

    def __init__(self) -> None:
        self.active = False
        """Whether it paid when last looked at."""
        self.under_way = False
        """Whether the last draft was a probe whose outcome is not known yet."""
        self.num_probes = 0
        self._backoff = 0
        self._wait = 1
        self._went_well = False

    def pays(self) -> None:
        """It does: the next time it does not, probes begin anew."""
        self.active, self.under_way = True, False
        self._backoff, self._wait, self._went_well = 0, 1, False

    def is_due(self, *, too_dear: bool = False) -> bool:
        """Counts a step in which it does not pay; True where this one is to be a probe. While it would be ``too_dear``
        with every token right, a probe that went well is no reason for another."""
        self.active = False
        self._went_well = self._went_well and not too_dear
        self._wait -= 1
        if self._wait > 0 and not self._went_well:
            return False
        if not self._went_well:
            self._backoff = min(self._backoff + 1, MAX_BACKOFF)
        self._wait = 2**self._backoff
        self.num_probes += 1
        self._went_well, self.under_way = False, True
        return True

    def outcome(self, went_well: bool) -> None:
        """What came of the probe."""
        self.under_way, self._went_well = False, went_well
