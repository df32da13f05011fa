"""How likely the target takes a drafted token: a drafter's confidence, corrected by what happened.

Source: deciding by running acceptance is TurboSpec's (Liu et al. 2024, 2406.14066); the formula, an online logistic
regression, is our own.
Notation: a node with confidence c at depth d of its path, drafted for request r, given that its parent was taken:

    odds(p) = b(c) * g(d) * h(r)        odds(p) = p / (1 - p)

    b(c)  odds of the bucket of c: (hits + M * centre) / (trials + M) of the last hundred or so nodes of that confidence
    g(d)  of the depth; after each outcome y (1 taken, 0 not): g *= exp(DEPTH_RATE * (y - p))
    h(r)  of the request: likewise with REQUEST_RATE, and drawn towards 1 a little each time

All requests share b and g, so a new one, whose h is 1, begins with what the others taught. h is fast and follows a text
that turns repetitive within a few tokens; b and g are slow and keep what is true of the drafter. Each moves until the
outcomes that it sees are, on average, what p says, so their product counts nothing twice for long.
Checked by: tests/unit/test_speculate_acceptance.py, on outcomes of known probability.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from paceline.speculate.draft import MAX_NODES, Draft

BOUNDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Between buckets of confidence: finer near 1, where long chains are decided."""

CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *BOUNDS), (*BOUNDS, 1.0), strict=True))

PRIOR_TRIALS = 2.0
"""M: outcomes that the drafter's own estimate counts for."""

MEMORY = 1.0 - 1.0 / 100
"""What an outcome leaves of the weight of those before it."""

LEAST, MOST = 0.02, 0.99
"""Bounds of a bucket's probability, so that a change of text is not fought for hundreds of tokens."""

DEPTH_RATE = 0.05
MAX_DEPTH_ODDS = 8.0
REQUEST_RATE = 0.6
"""Faster follows a change of text sooner, but takes chance for change: on replayed answers 0.15 to 0.6 gave the same
speed within 0.5 %."""

REQUEST_MEMORY = 0.99
"""At 0.97 the pull towards the average held drafts that were always wrong at a probability of 0.15: they went on."""

MAX_REQUEST_ODDS = 50.0

FIRST_GUESS = 0.7
"""Of a token of a drafter that was never tried: it is to be tried."""

AGED_TRIALS = 12.0
"""Weight that evidence keeps however long it has not been looked at."""

FADED = 0.97
"""Of the weight of a depth's evidence that a chain which ends before it leaves."""

NEGLIGIBLE = 0.005
"""Nodes that are reached more rarely are not considered."""


class Acceptance:
    """Running acceptance of one drafter's nodes. ``odds`` in its methods is h of the request at hand."""

    def __init__(self) -> None:
        self._hits = [0.0] * len(CENTRES)
        self._trials = [0.0] * len(CENTRES)
        self._bucket_odds = [_odds(centre) for centre in CENTRES]
        self._depth_odds = [1.0] * (MAX_NODES + 2)
        self._depth_hits = [0.0] * (MAX_NODES + 2)
        self._depth_trials = [0.0] * (MAX_NODES + 2)

    def probability(self, confidence: float, depth: int, odds: float = 1.0) -> float:
        """p of a node at ``depth`` 1.. whose parent is taken."""
        odds *= self._bucket_odds[bisect_right(BOUNDS, confidence)] * self._depth_odds[depth]
        return odds / (1.0 + odds)

    def reach(self, draft: Draft, odds: float) -> list[float]:
        """[nodes] probability that each node is taken and all before it; falls along every path. 0 where it is
        negligible."""
        bucket_odds, depth_odds = self._bucket_odds, self._depth_odds
        reach, depths = [1.0], [0]
        for parent, confidence in zip(draft.parents, draft.confidence, strict=True):
            before, depth = reach[parent], depths[parent] + 1
            depths.append(depth)
            if before < NEGLIGIBLE:
                reach.append(0.0)
                continue
            node_odds = bucket_odds[bisect_right(BOUNDS, confidence)] * depth_odds[depth] * odds
            reach.append(before * node_odds / (1.0 + node_odds))
        del reach[0]
        return reach

    def chain(self, length: int, odds: float) -> list[float]:
        """[<= length] as ``reach``, of a chain that is not drafted yet, from the acceptance at each depth alone. A
        depth of which little is known is taken to be like the one before."""
        reach: list[float] = []
        before, p = 1.0, FIRST_GUESS
        for depth in range(1, length + 1):
            hits, trials = self._depth_hits[depth], self._depth_trials[depth]
            p = (hits + PRIOR_TRIALS * p) / (trials + PRIOR_TRIALS)
            node_odds = _odds(p) * odds
            before *= node_odds / (1.0 + node_odds)
            if before < NEGLIGIBLE:
                break
            reach.append(before)
        return reach

    def learn(self, confidence: float, depth: int, taken: bool, odds: float) -> float:
        """Takes in what became of a node whose parent was taken; returns the request's new odds."""
        bucket = bisect_right(BOUNDS, confidence)
        node_odds = self._bucket_odds[bucket] * self._depth_odds[depth] * odds
        error = taken - node_odds / (1.0 + node_odds)
        hits = self._hits[bucket] = self._hits[bucket] * MEMORY + taken
        trials = self._trials[bucket] = self._trials[bucket] * MEMORY + 1.0
        self._bucket_odds[bucket] = _odds((hits + PRIOR_TRIALS * CENTRES[bucket]) / (trials + PRIOR_TRIALS))
        depth_odds = self._depth_odds[depth] * math.exp(DEPTH_RATE * error)
        self._depth_odds[depth] = min(MAX_DEPTH_ODDS, max(1.0 / MAX_DEPTH_ODDS, depth_odds))
        self._depth_hits[depth] = self._depth_hits[depth] * MEMORY + taken
        self._depth_trials[depth] = self._depth_trials[depth] * MEMORY + 1.0
        odds = odds**REQUEST_MEMORY * math.exp(REQUEST_RATE * error)
        return min(MAX_REQUEST_ODDS, max(1.0 / MAX_REQUEST_ODDS, odds))

    def fade(self, depth: int) -> None:
        """A chain ended before ``depth`` although it went well: what is known of that depth grows old."""
        self._depth_hits[depth] *= FADED
        self._depth_trials[depth] *= FADED

    def age(self) -> None:
        """The drafter has not been asked for a while: halves the weight of what is known."""
        for hits, trials in ((self._hits, self._trials), (self._depth_hits, self._depth_trials)):
            for at, weight in enumerate(trials):
                if weight > AGED_TRIALS:
                    kept = max(0.5, AGED_TRIALS / weight)
                    hits[at] *= kept
                    trials[at] *= kept


def _odds(probability: float) -> float:
    probability = min(MOST, max(LEAST, probability))
    return probability / (1.0 - probability)
