"""Spans of requests: what they say, whose children they are, and that nobody waits for where they go."""

from __future__ import annotations

import contextlib
import http.server
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from byte_llm import byte_llm
from live_server import MESSAGES, LiveServer, live_server
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from paceline.errors import ParameterError, UnsupportedError
from paceline.serve import tracing as tracing_module
from paceline.serve.exchange import Exchange
from paceline.serve.keys import Client, KeyRing
from paceline.serve.tracing import span_exporter, tracing
from paceline.serve.watch import Watches

CHAT = "/v1/chat/completions"
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LOGGER = logging.getLogger("paceline.test_spans")


@contextlib.contextmanager
def traced_server(keys: KeyRing | None = None) -> Iterator[tuple[LiveServer, list[ReadableSpan]]]:
    """A server and its spans, which are there afterwards, in the order in which their requests ended."""
    exporter, spans = InMemorySpanExporter(), list[ReadableSpan]()
    with tracing("bytes", LOGGER, exporter) as watch, live_server(byte_llm(text="hello\0"), keys=keys) as server:
        server.service.watches.add(watch)
        yield server, spans
    spans += exporter.get_finished_spans()


def says(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_span_says_what_a_request_was_and_cost() -> None:
    before_ns = time.time_ns()
    with traced_server(KeyRing({"ann": "secret"})) as (server, spans):
        headers = {"Authorization": "Bearer secret", "x-request-id": "mine"}
        fields = {"temperature": 0, "max_tokens": 3, "n": 2, "seed": 2**63}
        answer = server.post(CHAT, json={"messages": MESSAGES, **fields}, headers=headers)
    usage = answer.json()["usage"]
    (span,) = spans
    assert (span.name, span.kind, span.parent) == ("chat bytes", SpanKind.SERVER, None)
    assert span.start_time is not None
    assert span.end_time is not None
    assert before_ns <= span.start_time < span.end_time <= time.time_ns()
    assert span.status.status_code == StatusCode.UNSET
    said = says(span)
    ttft_s, queue_s = said.pop("paceline.time_to_first_token"), said.pop("paceline.time_in_queue")
    assert 0 <= queue_s <= ttft_s <= (span.end_time - span.start_time) / 1e9
    assert said == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": "bytes",
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.output.type": "text",
        "gen_ai.response.model": "bytes",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "paceline.client": "ann",
        "paceline.request_id": "mine",
        "paceline.usage.drafted_tokens": 0,
        "paceline.usage.accepted_tokens": 0,
    }
    assert span.resource.attributes["service.name"] == "paceline"


def test_a_stream_has_the_time_of_its_first_chunk() -> None:
    with traced_server() as (server, spans):
        server.chat(stream=True, temperature=0)
    said = says(spans[0])
    assert said["gen_ai.request.stream"] is True
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert said["gen_ai.response.time_to_first_chunk"] == said["paceline.time_to_first_token"] > 0


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 2}, "text_completion bytes"),
        ("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 2}}, "text_completion bytes"),
        ("/", {"inputs": "x", "parameters": {"max_new_tokens": 2}}, "text_completion bytes"),
        ("/v1/embeddings", {"input": "x"}, "embeddings bytes"),
        ("/tokenize", {"prompt": "x"}, "POST /tokenize"),
    ],
)
def test_the_name_is_what_was_asked(path: str, body: dict[str, Any], name: str) -> None:
    with traced_server() as (server, spans):
        assert server.post(path, json=body).status_code == 200
    assert [span.name for span in spans] == [name]
    assert says(spans[0]).get("gen_ai.usage.input_tokens") == (None if path == "/tokenize" else 1)


def test_probes_leave_none_and_errors_say_which() -> None:
    with traced_server() as (server, spans):
        for path in ("/health/live", "/health/ready", "/health", "/metrics", "/stats"):
            assert server.get(path).status_code == 200
        assert server.chat(model="other").status_code == 404
        assert server.chat(temperature=-1).status_code == 400
        assert server.get("/nowhere").status_code == 404
        httpx.request("PROPFIND", server.url + CHAT)
    assert [(span.name, says(span)["error.type"], says(span)["http.response.status_code"]) for span in spans] == [
        ("chat bytes", "model_not_found", 404),
        ("chat bytes", "invalid_value", 400),
        ("GET", "not_found", 404),
        ("chat bytes", "method_not_allowed", 405),
    ]
    assert says(spans[3])["http.request.method"] == "_OTHER"
    # What the client did wrong is no error of a server's span.
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}


