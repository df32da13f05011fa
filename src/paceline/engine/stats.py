"""What an engine has done so far, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.speculate.counts import SpeculationCounts

_TOTALS = (
    "steps",
    "rows",
    "attended_tokens",
    "output_tokens",
    "requests_finished",
    "requests_failed",
    "preemptions",
    "wasted_tokens",
    "cache_query_tokens",
    "cache_hit_tokens",
    "cache_saved_tokens",
    "draft_s",
    "python_s",
    "executor_s",
)
"""Fields that only grow; the others are of the moment. What speculation did adds itself."""


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was made, or the first of those it follows, and its state now.

    steps, rows                        passes through the model and token positions computed in them
    attended_tokens                    tokens whose keys and values the steps read, each request counted by itself
    output_tokens                      tokens drawn for requests
    requests_finished, requests_failed ended well or aborted; ended by an error
    preemptions, wasted_tokens         requests that gave their pages up, and positions that had been computed for them
    num_running, num_waiting           requests with and without pages now
    cache_query_tokens, cache_hit_tokens, cache_saved_tokens
                                       looked up in the prefix cache, found there, and therefore not computed
    pages_used, pages_cached, pages_touched, pages_total
                                       pages that requests hold now, that only the cache holds, ever used (so in
    memory), in the pool
    speculation                        what became of drafts, None where nobody drafts
    draft_s                            time in drafters
    python_s, executor_s               time in Python (planning, committing, text) and in the executor while there was
    work
    """

    steps: int
    rows: int
    attended_tokens: int
    output_tokens: int
    requests_finished: int
    requests_failed: int
    preemptions: int
    wasted_tokens: int
    num_running: int
    num_waiting: int
    cache_query_tokens: int
    cache_hit_tokens: int
    cache_saved_tokens: int
    pages_used: int
    pages_cached: int
    pages_touched: int
    pages_total: int
    speculation: SpeculationCounts | None
    draft_s: float
    python_s: float
    executor_s: float

    def after(self, before: EngineStats) -> EngineStats:
        """With the totals of an engine that this one took the place of added, so that none of them falls. The state
        is this one's."""
        speculation = self.speculation
        if before.speculation is not None:
            speculation = (speculation or SpeculationCounts()).after(before.speculation)
        sums = {name: getattr(self, name) + getattr(before, name) for name in _TOTALS}
        return replace(self, speculation=speculation, **sums)

    @property
    def python_share(self) -> float:
        """Python's part of the time of all steps, 0..1."""
        total = self.python_s + self.executor_s
        return self.python_s / total if total > 0 else 0.0
