"""A span for each request, for OpenTelemetry: who called it, what it cost, how it ended.

Source: OpenTelemetry's semantic conventions for generative AI (``gen_ai.*``) and HTTP servers; W3C Trace Context. What
they have no name for is ``paceline.*``, times in seconds. No prompt and no answer is in a span.

A span is made when its request has ended, from what is known of it then, so nothing is done while it runs. A thread of
the SDK sends them in batches over a bounded queue; what finds it full is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paceline import __version__
from paceline.errors import ParameterError, UnsupportedError
from paceline.params import SamplingParams
from paceline.serve.exchange import CLIENT_LEFT, Exchange
from paceline.serve.logs import PROBES
from paceline.serve.watch import Watch

LAST_WORDS_S = 5.0
"""Time that the last spans get at the end; a collector that is away would hold the process for longer."""

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/generate_stream": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Endpoint -> ``gen_ai.operation.name``. ``POST /`` is TGI's as well."""

EXPORTERS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
"""``OTEL_EXPORTER_OTLP_PROTOCOL`` -> the name under which its exporter is installed."""


class RequestSpans(Watch):
    """A span when a request has ended; of probes that went well, none."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, exchange: Exchange) -> None:
        """From arrival to the last byte; a child of the caller's span, where the caller named one."""
        if exchange.status == 200 and exchange.endpoint in PROBES:
            return
        assert exchange.ended_s is not None
        epoch_ns = time.time_ns() - time.perf_counter_ns()
        operation = operation_of(exchange)
        name = f"{_method(exchange)} {exchange.endpoint}".strip() if operation is None else f"{operation} {self._model}"
        span = self._tracer.start_span(
            name,
            self._propagator.extract(_carrier(exchange), Context()),
            SpanKind.SERVER,
            request_attributes(exchange, self._model),
            start_time=epoch_ns + int(exchange.started_s * 1e9),
        )
        if exchange.status >= 500 or (exchange.error is not None and exchange.status == 200):  # it broke in mid-stream
            span.set_status(Status(StatusCode.ERROR, exchange.error))
        span.end(epoch_ns + int(exchange.ended_s * 1e9))


def operation_of(exchange: Exchange) -> str | None:
    """What was asked of the model, as the conventions call it."""
    if exchange.endpoint == "/" and exchange.method == "POST":
        return "text_completion"
    return OPERATIONS.get(exchange.endpoint)


def request_attributes(exchange: Exchange, model: str) -> dict[str, Any]:
    """What a span says of a request that has ended; what does not apply to it is left out."""
    attributes: dict[str, Any] = {
        "http.request.method": _method(exchange),
        "http.route": exchange.endpoint or None,
        "http.response.status_code": None if exchange.status in (0, CLIENT_LEFT) else exchange.status,
        "error.type": "disconnect" if exchange.status == CLIENT_LEFT else exchange.error,
        "paceline.request_id": exchange.request_id,
        "paceline.client": exchange.client.name or None,
    }
    operation = operation_of(exchange)
    if operation is not None:
        attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": model,
        }
    if exchange.num_answers:
        attributes |= {
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": exchange.finish_reasons,
            "gen_ai.usage.input_tokens": exchange.num_prompt_tokens,
            "gen_ai.usage.output_tokens": exchange.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": exchange.num_cached_tokens,
            "gen_ai.request.stream": exchange.is_streamed,
            "gen_ai.response.time_to_first_chunk": exchange.ttft_s if exchange.is_streamed else None,
            "paceline.time_to_first_token": exchange.ttft_s,
            "paceline.time_in_queue": exchange.queue_s,
            "paceline.usage.drafted_tokens": exchange.num_drafted,
            "paceline.usage.accepted_tokens": exchange.num_accepted,
        }
    if exchange.params is not None and operation != "embeddings":
        attributes |= _sampling_attributes(exchange.params)
    return {name: value for name, value in attributes.items() if value is not None}


def _sampling_attributes(params: SamplingParams) -> dict[str, Any]:
    return {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.max_tokens": params.max_tokens,
        # An attribute is a signed number of 64 bits.
        "gen_ai.request.seed": params.seed if params.seed is not None and params.seed < 2**63 else None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.output.type": "json" if params.structure is not None and "json" in params.structure.kind else "text",
    }


def _carrier(exchange: Exchange) -> dict[str, str]:
    headers = {"traceparent": exchange.traceparent, "tracestate": exchange.tracestate}
    return {name: value for name, value in headers.items() if value is not None}


def _method(exchange: Exchange) -> str:
    """Of the methods that anybody sends; a made-up one would be a name for each caller's fancy."""
    known = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
    return exchange.method if exchange.method in known else "_OTHER"


def span_exporter(environment: Mapping[str, str] = os.environ) -> SpanExporter | None:
    """The exporter that OpenTelemetry's environment variables name: OTLP over HTTP unless they say otherwise, None for
    "none". Raises ``ParameterError`` for one that nobody knows, ``UnsupportedError`` for one that is not installed."""
    name = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if name == "none":
        return None
    if name == "otlp":
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL"
        )
        protocol = (protocol or "").strip() or "http/protobuf"
        if protocol not in EXPORTERS:
            raise ParameterError("OTEL_EXPORTER_OTLP_PROTOCOL", protocol, f"one of {', '.join(EXPORTERS)}")
        name = EXPORTERS[protocol]
    found = entry_points(group="opentelemetry_traces_exporter")
    chosen = next((point for point in found if point.name == name), None)
    if chosen is None:
        if name in EXPORTERS.values():
            package = f"opentelemetry-exporter-{name.replace('_', '-')}"
            raise UnsupportedError(f"spans over {protocol} need `pip install {package}`")
        installed = ", ".join(sorted({"otlp", "none", *(point.name for point in found)}))
        raise ParameterError("OTEL_TRACES_EXPORTER", name, f"one exporter that is installed: {installed}")
    exporter: SpanExporter = chosen.load()()
    return exporter


@contextlib.contextmanager
def tracing(model: str, logger: logging.Logger, exporter: SpanExporter | None) -> Iterator[Watch]:
    """What makes and sends spans while this lasts, by OpenTelemetry's environment variables. Its complaints go where
    those of ``logger`` do: writing them elsewhere could hold up the loop."""
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "paceline"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    processor = None if exporter is None else BatchSpanProcessor(exporter)
    if processor is not None:
        provider.add_span_processor(processor)
    complaints = logging.getLogger("opentelemetry")
    before = complaints.handlers, complaints.propagate
    complaints.handlers, complaints.propagate = logger.handlers, False
    try:
        yield RequestSpans(provider.get_tracer("paceline.serve", __version__), model)
    finally:
        ending = threading.Thread(target=provider.shutdown, name="paceline-spans", daemon=True)
        ending.start()
        ending.join(LAST_WORDS_S)
        complaints.handlers, complaints.propagate = before