def test_a_span_is_the_child_of_the_callers() -> None:
    with traced_server() as (server, spans):
        for parent in (f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00", "nonsense"):
            server.post(
                CHAT,
                json={"messages": MESSAGES, "max_tokens": 1},
                headers={"traceparent": parent, "tracestate": "vendor=7"},
            )
    child, other = spans  # the second caller does not want its trace to be kept
    assert child.parent is not None
    assert f"{child.parent.span_id:016x}" == SPAN_ID
    assert f"{child.context.trace_id:032x}" == TRACE_ID
    assert child.context.trace_state.get("vendor") == "7"
    assert other.parent is None
    assert f"{other.context.trace_id:032x}" != TRACE_ID


def test_clients_that_left_and_servers_that_failed() -> None:
    exporter = InMemorySpanExporter()
    with tracing("bytes", LOGGER, exporter) as watch:
        watches = Watches([watch])
        watches.ended(Exchange(Client("", ""), CHAT, "POST"), 200, is_complete=False)
        watches.ended(Exchange(Client("", ""), CHAT, "POST", problem="internal_error"), 500, is_complete=True)
        watches.ended(Exchange(Client("", ""), CHAT, "POST", problem="engine_unavailable"), 200, is_complete=True)
    left, failed, broken = exporter.get_finished_spans()
    assert says(left)["error.type"] == "disconnect"
    assert "http.response.status_code" not in says(left)
    assert left.status.status_code == StatusCode.UNSET
    for span, error in ((failed, "internal_error"), (broken, "engine_unavailable")):
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, error)
        assert says(span)["error.type"] == error


class StuckExporter(SpanExporter):
    """A collector that takes the connection and then nothing."""

    def __init__(self) -> None:
        self.is_stuck, self.released = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_stuck.set()
        self.released.wait(30)
        return SpanExportResult.FAILURE


def test_nobody_waits_for_a_collector_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setattr(tracing_module, "LAST_WORDS_S", 0.05)
    exporter = StuckExporter()
    try:
        with live_server(byte_llm(text="hello\0")) as server:
            with tracing("bytes", LOGGER, exporter) as watch:
                server.service.watches.add(watch)
                assert server.chat().status_code == server.chat().status_code == 200
                assert exporter.is_stuck.wait(10)
                assert [server.chat(max_tokens=1).status_code for _ in range(12)] == [200] * 12
            # The end does not wait for it either, and requests go on.
            assert not exporter.released.is_set()
            assert server.chat().status_code == 200
    finally:
        exporter.released.set()


def test_variables_choose_the_exporter() -> None:
    assert span_exporter({"OTEL_TRACES_EXPORTER": "none"}) is None
    assert isinstance(span_exporter({"OTEL_TRACES_EXPORTER": "console"}), ConsoleSpanExporter)
    with pytest.raises(ParameterError, match="OTEL_TRACES_EXPORTER") as unknown:
        span_exporter({"OTEL_TRACES_EXPORTER": "pigeon"})
    assert "console" in unknown.value.allowed
    with pytest.raises(ParameterError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        span_exporter({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_an_exporter_that_is_not_installed_is_an_error_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_module, "entry_points", lambda group: ())
    with pytest.raises(UnsupportedError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
        span_exporter({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    with pytest.raises(UnsupportedError, match="pip install opentelemetry-exporter-otlp-proto-http"):
        span_exporter({})


def test_spans_arrive_at_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    bodies: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
        with tracing("bytes", LOGGER, span_exporter()) as watch:
            Watches([watch]).ended(Exchange(Client("", ""), CHAT, "POST"), 200, is_complete=True)
        collector.shutdown()
    ((path, body),) = bodies
    assert path == "/v1/traces"
    assert b"chat bytes" in body
    assert b"my-service" in body
