"""The engine's totals and state as metrics, read when somebody asks and never before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.engine.stats import EngineStats
from paceline.kv.layout import MemoryPlan
from paceline.serve.service import Service
from paceline.speculate.counts import SpeculationCounts

if TYPE_CHECKING:  # as in metrics
    from prometheus_client.core import Metric


def read_bytes(stats: EngineStats, memory: MemoryPlan) -> int:
    """Bytes of weights, keys and values that all steps have read: the weights once a step, keys and values once for
    each request, as though none shared a prefix."""
    return stats.steps * memory.weight_bytes + stats.attended_tokens * memory.layout.bytes_per_token


def engine_metrics(service: Service) -> Iterator[Metric]:
    """Everything that is known of the engine behind a service that is loaded."""
    from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

    llm = service.llm
    stats = llm.stats()
    path = {name: str(value) for name, value in llm.path().items()}
    yield InfoMetricFamily("paceline_model", "The model and the path that runs", value={"model": service.model, **path})
    for name, text, value in _gauges(service, stats):
        yield GaugeMetricFamily(f"paceline_{name}", text, value=value)
    yield _counter("engine_errors", "Errors outside any request that stopped the engine", service.num_breaks)
    yield _counter("engine_restarts", "Times that the engine was started again", service.num_restarts)
    for name, text, value in _counters(stats, llm.memory):
        yield _counter(name, text, value)
    yield _labelled(
        "wasted_tokens",
        "Tokens computed and given up",
        "cause",
        {
            "preemption": stats.wasted_tokens,
            "rejected_draft": 0
            if stats.speculation is None
            else stats.speculation.proposed - stats.speculation.accepted,
        },
    )
    # Drafting is Python's work too, but apart from the rest.
    seconds = {"python": stats.python_s, "draft": stats.draft_s, "executor": stats.executor_s}
    yield _labelled("step_seconds", "Time of all steps by where it went", "part", seconds)
    if stats.speculation is not None:
        yield from _speculation(stats.speculation)


def _gauges(service: Service, stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    yield "requests_running", "Requests with pages", stats.num_running
    yield "requests_waiting", "Requests without pages", stats.num_waiting
    yield "kv_pages_used", "Pages that requests hold", stats.pages_used
    yield "kv_pages_cached", "Pages that only the prefix cache holds", stats.pages_cached
    yield "kv_pages", "Pages of the pool", stats.pages_total
    yield "kv_use_ratio", "Pages that requests hold over all pages", stats.pages_used / stats.pages_total
    yield "engine_progress_age_seconds", "Since a step ended, while there is work", service.llm.progress_age_s()
    yield "kv_pool_bytes", "The whole pool; pages never used take no memory", service.llm.memory.kv_bytes
    yield "weight_bytes", "Weights as they lie in memory", service.llm.memory.weight_bytes
    measured = None if service.bandwidth is None else service.bandwidth.bytes_per_s
    if measured is not None:
        yield "memory_bandwidth_bytes_per_second", "Measured once, when a scrape found the engine idle", measured


def _counters(stats: EngineStats, memory: MemoryPlan) -> Iterator[tuple[str, str, float]]:
    yield "engine_steps", "Passes through the model", stats.steps
    yield "engine_rows", "Token positions computed", stats.rows
    yield "engine_output_tokens", "Tokens drawn, of requests that still run as well", stats.output_tokens
    yield "engine_requests_finished", "Answers that ended well or were given up", stats.requests_finished
    yield "engine_requests_failed", "Answers that ended by an error", stats.requests_failed
    yield "engine_preemptions", "Requests that gave their pages up", stats.preemptions
    yield "prefix_cache_query_tokens", "Tokens looked up in the prefix cache", stats.cache_query_tokens
    yield "prefix_cache_hit_tokens", "Tokens found there", stats.cache_hit_tokens
    yield "prefix_cache_saved_tokens", "Tokens therefore not computed", stats.cache_saved_tokens
    yield (
        "read_bytes",
        "Weights, keys and values read; over step_seconds of the executor: bandwidth",
        read_bytes(stats, memory),
    )


def _speculation(counts: SpeculationCounts) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    yield _counter("speculation_steps", "Steps of requests with a draft", counts.steps)
    for name, text, field in (
        ("speculation_proposed_tokens", "Draft tokens verified", "proposed"),
        ("speculation_accepted_tokens", "Draft tokens that became output", "accepted"),
    ):
        by_drafter = {drafter: getattr(each, field) for drafter, each in counts.drafters.items()}
        yield _labelled(name, text, "drafter", by_drafter)
    for name, text, numbers in (
        ("speculation_position_proposed", "Drafts that reach a position", counts.position_proposed),
        ("speculation_position_accepted", "Drafts accepted that far", counts.position_accepted),
    ):
        yield _labelled(name, text, "position", {str(at): number for at, number in enumerate(numbers, 1)})
    yield GaugeMetricFamily(  # it falls where speculation loses
        "paceline_speculation_saved_seconds", "Time that plain decoding would have taken longer", value=counts.saved_s
    )


def _counter(name: str, text: str, value: float) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"paceline_{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: dict[str, float] | dict[str, int]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(f"paceline_{name}", text, labels=[label])
    for what, value in values.items():
        family.add_metric([what], value)
    return family
