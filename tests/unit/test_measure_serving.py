"""Measuring servers: the arithmetic on timelines made by hand, the stream parser, endpoints and the drawing."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from scripted_server import chat_chunk, usage_chunk

from paceline.errors import ParameterError
from paceline.measure.serving.client import Endpoint, conclude, note
from paceline.measure.serving.exchange import LATENCIES, Exchange, Failure
from paceline.measure.serving.figures import Limits, distribution_ms, figures, lateness_s
from paceline.measure.serving.jobs import Job
from paceline.measure.serving.plot import (
    Drawing,
    distribution_panel,
    draw_png,
    draw_svg,
    running_panel,
    throughput_panel,
    ticks,
)
from paceline.measure.serving.sse import EventParser

# Latencies.


def answered(sent_s: float, chunk_s: list[float], *, tokens: int | None = None, finished_s: float | None = None) -> Any:
    return Exchange(
        sent_s,
        chunk_s=chunk_s,
        finished_s=finished_s,
        is_complete=True,
        prompt_tokens=10,
        reported_tokens=tokens,
    )


def test_latencies_are_those_of_the_definitions() -> None:
    # Sent at 1, first chunk at 1.5, last at 3: 7 tokens, so TPOT = (2.0 - 0.5) / 6, with the first 2.0 / 7.
    one = answered(1.0, [1.5, 2.5, 3.0], tokens=7, finished_s=3.0)
    values = {key: latency.values_s(one) for key, latency in LATENCIES.items()}
    assert values == {
        "ttft": [0.5],
        "tpot": [0.25],
        "chunk_gap": [1.0, 0.5],
        "tpot_with_ttft": [pytest.approx(2.0 / 7)],
        "e2e": [2.0],
    }


def test_a_last_token_without_text_arrives_with_the_finish_reason() -> None:
    assert answered(0.0, [1.0, 2.0], tokens=3, finished_s=3.0).tpot_s == pytest.approx(1.0)


def test_an_answer_of_one_token_has_no_time_per_token_and_no_gap() -> None:
    one = answered(0.0, [1.0], tokens=1)
    assert (one.tpot_s, one.gaps_s, one.ttft_s, one.e2e_s) == (None, [], 1.0, 1.0)


def test_an_empty_answer_begins_and_ends_with_its_finish_reason() -> None:
    one = answered(0.0, [], tokens=0, finished_s=2.0)
    assert (one.ttft_s, one.e2e_s, one.tpot_s, one.tpot_with_ttft_s) == (2.0, 2.0, None, None)


def test_tokens_are_chunks_where_the_server_does_not_count() -> None:
    assert answered(0.0, [1.0, 2.0, 4.0]).output_tokens == 3
    assert answered(0.0, [1.0, 2.0, 4.0]).tpot_s == pytest.approx(1.5)


def test_percentiles_lie_between_neighbours() -> None:
    shown = distribution_ms([0.004, 0.001, 0.003, 0.002])
    # Of n sorted values percentile p is at index p (n - 1): p50 at 1.5, p95 at 2.85, p99 at 2.97.
    expected = {"count": 4, "mean": 2.5, "p50": 2.5, "p95": 3.85, "p99": 3.97, "min": 1.0, "max": 4.0}
    assert shown == pytest.approx(expected)
    assert distribution_ms([]) == {"count": 0, **dict.fromkeys(("mean", "p50", "p95", "p99", "min", "max"))}


def test_figures_count_every_request_once_and_measure_those_that_succeeded() -> None:
    exchanges = [
        answered(0.0, [1.0, 2.0], tokens=4),
        answered(0.0, [3.0, 4.0]),
        Exchange(0.0, chunk_s=[0.1], failure=Failure("http_429", "full"), reported_tokens=50),
        Exchange(0.0, chunk_s=[9.0], is_complete=True, failure=Failure("timeout", "first"), prompt_tokens=99),
        Exchange(0.0, failure=Failure("timeout", "second")),
        Exchange(0.0, chunk_s=[0.2]),
    ]
    shown = figures(exchanges, wall_s=4.0, limits=Limits())
    assert shown["requests"] == {"sent": 6, "succeeded": 2, "failed": 3, "unfinished": 1}
    assert shown["errors"] == {
        "timeout": {"count": 2, "example": "first"},
        "http_429": {"count": 1, "example": "full"},
    }
    assert shown["rates"] == {"output_tokens_per_s": 1.5, "total_tokens_per_s": 6.5, "requests_per_s": 0.5}
    assert shown["latency_ms"]["ttft"]["count"] == 2
    assert shown["latency_ms"]["ttft"]["mean"] == pytest.approx(2000)
    assert shown["tokens"] == {
        "prompt": 20,
        "cached": 0,
        "output": 6,
        "counted_by_usage": 1,
        "counted_by_chunks": 1,
    }
    json.dumps(shown, allow_nan=False)


def test_goodput_counts_answers_that_keep_every_limit() -> None:
    quick = answered(0.0, [0.1, 0.2, 0.3])
    pausing = answered(0.0, [0.1, 0.9, 1.0])
    late = answered(0.0, [0.5, 0.6, 0.7])
    failed = Exchange(0.0, chunk_s=[0.1, 0.2], failure=Failure("cut_off", ""))
    exchanges = [quick, pausing, late, failed]

    def good(**limits: float) -> float:
        shown = figures(exchanges, wall_s=1.0, limits=Limits(**limits))
        return float(shown["rates"]["goodput_requests_per_s"])

    assert good(ttft_ms=200) == 2
    assert good(gap_ms=150) == 2
    assert good(tpot_ms=150) == 2
    assert good(e2e_ms=800) == 2
    assert good(ttft_ms=200, gap_ms=150) == 1
    assert good(e2e_ms=2000) == 3
    with pytest.raises(ParameterError, match="ttft_ms"):
        Limits(ttft_ms=0)


def test_lateness_is_of_open_loops_alone() -> None:
    assert lateness_s([Exchange(3.5, due_s=3.0), Exchange(4.0)]) == [0.5]


# The stream.

STREAM = (
    b": ping\n\n"
    + b'event: message\r\ndata: {"a": "\xed\x95\x9c"}\r\n\r\n'
    + b"id: 7\ndata: first\ndata: second\n\n"
    + b"data:[DONE]\n\n"
)
EVENTS = [b'{"a": "\xed\x95\x9c"}', b"first\nsecond", b"[DONE]"]


def test_events_do_not_depend_on_where_bytes_are_cut() -> None:
    for first, second in itertools.combinations(range(len(STREAM) + 1), 2):
        parser = EventParser()
        pieces = (STREAM[:first], STREAM[first:second], STREAM[second:])
        assert [one for piece in pieces for one in parser.feed(piece)] == EVENTS
    parser = EventParser()
    assert [one for byte in STREAM for one in parser.feed(bytes([byte]))] == EVENTS


def test_the_end_of_the_stream_completes_an_event_without_its_blank_line() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x") == []
    assert parser.close() == [b"x"]
    assert parser.close() == []


def told(*events: Any) -> Exchange:
    """An exchange after events that arrive at 1, 2, 3 ... seconds."""
    exchange = Exchange(0.0)
    for at, data in enumerate(events, 1):
        note(exchange, data if isinstance(data, bytes) else json.dumps(data).encode(), float(at))
    conclude(exchange)
    return exchange


def test_chunks_count_when_they_carry_text() -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    one = told(role, chat_chunk("a"), chat_chunk("b"), chat_chunk("", "stop"), usage_chunk(5, 2, 3), b"[DONE]")
    assert one.succeeded
    assert (one.chunk_s, one.finished_s) == ([2.0, 3.0], 4.0)
    assert (one.prompt_tokens, one.output_tokens, one.cached_tokens) == (5, 2, 3)


@pytest.mark.parametrize("part", ["content", "reasoning", "reasoning_content", "tool_calls"])
def test_thoughts_and_calls_are_answers_too(part: str) -> None:
    assert told({"choices": [{"delta": {part: "x"}, "finish_reason": "stop"}]}).chunk_s == [1.0]


def test_completions_have_their_text_in_the_choice() -> None:
    one = told(
        {"choices": [{"text": "a", "finish_reason": None}]}, {"choices": [{"text": "", "finish_reason": "length"}]}
    )
    assert (one.chunk_s, one.finished_s, one.succeeded) == ([1.0], 2.0, True)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([chat_chunk("a")], "cut_off"),
        ([], "cut_off"),
        ([b"[DONE]"], "empty"),
        ([chat_chunk("a"), {"error": {"message": "out of memory"}}], "error_event"),
        ([chat_chunk("a"), {"error": "out of memory"}, b"[DONE]"], "error_event"),
        ([b"{not json", b"[DONE]"], "bad_event"),
        ([b"[1, 2]"], "bad_event"),
        ([{"choices": [], "usage": {"total": 3}}], "bad_event"),
    ],
)
def test_a_stream_that_fails_says_how(events: list[Any], kind: str) -> None:
    one = told(*events)
    assert not one.succeeded
    assert one.failure is not None
    assert one.failure.kind == kind
    assert kind != "error_event" or one.failure.message == "out of memory"


# Endpoints.


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("https://h/v1/", "https://h/v1/chat/completions"),
        ("http://h/openai/v1", "http://h/openai/v1/chat/completions"),
    ],
)
def test_an_address_means_the_api_below_it(url: str, target: str) -> None:
    assert Endpoint(url).target == target


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ParameterError, match="url"):
        Endpoint(url)


def test_the_body_says_what_was_asked_for_and_nothing_else() -> None:
    chat = Endpoint("http://h", model="m", fields={"temperature": 0.0}).body(Job("hello", max_tokens=3))
    assert chat == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }
    talk = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    completions = Endpoint("http://h", "completions", "m", max_tokens=9)
    assert completions.body(Job(talk))["prompt"] == "be brief\n\nhi"
    assert completions.body(Job(talk))["max_tokens"] == 9
    assert Endpoint("http://h").body(Job(talk))["messages"] == list(talk)


def test_a_key_is_not_shown() -> None:
    assert "sesame" not in repr(Endpoint("http://h", key="sesame"))


# The drawing.


def test_panels_hold_the_values() -> None:
    panel = distribution_panel("x", [0.003, 0.001, 0.002, 0.004])
    assert panel.x == pytest.approx([1.0, 1.0, 2.0, 3.0, 4.0])
    assert panel.y == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    exchanges = [answered(10.0, [10.5, 11.5], tokens=6), answered(10.0, [11.9], tokens=4), Exchange(11.0)]
    throughput = throughput_panel(exchanges[:2], 10.0, 2.0)
    bin_s = 2.0 / (len(throughput.x) - 1)
    assert sum(throughput.y[:-1]) * bin_s == pytest.approx(10.0), "every token is in a bin"
    running = running_panel(exchanges, 10.0, 2.0)
    assert sum(running.y[:-1]) * bin_s == pytest.approx(1.5 + 1.9 + 1.0)


def test_the_drawing_is_one_document_without_outside_parts() -> None:
    from xml.etree import ElementTree

    svg = draw_svg(Drawing.of([answered(0.0, [1.0, 2.0])], 0.0, 2.0, title="<model> & more", note=""))
    ElementTree.fromstring(svg)
    assert "&lt;model&gt; &amp; more" in svg
    assert svg.count("http") == 1, "the name space"
    ElementTree.fromstring(draw_svg(Drawing.of([], 0.0, 0.0, title="", note="")))


def test_png_has_the_size_of_the_svg_at_twice_its_density(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for exchanges in ([answered(0.0, [1.0, 2.0]), answered(0.5, [1.5, 1.75, 4.0])], []):
        drawing = Drawing.of(exchanges, 0.0, 4.0, title="$x^$", note="a $ in a note")
        draw_png(drawing, tmp_path / "plot.png")
        data = (tmp_path / "plot.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", data[16:24]) == tuple(2 * side for side in drawing.size)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0.0, [0, 1]), (37, [0, 5, 10, 15, 20, 25, 30, 35, 40])],
)
def test_ticks_are_round(largest: float, expected: list[float]) -> None:
    assert ticks(largest) == pytest.approx(expected)
