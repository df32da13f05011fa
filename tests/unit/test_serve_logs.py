"""What a server logs of requests, and that logging never holds it up."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from byte_llm import byte_llm
from live_server import LIMIT_S, LiveServer, live_server

from paceline.engine.outputs import Completion, Delta, Timing
from paceline.params import SamplingParams
from paceline.serve.exchange import CLIENT_LEFT, Exchange
from paceline.serve.keys import KeyRing
from paceline.serve.logs import (
    LOGGER,
    JsonFormatter,
    PipeHandler,
    RequestLog,
    TextFormatter,
    logging_to,
    request_fields,
)

CHAT = "/v1/chat/completions"


class Lines:
    """What was written to a pipe."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def all(self) -> list[str]:
        """All lines; nobody may write any more."""
        os.close(self.writer)
        with open(self.reader, encoding="utf-8") as file:
            return file.read().splitlines()


@contextlib.contextmanager
def logged_server(log_format: Any, keys: KeyRing | None = None) -> Iterator[tuple[LiveServer, list[str]]]:
    """A server with a log; its lines are there afterwards."""
    pipe, lines = Lines(), list[str]()
    with logging_to(pipe.writer, log_format) as logger, live_server(byte_llm(text="hello\0"), keys=keys) as server:
        server.service.watches.add(RequestLog(logger))
        yield server, lines
    lines += pipe.all()


def test_a_request_is_one_line_of_json_without_secrets() -> None:
    key = "a-key-that-nobody-may-see"
    with logged_server("json", KeyRing({"ann": key})) as (server, lines):
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "unspoken"}], "max_tokens": 4, "stream": stream}
            headers = {"Authorization": f"Bearer {key}", "X-Request-Id": f"request-{stream}"}
            assert server.post(CHAT, json=body, headers=headers).status_code == 200
        server.get("/health/ready")
        server.post(CHAT, json={}, headers={"Authorization": "Bearer wrong"})
    whole, streamed, probe, refused = (json.loads(line) for line in lines)
    for line in (whole, streamed):
        assert (line["client"], line["endpoint"], line["status"], line["level"]) == ("ann", CHAT, 200, "info")
        assert (line["output_tokens"], line["finish_reason"]) == (4, "length")
        assert line["prompt_tokens"] > line["cached_tokens"] >= 0
        assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["e2e_s"]
        assert line["time"].endswith("Z")
    assert [whole["request_id"], streamed["request_id"]] == ["request-False", "request-True"]
    assert (probe["endpoint"], probe["level"]) == ("/health/ready", "debug")
    assert (refused["status"], refused["error"]) == (401, "invalid_api_key")
    assert "output_tokens" not in refused
    for secret in (key, "unspoken", "hello", "wrong"):
        assert secret not in "".join(lines)


def test_in_a_terminal_probes_are_not_shown() -> None:
    with logged_server("text") as (server, lines):
        server.get("/health/ready")
        server.chat(max_tokens=4)
        server.get("/nothing")
    assert len(lines) == 2
    assert f"POST {CHAT} 200" in lines[0]
    assert "+ 4 tokens ttft " in lines[0]
    assert "GET ? 404 not_found" in lines[1]


def test_an_error_is_one_line_of_json_with_its_trace() -> None:
    pipe = Lines()
    with logging_to(pipe.writer, "json") as logger:
        try:
            raise ValueError("bad\nluck")
        except ValueError:
            logger.exception("request %s failed", "x")
    (line,) = pipe.all()
    document = json.loads(line)
    assert (document["message"], document["error"], document["level"]) == ("request x failed", "ValueError", "error")
    assert "Traceback" in document["traceback"]
    assert 'raise ValueError("bad\\nluck")' in document["traceback"]


def test_errors_are_told_when_requests_are_not() -> None:
    pipe = Lines()
    with logging_to(pipe.writer, "off") as logger:
        logger.error("broken")
    assert [line[9:] for line in pipe.all()] == ["ERROR broken"]


def test_a_full_pipe_costs_lines_and_no_time() -> None:
    reader, writer = os.pipe()
    handler = PipeHandler(writer, max_waiting=10)
    handler.setFormatter(TextFormatter())
    record = logging.LogRecord(LOGGER, logging.INFO, "", 0, "x" * 10_000, None, None)
    for _ in range(1000):  # far more than pipe and queue hold
        handler.emit(record)
    read: list[bytes] = []
    told = threading.Event()

    def reading() -> None:
        while piece := os.read(reader, 65536):
            read.append(piece)
            if b"lines lost" in b"".join(read[-2:]):
                told.set()

    thread = threading.Thread(target=reading)
    thread.start()
    for _ in range(int(LIMIT_S / 0.01)):  # one that comes once there is room says what was lost
        handler.emit(record)
        if told.wait(0.01):
            break
    handler.close()
    os.close(writer)
    thread.join(LIMIT_S)
    os.close(reader)
    assert told.is_set()


def test_a_reader_that_is_gone_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = PipeHandler(writer)
    handler.setFormatter(TextFormatter())
    for _ in range(3):
        handler.emit(logging.LogRecord(LOGGER, logging.INFO, "", 0, "x", None, None))
    handler.close()
    os.close(writer)


def test_the_logger_is_as_it_was_before() -> None:
    logger = logging.getLogger(LOGGER)
    before = (logger.level, logger.propagate, list(logger.handlers))
    pipe = Lines()
    with logging_to(pipe.writer, "json"):
        assert logger.isEnabledFor(logging.DEBUG)
    assert (logger.level, logger.propagate, logger.handlers) == before
    pipe.all()


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_what_a_client_sends_cannot_write_lines_of_its_own(formatter: logging.Formatter) -> None:
    record = logging.LogRecord(LOGGER, logging.INFO, "", 0, "one\ntwo\x1b[2J\r", None, None)
    assert len(formatter.format(record).splitlines()) == 1
    assert "\x1b" not in formatter.format(record)


def test_one_who_left_is_told_apart() -> None:
    exchange = Exchange(endpoint=CHAT)
    exchange.asked(3, SamplingParams(n=2), streaming=True, asked_s=exchange.started_s)
    exchange.heard([Delta("ab", [1, 2], "stop", 0, Completion("ab", [1, 2], "stop", 3, timing=Timing(0.5, 0.25)))])
    exchange.status = CLIENT_LEFT
    fields = request_fields(exchange)
    assert (fields["status"], fields["finish_reason"]) == (CLIENT_LEFT, "disconnect,stop")
    assert fields["tpot_s"] == 0.25
