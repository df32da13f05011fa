"""`/metrics`: what Prometheus scrapes. Requests are counted as they end, the engine's totals read when asked for."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from starlette.requests import Request

from paceline import __version__
from paceline.serve.answers import Answer, TextAnswer
from paceline.serve.engine_metrics import engine_metrics
from paceline.serve.request_totals import EndpointTotals, Histogram, RequestTotals
from paceline.serve.service import Exchange, Service

if TYPE_CHECKING:  # at run time it is imported with the first scrape: it takes a tenth of a second
    from prometheus_client.core import Metric

HISTOGRAMS: tuple[tuple[str, str, Callable[[EndpointTotals], Histogram]], ...] = (
    ("queue_time", "from submission to the first step", lambda group: group.queue),
    ("ttft", "from arrival to the first token handed to the socket (unstreamed: drawn)", lambda group: group.ttft),
    ("tpot", "mean time of an answer's tokens after the first", lambda group: group.tpot),
    ("chunk_gap", "between chunks of a stream that carry tokens", lambda group: group.gap),
    ("e2e", "from arrival to the last byte, of requests whose clients stayed", lambda group: group.e2e),
)

TOKENS: tuple[tuple[str, str, Callable[[EndpointTotals], int]], ...] = (
    ("prompt_tokens", "of requests that ended", lambda group: group.prompt_tokens),
    ("cached_prompt_tokens", "of these, found in the prefix cache", lambda group: group.cached_tokens),
    ("output_tokens", "handed over by the engine to requests that ended", lambda group: group.output_tokens),
)


async def metrics(service: Service, exchange: Exchange, http: Request, body: None) -> Answer:
    """Everything in Prometheus's text format."""
    await asyncio.to_thread(importlib.import_module, "prometheus_client")
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.exposition import CONTENT_TYPE_LATEST

    if service.bandwidth is not None and service.is_loaded:
        service.bandwidth.measure_if_idle(service.llm)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(service))
    return TextAnswer(generate_latest(registry).decode(), CONTENT_TYPE_LATEST)


class _Collector:
    """What one scrape collects."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        yield from request_metrics(self._service.totals)
        yield from _process_metrics()
        if self._service.is_loaded:
            yield from engine_metrics(self._service)


def request_metrics(totals: RequestTotals) -> Iterator[Metric]:
    """By endpoint: statuses, finish reasons, tokens and times."""
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    labels = ["endpoint", "client"] if totals.by_client else ["endpoint"]
    groups = [(list(key[: len(labels)]), group) for key, group in totals.groups.items()]
    requests = CounterMetricFamily(
        "paceline_http_requests", "HTTP requests; 499: the client left", labels=[*labels, "status"]
    )
    answers = CounterMetricFamily("paceline_answers", "Answers by why they ended", labels=[*labels, "finish_reason"])
    for names, group in groups:
        for status, count in group.statuses.items():
            requests.add_metric([*names, str(status)], count)
        for reason, count in group.finish_reasons.items():
            answers.add_metric([*names, reason], count)
    yield requests
    yield answers
    asked = [(names, group) for names, group in groups if group.finish_reasons]
    for name, text, number in TOKENS:
        family = CounterMetricFamily(f"paceline_{name}", f"Tokens {text}", labels=labels)
        for names, group in asked:
            family.add_metric(names, number(group))
        yield family
    for name, text, histogram in HISTOGRAMS:
        times = HistogramMetricFamily(f"paceline_{name}_seconds", f"Time {text}", labels=labels)
        for names, group in asked:
            times.add_metric(names, buckets=histogram(group).buckets(), sum_value=histogram(group).sum_s)
        yield times


def _process_metrics() -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

    yield InfoMetricFamily("paceline_build", "What runs", value={"version": __version__})
    yield GaugeMetricFamily(
        "paceline_process_resident_memory_bytes", "Memory of this process, weights included", value=resident_bytes()
    )


def resident_bytes() -> int:
    """Memory that the process has in use now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
