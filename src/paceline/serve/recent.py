"""What happened lately: times of requests, and the engine's totals as they were at earlier looks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from paceline.engine.stats import EngineStats
from paceline.serve.exchange import Exchange
from paceline.serve.watch import Watch

WINDOW_S = 60.0
RATE_S = 5.0
"""Span over which the rate of tokens is taken: shorter ones jump with each step of a large batch."""
LOOK_S = 0.5
"""Least time between two looks that are kept, however many ask."""
MAX_TIMES = 4096


class Recent(Watch):
    """Of the last ``WINDOW_S``. Nothing runs while nobody looks: the engine's totals are compared with those of the
    looks before, and without one nothing is known of a window shorter than the server's life."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started_s = clock()
        self._ttft: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)
        self._tpot: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)
        self._looks: deque[tuple[float, EngineStats]] = deque()

    def ended(self, exchange: Exchange) -> None:
        """Keeps its times."""
        now_s = self._clock()
        if exchange.ttft_s is not None:
            self._ttft.append((now_s, exchange.ttft_s))
        self._tpot.extend((now_s, seconds) for seconds in exchange.tpot_s)

    def look(self, stats: EngineStats) -> tuple[float, EngineStats | None]:
        """The length of the window that ends now, and the totals at its beginning, None for those of the start."""
        now_s = self._clock()
        while self._looks and self._looks[0][0] < now_s - WINDOW_S:
            self._looks.popleft()
        window = (now_s - self._looks[0][0], self._looks[0][1]) if self._looks else (now_s - self._started_s, None)
        if not self._looks or now_s - self._looks[-1][0] >= LOOK_S:
            self._looks.append((now_s, stats))
        return window

    def tokens_per_s(self, stats: EngineStats) -> float | None:
        """Over the last seconds; None without a look in them."""
        now_s = self._clock()
        for then_s, before in self._looks:
            if LOOK_S <= now_s - then_s <= RATE_S:
                return (stats.output_tokens - before.output_tokens) / (now_s - then_s)
        return None

    def ttft_s(self) -> list[float]:
        """Of the requests that ended in the window."""
        return self._since(self._ttft)

    def tpot_s(self) -> list[float]:
        """Of their answers."""
        return self._since(self._tpot)

    def _since(self, times: deque[tuple[float, float]]) -> list[float]:
        first_s = self._clock() - WINDOW_S
        return [seconds for at_s, seconds in times if at_s >= first_s]
