"""What a step costs by its number of rows: measured when the engine starts, followed while it runs.

Source: the goodput model of TurboSpec (Liu et al. 2024, 2406.14066), there a linear fit; C(n) of a processor is not
linear (SmolLM2 on two Zen 3 cores: 1.07 for 2 rows, 2.05 for 8, 3.5 for 16), so here it is a table.
Notation: T(n) seconds of a step of n rows, all with logits. T(n) = exp(drift) * shape(n).
Departures: depth is no argument of T. Attention's share grows with depth for all n about alike, so ratios hardly change
(measured: C(8) 2.05 after 64 tokens and 2.04 after 1,024; C(16) 3.5 and 3.9), and what changes for all n is drift.
Checked by: tests/unit/test_speculate_cost.py, against machines that are formulas.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.config import PAGE_TOKENS
from paceline.executors.base import Executor
from paceline.executors.rows_plan import rows_plan

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows at which T is known; between them it is a line."""

COARSE_FIRST = (1, 4, 8, 16, 2, 32, 6, 12, 3, 24, 64, 48)
"""The order in which ``SIZES`` are measured, so that a budget that ends early leaves gaps and not an open end."""

NUM_NEEDED = 3
"""So many of ``COARSE_FIRST`` are measured whatever the budget: without 8 rows nothing says what a draft costs."""

MAX_CHECKED_S, MIN_CHECKS, NUM_CHECKS, MAX_CHANGE = 0.05, 2, 6, 1.3
"""A kept table is compared with the machine where T(1) is at most so long, in so many rounds at least and at most; it
holds once the fastest passes of the rounds so far are off by no more than this factor from its ratios. A busy machine
needs some more rounds, which are cheaper than to measure all of it in a hurry."""

DRIFT_RATE = 0.1
SHAPE_RATE = 0.04
SPIKE = 0.25
"""Largest log-ratio that one observation counts for: a step that a neighbour stopped for 100 ms says as much as one
that took 28 % too long."""

SAME_DEPTH = 1.25
"""Two steps are compared only when the larger of their depths is at most this many times the smaller."""

STALE = 0.02
"""Movement of the points' logarithms, all together, from which the table is built again."""


class StepCost:
    """T(n), from seconds measured at some n.

    Between points T is linear. Beyond the last a row costs what it costs on average up to there: a slope of the last
    points would be below the true one where few were measured, and draft too much (T(32) / T(1) came out as 2.9 from 1,
    4 and 8 rows, and is 6.9). T never falls with n: points that do are pooled with their neighbours. ``version``
    changes with the shape, so what was derived from it can be kept until then.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert seconds, "a step's cost needs a point at least"
        assert all(n > 0 and 0 < t < math.inf for n, t in seconds.items()), seconds
        self.measured = dict(sorted(seconds.items()))
        sizes, times = list(self.measured), pooled(list(self.measured.values()))
        # Points beyond what was measured are there too, so that observations can correct them.
        beyond = [n for n in SIZES if n > sizes[-1]]
        self._sizes = sizes + beyond
        self._logs = [math.log(t) for t in (*times, *(times[-1] * n / sizes[-1] for n in beyond))]
        self._largest_seen = 0  # index of the largest point that was corrected
        self._unseen = 0.0  # bound of what the logs have moved by since the table was built
        self._drift = 0.0
        self._last: tuple[int, int, float] | None = None  # rows, depth and log-ratio to the table of the step before
        self.version = 0
        self._table = self._build(self._sizes[-1])

    @property
    def drift(self) -> float:
        """How many times slower than its table the machine is now."""
        return math.exp(self._drift)

    def shape(self, most: int) -> list[float]:
        """[> most] seconds of 0..most rows without drift; 0 rows cost nothing. Not to be modified."""
        if self._unseen > STALE or most >= len(self._table):
            self.version += 1
            self._table = self._build(max(most, len(self._table) - 1))
        return self._table

    def seconds(self, num_rows: int) -> float:
        """T(n) as the machine is now."""
        return self.shape(num_rows)[num_rows] * self.drift

    def relative(self, num_rows: int, to: int = 1) -> float:
        """T(n) / T(to)."""
        shape = self.shape(max(num_rows, to))
        return shape[num_rows] / shape[to]

    def observe(self, num_rows: int, num_tokens_attended: int, elapsed_s: float) -> float:
        """Takes in what a step took. ``num_tokens_attended``: tokens of the step's requests, each counted once.
        Returns by how much the logarithm of its ratio to the table was above that of the step before; 0 where the two
        cannot be compared.

        A slow machine and a wrong shape look alike in one step. They differ in two: steps that follow each other share
        the machine's speed, so what their ratios to the table differ by is the shape's error, and half of it belongs
        to each. Drift is a running mean of the ratios themselves. Steps beyond the table, which carry prompts, and
        pairs of unlike depth teach nothing about the shape.
        """
        if num_rows > self._sizes[-1] or elapsed_s <= 0.0:
            self._last = None
            return 0.0
        ratio = math.log(elapsed_s / self.shape(num_rows)[num_rows])
        self._drift += DRIFT_RATE * _clip(ratio - self._drift)
        last, self._last = self._last, (num_rows, num_tokens_attended, ratio)
        if last is None or last[0] == num_rows:
            return 0.0
        shallow, deep = sorted((num_tokens_attended, last[1]))
        if deep > SAME_DEPTH * shallow + PAGE_TOKENS:
            return 0.0
        error = SHAPE_RATE * _clip(ratio - last[2])
        self._correct(num_rows, error)
        self._correct(last[0], -error)
        larger = max(num_rows, last[0])
        self._lift(larger, error if larger == num_rows else -error)
        return ratio - last[2]

    def _correct(self, num_rows: int, error: float) -> None:
        """Moves the points on both sides of ``num_rows``, each by its weight in the line between them."""
        above = min(bisect_right(self._sizes, num_rows), len(self._sizes) - 1)
        below = max(above - 1, 0)
        gap = self._sizes[above] - self._sizes[below]
        share = (num_rows - self._sizes[below]) / gap if gap else 0.0
        self._logs[above] += share * error
        self._logs[below] += (1.0 - share) * error
        self._unseen += abs(error)

    def _lift(self, num_rows: int, error: float) -> None:
        """Moves the points beyond all that steps were seen at along with each smaller one: what is wrong at 2 rows
        hardly ends there, and no larger step is tried while it looks dear. Once tried, it corrects itself."""
        self._largest_seen = max(self._largest_seen, bisect_left(self._sizes, num_rows))
        for index in range(self._largest_seen + 1, len(self._sizes)):
            self._logs[index] += error

    def _build(self, most: int) -> list[float]:
        seconds = pooled([math.exp(log) for log in self._logs])
        self._unseen = 0.0
        last = self._sizes[-1]
        table: list[float] = np.interp(np.arange(1, last + 1), self._sizes, seconds).tolist()
        return [0.0, *table, *(seconds[-1] * n / last for n in range(last + 1, most + 1))]


def pooled(values: Sequence[float]) -> list[float]:
    """The closest sequence (least squares) that never falls: pool adjacent violators."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] * count > total * blocks[-1][1]:
            before, num_before = blocks.pop()
            total, count = total + before, count + num_before
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


