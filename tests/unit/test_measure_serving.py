"""Measuring servers: the arithmetic on timelines made by hand, schedules, prompts, the stream parser and the loops."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_server import chat_chunk, usage_chunk

from paceline.errors import ParameterError
from paceline.measure.serving.client import Endpoint, conclude, note
from paceline.measure.serving.drive import MOST_LOST, Driver, Load, Run
from paceline.measure.serving.exchange import LATENCIES, Exchange, Failure
from paceline.measure.serving.figures import Limits, distribution_ms, figures, lateness_s
from paceline.measure.serving.jobs import (
    Job,
    MadeUp,
    Sizing,
    made_up_job,
    poisson_times,
    read_jobs,
    shorter_than,
)
from paceline.measure.serving.plot import distribution_panel, draw, running_panel, throughput_panel, ticks
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


# Jobs.


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_prompts_of_every_form_are_read(tmp_path: Path) -> None:
    message = {"role": "user", "content": "a"}
    path = write(
        tmp_path / "data.jsonl",
        {"messages": [message]},
        {"prompt": "b"},
        "",
        {"turns": ["c", "later"]},
        {"question": "d", "answer": "x"},
    )
    assert [job.prompt for job in read_jobs(path)] == [(message,), "b", "c", "d"]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "a"}', '{"prompt": ""}', '{"turns": []}', '{"hash_ids": [1]}'])
def test_a_line_of_no_form_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ParameterError, match="line 2"):
        read_jobs(write(tmp_path / "data.jsonl", {"prompt": "a"}, line))


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="at least one"):
        read_jobs(write(tmp_path / "data.jsonl", ""))


def test_an_azure_trace_is_scaled_in_length_and_rate(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,3",
    )
    first, second = read_jobs(path, length_scale=0.125, rate_scale=0.5)
    assert (first.at_s, first.max_tokens) == (0.0, 6)
    assert second.at_s == pytest.approx(2 * 4.314579)
    assert second.max_tokens == 1, "an answer has a token at least"
    assert isinstance(first.prompt, MadeUp)
    assert isinstance(second.prompt, MadeUp)
    assert (first.prompt.num_tokens, second.prompt.num_tokens) == (47, 50)
    assert first.prompt.blocks != second.prompt.blocks, "nothing is shared that the trace does not share"


def test_a_bad_row_of_an_azure_trace_is_named(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    for row in ("yesterday,1,1", "2023-11-16 18:15:46.6,x,1", "2023-11-16 18:15:46.6"):
        with pytest.raises(ParameterError, match="line 3"):
            read_jobs(write(tmp_path / "trace.csv", header, "2023-11-16 18:15:46,1,1", row))


def test_a_mooncake_trace_shares_the_text_of_shared_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 3000, "input_length": 1500, "output_length": 16, "hash_ids": [1, 2, 9]},
        {"timestamp": 1000, "input_length": 1200, "output_length": 8, "hash_ids": [1, 2, 3]},
        {"timestamp": 2000, "input_length": 512, "output_length": 8, "hash_ids": [4]},
    )
    jobs = read_jobs(path, length_scale=0.125, rate_scale=0.1)
    assert [job.at_s for job in jobs] == [0.0, 10.0, 20.0], "in order of arrival, from the first on"
    texts = [job.sized(Sizing()).prompt for job in jobs]
    words = [text.split() for text in texts if isinstance(text, str)]
    assert [len(one) for one in words] == [150, 64, 188]
    assert words[0][:128] == words[2][:128], "two blocks of 512 / 8 tokens"
    assert words[0][128] != words[2][128], "and no word more"
    assert words[0][:4] != words[1][:4]


def test_made_up_prompts_have_the_tokens_that_were_asked_for() -> None:
    sizing = Sizing.between((32, 32 * 2 + 7), (288, 288 * 2 + 7))
    assert (sizing.tokens_per_word, sizing.overhead_tokens) == (2.0, 7.0)
    text = made_up_job(0, 0, 107).sized(sizing).prompt
    assert isinstance(text, str)
    assert len(text.split()) == 50
    assert sizing.words(1) == 1, "no prompt is empty"
    assert Sizing.between((32, 10), (288, 10)) == Sizing(), "a server that counts nothing tells nothing"


def test_made_up_prompts_differ_by_seed_and_index_from_the_start_and_are_repeatable() -> None:
    def beginning(seed: int, index: int) -> str:
        prompt = made_up_job(seed, index, 50).sized(Sizing()).prompt
        assert isinstance(prompt, str)
        return " ".join(prompt.split()[:6])

    beginnings = {beginning(seed, index) for seed in range(3) for index in range(20)}
    assert len(beginnings) == 60
    assert beginning(1, 2) == beginning(1, 2)


def test_longer_prompts_of_a_trace_can_be_left_out() -> None:
    jobs = [made_up_job(0, 0, 10), made_up_job(0, 1, 11), Job("written")]
    assert shorter_than(jobs, 10) == [jobs[0], jobs[2]]


def test_poisson_times_have_exponential_gaps() -> None:
    times = list(itertools.islice(poisson_times(4.0, seed=1), 20_001))
    assert times[0] == 0.0
    assert times == list(itertools.islice(poisson_times(4.0, seed=1), 20_001))
    assert times[:9] != list(itertools.islice(poisson_times(4.0, seed=2), 9))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    # Standard errors with 20,000 gaps: of the mean 0.25 / sqrt(20,000) = 0.0018, of a share below 0.0036.
    assert mean == pytest.approx(0.25, abs=5 * 0.0018)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2.0), abs=5 * 0.0036)


# The loops, over a client of a scripted clock.


class ScriptedClient:
    """Answers when told to; its clock stands still but for what the test adds."""

    def __init__(self, end: Callable[[int, Exchange], None] | None = None) -> None:
        self.now_s = 100.0
        self.sent: list[Job] = []
        self.running = 0
        self.most_running = 0
        self._end = end

    def clock(self) -> float:
        return self.now_s

    async def ask(self, job: Job, exchange: Exchange) -> None:
        exchange.sent_s = self.now_s
        self.sent.append(job)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        at = len(self.sent) - 1
        await asyncio.sleep(0)
        self.running -= 1
        self.now_s += 1.0
        exchange.chunk_s = [self.now_s]
        exchange.is_complete = True
        if self._end is not None:
            self._end(at, exchange)


def driven(client: Any, load: Load, jobs: list[Job], stop: asyncio.Event | None = None) -> Run:
    async def drive() -> Run:
        event = asyncio.Event() if stop is None else stop
        return await Driver(client, load, num_requests=len(jobs), stop=event, report=lambda *_: None).run(iter(jobs))

    return asyncio.run(drive())


JOBS = [Job(f"prompt {at}") for at in range(10)]


def test_a_closed_loop_keeps_so_many_running() -> None:
    client = ScriptedClient()
    run = driven(client, Load(concurrency=3), JOBS)
    assert client.most_running == 3
    assert client.sent == JOBS
    assert len(run.exchanges) == 10
    assert run.stopped is None
    assert run.wall_s == pytest.approx(10.0)


def test_no_request_is_sent_after_the_duration() -> None:
    client = ScriptedClient()
    run = driven(client, Load(concurrency=1, duration_s=4.0), JOBS)
    assert len(run.exchanges) == 4
    assert all(one.succeeded for one in run.exchanges)


def test_a_trace_is_sent_at_its_times_whether_or_not_answers_come() -> None:
    jobs = [Job(f"{at}", at_s=at) for at in (0.0, 0.0, 0.0, -5.0)]
    client = ScriptedClient()
    run = driven(client, Load(uses_trace=True), jobs)
    assert client.most_running == 4, "an open loop does not wait for answers"
    assert lateness_s(run.exchanges) == [0.0, 0.0, 0.0, 5.0]


def test_an_open_loop_ends_with_the_duration() -> None:
    jobs = [Job(f"{at}", at_s=at) for at in (0.0, -1.0, 7.0, 8.0)]
    assert len(driven(ScriptedClient(), Load(uses_trace=True, duration_s=5.0), jobs).exchanges) == 2


def test_a_server_that_has_gone_ends_the_run() -> None:
    def fail(at: int, exchange: Exchange) -> None:
        if at >= 5:
            exchange.failure = Failure("connection_failed", "refused")

    run = driven(ScriptedClient(fail), Load(concurrency=1), JOBS * 10)
    assert len(run.exchanges) == 5 + MOST_LOST
    assert run.stopped is not None
    assert "has gone" in run.stopped


def test_requests_that_fail_otherwise_do_not_end_the_run() -> None:
    def fail(at: int, exchange: Exchange) -> None:
        exchange.failure = Failure("http_429", "full")

    run = driven(ScriptedClient(fail), Load(concurrency=2), JOBS * 10)
    assert len(run.exchanges) == 100
    assert run.stopped is None


@pytest.mark.parametrize("load", [Load(concurrency=2), Load(rate=1e9)])
def test_an_interrupted_run_keeps_what_it_has(load: Load) -> None:
    async def drive() -> Run:
        stop = asyncio.Event()

        class Hanging(ScriptedClient):
            async def ask(self, job: Job, exchange: Exchange) -> None:
                if len(self.sent) == 3:
                    stop.set()
                    await asyncio.Event().wait()
                await super().ask(job, exchange)

        client: Any = Hanging()
        return await Driver(client, load, num_requests=10, stop=stop, report=lambda *_: None).run(iter(JOBS))

    run = asyncio.run(drive())
    assert run.stopped == "interrupted"
    assert sum(one.succeeded for one in run.exchanges) == 3
    assert figures(run.exchanges, wall_s=1.0, limits=Limits())["requests"]["unfinished"] >= 1


def test_a_fault_of_ours_is_not_hidden() -> None:
    def fail(at: int, exchange: Exchange) -> None:
        raise ZeroDivisionError

    for load in (Load(concurrency=2), Load(rate=1e9)):
        with pytest.raises(ZeroDivisionError):
            driven(ScriptedClient(fail), load, JOBS)


def test_a_load_is_one_of_three() -> None:
    for fields in ({}, {"concurrency": 1, "rate": 1.0}, {"rate": 0.0}, {"concurrency": 0}, {"rate": math.nan}):
        with pytest.raises(ParameterError):
            Load(**fields)  # type: ignore[arg-type]


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

    drawing = draw([answered(0.0, [1.0, 2.0])], 0.0, 2.0, title="<model> & more", note="")
    ElementTree.fromstring(drawing)
    assert "&lt;model&gt; &amp; more" in drawing
    assert drawing.count("http") == 1, "the name space"
    ElementTree.fromstring(draw([], 0.0, 0.0, title="", note=""))


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0.0, [0, 1]), (37, [0, 5, 10, 15, 20, 25, 30, 35, 40])],
)
def test_ticks_are_round(largest: float, expected: list[float]) -> None:
    assert ticks(largest) == pytest.approx(expected)
