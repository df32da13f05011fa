"""What Prometheus is told of requests and of the engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from byte_llm import byte_llm
from live_server import LIMIT_S, MESSAGES, LiveServer, eventually, live_server, request_bytes
from prometheus_client.parser import text_string_to_metric_families
from test_engine_restart import broken_scheduler

from paceline.engine.outputs import Completion, Delta, Timing
from paceline.params import SamplingParams
from paceline.serve.bandwidth import Bandwidth
from paceline.serve.exchange import CLIENT_LEFT, Exchange
from paceline.serve.keys import KeyRing
from paceline.serve.request_totals import SECONDS, Histogram
from paceline.serve.settings import ServeSettings
from paceline.serve.watch import Watches

CHAT = "/v1/chat/completions"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live_server(byte_llm(text="hello\0")) as running:
        yield running


def scrape(server: LiveServer, *, settled: bool = True, **options: object) -> Samples:
    """All samples; once every request has ended, which is a moment after its client has the answer."""
    assert not settled or eventually(lambda: not server.server.server_state.tasks)
    answer = server.get("/metrics", **options)
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"paceline_{name}", tuple(sorted(labels.items()))]


def test_histograms_count_the_requests(server: LiveServer) -> None:
    for number in range(6):
        assert server.chat(stream=number % 2 == 0, max_tokens=4).status_code == 200
    samples = scrape(server)
    for name in ("queue_time", "ttft", "tpot", "e2e"):
        assert value(samples, f"{name}_seconds_count", endpoint=CHAT) == 6, name
        assert value(samples, f"{name}_seconds_bucket", endpoint=CHAT, le="+Inf") == 6
    assert 0 <= value(samples, "chunk_gap_seconds_count", endpoint=CHAT) <= 3 * 3
    assert value(samples, "http_requests_total", endpoint=CHAT, status="200") == 6
    assert value(samples, "answers_total", endpoint=CHAT, finish_reason="length") == 6
    assert value(samples, "output_tokens_total", endpoint=CHAT) == 6 * 4
    usage = server.chat(max_tokens=4).json()["usage"]
    assert value(samples, "prompt_tokens_total", endpoint=CHAT) == 6 * usage["prompt_tokens"]
    assert value(samples, "cached_prompt_tokens_total", endpoint=CHAT) > 0


def test_no_counter_falls_when_the_engine_starts_again(server: LiveServer) -> None:
    server.chat(max_tokens=4)
    server.get("/stats")
    before = scrape(server)
    with broken_scheduler():
        assert server.chat(max_tokens=4).status_code == 503
    assert eventually(lambda: server.service.num_restarts == 1)
    after = scrape(server)
    counted = {key: number for key, number in before.items() if key[0].endswith(("_total", "_count", "_sum"))}
    assert {key: (number, after[key]) for key, number in counted.items() if after[key] < number} == {}
    assert value(before, "engine_errors_total") == value(before, "engine_restarts_total") == 0
    assert value(after, "engine_errors_total") == value(after, "engine_restarts_total") == 1
    assert value(after, "engine_output_tokens_total") == value(before, "engine_output_tokens_total") == 4
    assert server.chat(max_tokens=4).status_code == 200
    state = server.get("/stats").json()
    assert 0 <= state["prefix_hit_rate"] <= 1
    assert state["read_gb_s"] > 0
    assert state["restarts"] == 1


def test_the_engine_is_read_at_the_scrape(server: LiveServer) -> None:
    server.chat(max_tokens=4)
    before = scrape(server)
    server.chat(max_tokens=4)
    after = scrape(server)
    assert value(before, "engine_output_tokens_total") == 4
    assert value(after, "engine_output_tokens_total") == 8
    assert value(after, "engine_steps_total") > value(before, "engine_steps_total") > 0
    assert value(after, "read_bytes_total") > value(before, "read_bytes_total") > 0
    assert value(after, "step_seconds_total", part="executor") > 0
    assert value(after, "prefix_cache_hit_tokens_total") <= value(after, "prefix_cache_query_tokens_total")
    assert value(after, "kv_pages") == 256
    assert value(after, "requests_running") == value(after, "kv_pages_used") == 0
    assert value(after, "engine_progress_age_seconds") == 0
    assert value(after, "process_resident_memory_bytes") > 2**20
    (info,) = [dict(labels) for name, labels in after if name == "paceline_model_info"]
    assert info["model"] == "bytes"
    assert {"isa", "threads", "weights", "kv_dtype", "speculation"} <= set(info)


def test_one_who_leaves_is_counted_as_such() -> None:
    with live_server(byte_llm(text="hello")) as server:
        with socket.create_connection(server.address, timeout=LIMIT_S) as connection:
            body = {"messages": MESSAGES, "stream": True, "ignore_eos": True, "max_tokens": 4000}
            connection.sendall(request_bytes(CHAT, body))
            with connection.makefile("rb") as lines:
                assert any(b"chat.completion.chunk" in line for line in lines)
        left = ("paceline_http_requests_total", (("endpoint", CHAT), ("status", str(CLIENT_LEFT))))
        assert eventually(lambda: left in scrape(server))
        samples = scrape(server)
        assert samples[left] == 1
        assert value(samples, "answers_total", endpoint=CHAT, finish_reason="disconnect") == 1
        assert value(samples, "e2e_seconds_count", endpoint=CHAT) == 0, "it did not see the end"


def test_random_paths_and_errors_make_no_labels(server: LiveServer) -> None:
    for number in range(20):
        server.get(f"/nothing/{number}")
        server.get(f"/v1/models/{number}")
    server.chat(temperature=-1)
    server.chat(temperature="hot")
    samples = scrape(server)
    endpoints = {dict(labels)["endpoint"] for _, labels in samples if "endpoint" in dict(labels)}
    assert endpoints == {"other", "/v1/models/{model:path}", CHAT}
    assert value(samples, "http_requests_total", endpoint="other", status="404") == 20
    assert value(samples, "http_requests_total", endpoint=CHAT, status="400") == 2
    assert ("paceline_ttft_seconds_count", (("endpoint", CHAT),)) not in samples, "no engine was asked"


def test_counters_never_fall_while_many_ask(server: LiveServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(server.chat, stream=number % 2 == 0, max_tokens=5) for number in range(24)]
        before = scrape(server, settled=False)
        while not all(one.done() for one in asking):
            after = scrape(server, settled=False)
            falls = [key for key, number in before.items() if _is_total(key[0]) and after[key] < number]
            assert falls == []
            before = after
    assert value(scrape(server), "http_requests_total", endpoint=CHAT, status="200") == 24


def _is_total(name: str) -> bool:
    return name.endswith(("_total", "_count", "_bucket", "_sum"))


def test_clients_are_told_apart_only_when_asked() -> None:
    keys = KeyRing({"ann": "a", "bob": "b"})
    header = {"Authorization": "Bearer a"}
    for by_client in (False, True):
        with live_server(byte_llm(), ServeSettings(metrics_by_client=by_client), keys) as server:
            assert server.get("/metrics").status_code == 401, "what others ask is nobody's business"
            server.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1}, headers=header)
            samples = scrape(server, headers=header)
            labels = {"endpoint": CHAT, **({"client": "ann"} if by_client else {})}
            assert value(samples, "output_tokens_total", **labels) == 1
            assert "Bearer" not in json.dumps([list(key) for key in samples])


def test_metrics_while_the_model_loads() -> None:
    with live_server(None) as server:
        samples = scrape(server)
        assert ("paceline_requests_running", ()) not in samples
        assert value(samples, "process_resident_memory_bytes") > 0


def test_bandwidth_is_measured_once_and_only_when_idle(server: LiveServer) -> None:
    asked: list[int] = []

    def probe(num_threads: int) -> float:
        asked.append(num_threads)
        return 12.5

    bandwidth = server.service.bandwidth = Bandwidth(probe)
    assert ("paceline_memory_bandwidth_bytes_per_second", ()) not in scrape_unmeasured(server)
    scrape(server)
    bandwidth.wait()
    assert value(scrape(server), "memory_bandwidth_bytes_per_second") == 12.5e9
    assert asked == [1]


def scrape_unmeasured(server: LiveServer) -> Samples:
    """A scrape of a server that is not allowed to measure."""
    kept, server.service.bandwidth = server.service.bandwidth, None
    try:
        return scrape(server)
    finally:
        server.service.bandwidth = kept


def test_a_class_holds_its_upper_bound() -> None:
    histogram = Histogram()
    for seconds in (0.0, SECONDS[0], SECONDS[0] * 1.01, SECONDS[-1] + 1):
        histogram.observe(seconds)
    buckets = dict(histogram.buckets())
    assert buckets[repr(SECONDS[0])] == 2
    assert buckets[repr(SECONDS[1])] == buckets[repr(SECONDS[-1])] == 3
    assert buckets["+Inf"] == 4
    assert list(buckets.values()) == sorted(buckets.values())


def test_times_of_an_exchange_follow_the_definitions() -> None:
    answer = Completion("ab", [1, 2], "stop", 5, timing=Timing(ttft_s=0.5, tpot_s=0.25, queue_s=0.125))
    for is_streamed, ttft_s in ((True, 3.0), (False, 1.5)):
        exchange = Exchange(started_s=10.0)
        exchange.asked(5, SamplingParams(), streaming=is_streamed, asked_s=11.0)
        exchange.asked(
            5, SamplingParams(), streaming=is_streamed, asked_s=12.0
        )  # a second prompt counts from the first
        exchange.heard([Delta("ab", [1, 2], "stop", 0, answer)])
        Watches([]).sent(exchange)
        assert exchange.first_sent_s is not None
        exchange.first_sent_s = 13.0
        assert (exchange.ttft_s, exchange.tpot_s, exchange.queue_s) == (ttft_s, [0.25], 0.125)
        assert exchange.num_unsent_tokens == 0


def test_a_head_request_is_complete(server: LiveServer) -> None:
    assert httpx.head(server.url + "/v1/models").status_code == 200
    assert value(scrape(server), "http_requests_total", endpoint="/v1/models", status="200") == 1