def _clip(ratio: float) -> float:
    return max(-SPIKE, min(SPIKE, ratio))


def measure_step_cost(
    executor: Executor, *, budget_s: float = 0.7, clock: Callable[[], float] = time.perf_counter
) -> StepCost:
    """T of passes of 1 to 64 rows with logits, as far as the executor has room, within about ``budget_s`` seconds.

    Overwrites the first pages of the pool, so nothing may be cached yet. A third of the budget goes to measuring each
    size once, coarse before fine; the rest to rounds in which those take turns, so that a machine that slows
    down for a moment slows all of them. The fastest pass of each counts. 1, 4 and 8 rows are measured whatever it
    takes: of a model of 7e9 parameters that is seconds, hence ``save_step_cost``.
    """
    run, most = _timed_passes(executor, clock)
    sizes = [n for n in COARSE_FIRST if n <= most]
    started_s = clock()
    run(min(8, most))  # warms up
    best: dict[int, float] = {}
    for index, n in enumerate(sizes):
        if index < NUM_NEEDED or clock() - started_s + StepCost(best).seconds(n) <= budget_s / 3:
            best[n] = run(n)
    while clock() - started_s + sum(best.values()) <= budget_s:
        for n in best:
            best[n] = min(best[n], run(n))
    return StepCost(best)


def still_holds(cost: StepCost, executor: Executor, *, clock: Callable[[], float] = time.perf_counter) -> bool:
    """Whether T(4) / T(1) and T(8) / T(1) are about what a table says that was measured before, perhaps while the
    machine was busy. True, without a look, where a pass takes longer than ``MAX_CHECKED_S``.

    Overwrites the first pages of the pool, like ``measure_step_cost``.
    """
    if cost.seconds(1) > MAX_CHECKED_S:
        return True
    run, most = _timed_passes(executor, clock)
    sizes = [n for n in COARSE_FIRST[:NUM_NEEDED] if n <= most]
    run(sizes[-1])  # warms up
    now = dict.fromkeys(sizes, math.inf)
    for count in range(1, NUM_CHECKS + 1):
        now = {n: min(fastest, run(n)) for n, fastest in now.items()}
        errors = [math.log(now[n] / now[1] / cost.relative(n)) for n in sizes]
        if count >= MIN_CHECKS and max(map(abs, errors)) <= math.log(MAX_CHANGE):
            return True
    return False


def _timed_passes(executor: Executor, clock: Callable[[], float]) -> tuple[Callable[[int], float], int]:
    """What runs a pass of so many rows with logits and returns its seconds; and the most rows that fit."""
    most = min(executor.max_rows, executor.max_outputs, executor.num_pages * PAGE_TOKENS, executor.model.context_length)

    def run(num_rows: int) -> float:
        tokens = [token % executor.model.vocab_size for token in range(1, num_rows + 1)]
        plan = rows_plan(tokens, 0, num_outputs=num_rows)
        started_s = clock()
        executor.run(plan)
        return clock() - started_s

    return run, most
