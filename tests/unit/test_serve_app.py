"""The application around the endpoints: routes, errors, limits, disconnects."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import httpx
import pytest
from byte_llm import byte_llm
from live_server import LIMIT_S, MESSAGES, LiveServer, eventually, is_idle, live_server, read_all, request_bytes

from paceline.config import EngineConfig
from paceline.serve.keys import KeyRing
from paceline.serve.settings import ServeSettings

CHAT = "/v1/chat/completions"


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live_server(
        byte_llm(text="hello\0"), ServeSettings(header_s=0.3, body_s=0.3, max_body_bytes=100_000)
    ) as running:
        yield running


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error document; checks its form."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


def raw_answer(data: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_path_that_does_not_exist_is_404(server: LiveServer) -> None:
    answer = server.get("/v1/nothing")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "not_found"


def test_a_wrong_method_is_405_and_says_which_are_right(server: LiveServer) -> None:
    answer = server.get(CHAT)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "OPTIONS, POST"
    assert error_of(answer)["code"] == "method_not_allowed"
    assert httpx.request("PATCH", server.url + "/v1/models").status_code == 405


def test_head_and_options(server: LiveServer) -> None:
    head = httpx.head(server.url + "/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    options = httpx.options(server.url + "/v1/models")
    assert (options.status_code, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}", "deeper than 128"),
        (b'{"messages": [], "messages": []}', '"messages" stands twice'),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "-Infinity"),
        (b'{"temperature": 1e999}', "too large"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        ('{"messages": []}'.encode("utf-16"), "not UTF-8"),
        (b"[]", "valid dictionary"),
        (b"null", "valid dictionary"),
    ],
)
def test_a_body_that_is_no_proper_json_is_400(server: LiveServer, body: bytes, words: str) -> None:
    answer = server.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert words in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", 'given "hot"'),
        ({"temperature": -1}, "temperature", "temperature=-1"),
        ({"temprature": 1}, "temprature", "unknown field, the fields are"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "required"),
        ({"stop": ["x", 5]}, "stop.1", "valid string"),
        ({"stop": 5}, "stop", "valid string, or"),
        ({"seed": 10**400}, "seed", "seed"),
        ({"temperature": 10**400}, "temperature", "temperature"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
    ],
)
def test_a_wrong_field_is_400_and_named(server: LiveServer, fields: dict[str, Any], param: str, words: str) -> None:
    answer = server.chat(**fields)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param
    assert words in error_of(answer)["message"]


def test_a_body_that_is_not_json_by_its_type_is_415(server: LiveServer) -> None:
    answer = server.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"})
    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_long_is_413_for_a_client_that_sends_all_of_it_first(
    server: LiveServer, is_chunked: bool
) -> None:
    content: Any = iter([b" " * 65536] * 40) if is_chunked else b" " * 65536 * 40
    answer = server.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")


def test_a_client_that_asks_before_it_sends_is_told_at_once(server: LiveServer) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    data = (head + "Content-Length: 100001\r\nExpect: 100-continue\r\n\r\n").encode()
    assert raw_answer(server.raw(data))[0] == 413


def test_a_chunked_body_is_read(server: LiveServer) -> None:
    body = json.dumps({"messages": MESSAGES}).encode()
    answer = server.post(CHAT, content=iter([body[:5], body[5:]]), headers={"Content-Type": "application/json"})
    assert answer.json()["choices"][0]["message"]["content"] == "hello"


def test_a_large_body_is_parsed_off_the_loop_and_right(server: LiveServer) -> None:
    with live_server(byte_llm(text="hello\0")) as other:
        answer = other.chat(metadata={"x": "y" * 200_000})
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        assert other.chat(metadata={"x": "y" * 200_000}, temperature="hot").status_code == 400


def test_a_head_that_is_too_long_is_431(server: LiveServer) -> None:
    whole = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 70_000 + b"\r\n\r\n"
    endless = b"GET /v1/models HTTP/1.1\r\n" + b"X-Some: thing\r\n" * 40_000
    for data in (whole, endless):
        status, error = raw_answer(server.raw(data))
        assert (status, error["code"]) == (431, "headers_too_large")


def test_a_slow_head_and_a_slow_body_are_ended(server: LiveServer) -> None:
    assert raw_answer(server.raw(b"GET /v1/models HTTP/1.1\r\nHo"))[1]["code"] == "head_timeout"
    body = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode()
    status, error = raw_answer(server.raw(body))
    assert (status, error["code"]) == (408, "body_timeout")
    assert server.raw(b"") == b""  # one that says nothing is let go


def test_a_long_body_in_one_piece_is_no_long_head(server: LiveServer) -> None:
    request = request_bytes(CHAT, {"messages": MESSAGES, "metadata": {"x": "y" * 90_000}})
    assert server.raw(request).startswith(b"HTTP/1.1 200")


def test_no_http_is_400_in_json(server: LiveServer) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01", b"GET /\xff HTTP/1.1\r\n\r\n", b"hello\r\n\r\n"):
        assert raw_answer(server.raw(data))[1]["code"] == "invalid_http"


def test_the_request_id_of_the_client_comes_back_if_it_is_sane(server: LiveServer) -> None:
    assert server.get("/v1/models", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for strange in ("a b", "x" * 129, '"'):
        given = server.get("/nothing", headers={"X-Request-Id": strange}).headers["x-request-id"]
        assert len(given) == 32


def test_a_bug_is_500_with_the_request_id_and_is_logged_once(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object, **__: object) -> NoReturn:
        raise ZeroDivisionError("secret")

    server.service.ask = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        answer = server.chat()
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] in error_of(answer)["message"]
    assert "secret" not in answer.text
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_a_model_that_loads_is_503() -> None:
    with live_server(None) as server:
        answer = server.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert error_of(answer)["code"] == "model_loading"


def test_keys() -> None:
    keys = KeyRing({"ann": "secret-a", "bob": "secret-b"})
    with live_server(byte_llm(text="hello\0"), keys=keys) as server:
        wrong = [None, "secret-a", "Basic secret-a", "Bearer", "Bearer secret", "Bearer secret-ab"]
        for given in wrong:
            answer = server.get("/v1/models", headers={} if given is None else {"Authorization": given})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert error_of(answer)["type"] == "authentication_error"
        for given in ("Bearer secret-a", "bearer  secret-b"):
            assert server.get("/v1/models", headers={"Authorization": given}).status_code == 200
        assert server.get("/health/ready").status_code == 200


def test_connections_over_the_limit_are_503_but_health_answers() -> None:
    with live_server(byte_llm(text="hello\0"), ServeSettings(max_connections=2)) as server:
        held = [socket.create_connection(server.address) for _ in range(2)]
        try:
            assert eventually(lambda: len(server.server.server_state.connections) == 2)
            answer = server.chat()
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert error_of(answer)["code"] == "too_many_connections"
            assert server.get("/health/live").status_code == 200
        finally:
            for connection in held:
                connection.close()
        assert eventually(lambda: not server.server.server_state.connections)
        assert server.chat().status_code == 200


def counts(server: LiveServer) -> tuple[int, int]:
    """Answers that run and that wait."""
    stats = server.service.llm.stats()
    return stats.num_running, stats.num_waiting


def test_a_full_queue_is_429_and_tells_when_to_come_again() -> None:
    config = EngineConfig(max_batch=1, max_queue=1)
    with live_server(byte_llm(text="hello", config=config)) as server:
        request = request_bytes(CHAT, {"messages": MESSAGES, "stream": True})
        held = []
        try:
            for wanted in ((1, 0), (1, 1)):
                held.append(socket.create_connection(server.address, timeout=LIMIT_S))
                held[-1].sendall(request)
                assert eventually(lambda wanted=wanted: counts(server) == wanted)
            answer = server.chat()
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert error_of(answer)["code"] == "queue_full"
        finally:
            for connection in held:
                connection.close()
        assert eventually(lambda: is_idle(server))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_work_and_frees_its_pages(stream: bool) -> None:
    with live_server(byte_llm(text="hello")) as server:
        with socket.create_connection(server.address, timeout=LIMIT_S) as connection:
            connection.sendall(request_bytes(CHAT, {"messages": MESSAGES, "stream": stream}))
            assert eventually(lambda: server.service.llm.stats().output_tokens > 3)
        assert eventually(lambda: is_idle(server))
        assert server.service.llm.stats().output_tokens < 3000  # of 4096: it was cut short
        assert eventually(lambda: not server.server.server_state.tasks)


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    data = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n" + request_bytes(CHAT, {"messages": MESSAGES})
    first, second = server.raw(data).split(b"HTTP/1.1 ")[1:]
    assert b'"live"' in first
    assert b"hello" in second


def test_no_other_origin_may_call_unless_told() -> None:
    with live_server(byte_llm(text="hello\0")) as server:
        answer = server.get("/v1/models", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers
    settings = ServeSettings(allow_origins=("https://a.example",))
    with live_server(byte_llm(text="hello\0"), settings) as server:
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        for origin, is_let_in in (("https://a.example", True), ("https://b.example", False)):
            preflight = httpx.options(server.url + CHAT, headers={"Origin": origin, **ask})
            assert (preflight.status_code == 200) == is_let_in
            assert (preflight.headers.get("access-control-allow-origin") == origin) == is_let_in
            answer = server.get("/v1/models", headers={"Origin": origin})
            assert (answer.headers.get("access-control-allow-origin") == origin) == is_let_in


def test_stopping_refuses_what_is_new_and_ends_what_takes_too_long() -> None:
    settings = ServeSettings(shutdown_s=0.5)
    with live_server(byte_llm(text="hello", context_length=8000), settings) as server:
        executor = server.service.llm._executor
        run = executor.run

        def slowly(plan: Any) -> Any:
            time.sleep(0.002)
            return run(plan)

        executor.run = slowly  # type: ignore[method-assign]
        connections = [socket.create_connection(server.address, timeout=LIMIT_S) for _ in range(3)]
        streaming, waiting, idle = connections
        streaming.sendall(request_bytes(CHAT, {"messages": MESSAGES, "stream": True}, close=False))
        waiting.sendall(request_bytes(CHAT, {"messages": MESSAGES}, close=False))
        assert eventually(lambda: server.service.llm.stats().num_running == 2)
        assert eventually(lambda: len(server.server.server_state.connections) == 3)
        server.loop.call_soon_threadsafe(server.server._stop)
        assert eventually(lambda: server.service.is_stopping)
        idle.sendall(request_bytes(CHAT, {"messages": MESSAGES}, close=False))
        assert raw_answer(read_all(idle))[1]["code"] == "server_stopping"
        status, error = raw_answer(read_all(waiting))
        assert (status, error["code"]) == (503, "server_stopping")
        events = read_all(streaming)
        assert b"event: error" in events
        assert b"server_stopping" in events
        assert b"[DONE]" not in events
        assert eventually(lambda: is_idle(server))
        for connection in connections:
            connection.close()
