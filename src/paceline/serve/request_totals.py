"""Counts and distributions over all requests of a server, by endpoint.

Plain numbers that only the event loop touches, so that the library that writes them for Prometheus is not needed before
somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from paceline.serve.exchange import CLIENT_LEFT, Exchange
from paceline.serve.watch import Watch

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds of the classes of a time."""

OTHER = "other"
"""The endpoint of requests to paths that do not exist: a label of each would let clients make labels without end."""


class Histogram:
    """How often a time fell into each class of ``SECONDS``, with one more for what is longer."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """One more; a class holds its upper bound."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: for each bound how many are at most that."""
        total, found = 0, []
        for bound, count in zip((*SECONDS, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return found


@dataclass
class EndpointTotals:
    """Of one endpoint (and client, where they are told apart).

    ``gap`` is between two chunks of a stream with new tokens; ``queue``, ``ttft`` and ``e2e`` have an entry a request
    (``e2e`` only where the client stayed to the end), ``tpot`` one an answer.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    gap: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)


class RequestTotals(Watch):
    """``groups``: endpoint and client -> totals. The client is "" unless ``by_client``."""

    def __init__(self, *, by_client: bool = False) -> None:
        self.by_client = by_client
        self.groups: dict[tuple[str, str], EndpointTotals] = {}

    def chunk(self, exchange: Exchange, num_tokens: int, now_s: float) -> None:
        """The pause before a chunk."""
        if exchange.is_streamed and exchange.last_sent_s is not None:
            self._group(exchange).gap.observe(now_s - exchange.last_sent_s)

    def ended(self, exchange: Exchange) -> None:
        """Everything else."""
        group = self._group(exchange)
        group.statuses[exchange.status] += 1
        if exchange.num_answers == 0:
            return
        group.finish_reasons.update(exchange.finish_reasons)
        group.prompt_tokens += exchange.num_prompt_tokens
        group.cached_tokens += exchange.num_cached_tokens
        group.output_tokens += exchange.num_output_tokens
        for seconds in exchange.tpot_s:
            group.tpot.observe(seconds)
        if exchange.queue_s is not None:
            group.queue.observe(exchange.queue_s)
        if exchange.ttft_s is not None:
            group.ttft.observe(exchange.ttft_s)
        if exchange.e2e_s is not None and exchange.status != CLIENT_LEFT:
            group.e2e.observe(exchange.e2e_s)

    def _group(self, exchange: Exchange) -> EndpointTotals:
        key = (exchange.endpoint or OTHER, exchange.client.name if self.by_client else "")
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = EndpointTotals()
        return group
