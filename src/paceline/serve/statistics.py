"""`/stats`: the state of a server for its page and for people, cheap enough to be asked for each second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from starlette.requests import Request

from paceline.engine.stats import EngineStats
from paceline.serve.answers import Answer, DocumentAnswer
from paceline.serve.engine_metrics import read_bytes
from paceline.serve.metrics import resident_bytes
from paceline.serve.protocol.statistics import Percentiles, Statistics
from paceline.serve.service import Exchange, Service


async def statistics(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """What is known now; 503 while the model loads."""
    llm, recent = service.llm, service.recent
    if service.bandwidth is not None:
        service.bandwidth.measure_if_idle(llm)
    stats = llm.stats()
    bandwidth = None if service.bandwidth is None else service.bandwidth.bytes_per_s
    window_s, before = recent.look(stats)
    document = Statistics(
        model=service.model,
        uptime_s=time.time() - service.started,
        running=stats.num_running,
        waiting=stats.num_waiting,
        kv_use=stats.pages_used / stats.pages_total,
        kv_cached=stats.pages_cached / stats.pages_total,
        tokens_per_s=recent.tokens_per_s(stats),
        window_s=window_s,
        prefix_hit_rate=_ratio(before, stats, lambda s: s.cache_hit_tokens, lambda s: s.cache_query_tokens),
        acceptance=_ratio(before, stats, _accepted, _proposed),
        read_gb_s=_ratio(before, stats, lambda s: read_bytes(s, llm.memory) / 1e9, lambda s: s.executor_s),
        bandwidth_gb_s=None if bandwidth is None else bandwidth / 1e9,
        ttft_s=_percentiles(recent.ttft_s()),
        tpot_s=_percentiles(recent.tpot_s()),
        progress_age_s=llm.progress_age_s(),
        restarts=service.num_restarts,
        memory_bytes=resident_bytes(),
        path=llm.path(),
    )
    return DocumentAnswer(document.model_dump())


def _ratio(
    before: EngineStats | None,
    now: EngineStats,
    part: Callable[[EngineStats], float],
    whole: Callable[[EngineStats], float],
) -> float | None:
    """The growth of a part over that of the whole; None where that did not grow."""
    total = whole(now) - (0 if before is None else whole(before))
    return (part(now) - (0 if before is None else part(before))) / total if total > 0 else None


def _accepted(stats: EngineStats) -> int:
    return 0 if stats.speculation is None else stats.speculation.accepted


def _proposed(stats: EngineStats) -> int:
    return 0 if stats.speculation is None else stats.speculation.proposed


def _percentiles(values: Iterable[float]) -> Percentiles | None:
    """Nearest rank; None without values."""
    found = sorted(values)
    if not found:
        return None
    last = len(found) - 1
    return Percentiles(p50=found[round(last * 0.5)], p95=found[round(last * 0.95)])
