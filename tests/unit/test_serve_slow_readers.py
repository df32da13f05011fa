"""Clients that take nothing of their answer: the connection and the work end. Those that take little are waited for."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import pytest
from byte_llm import byte_llm
from live_server import LIMIT_S, MESSAGES, LiveServer, eventually, is_idle, live_server, request_bytes

from paceline.serve.connection import connections
from paceline.serve.keys import KeyRing
from paceline.serve.run import Server
from paceline.serve.service import Service
from paceline.serve.settings import ServeSettings

SEND_S = 0.3
SMALL = 4096
"""Bytes of a socket's buffers: the kernel's usual ones take megabytes before anybody sees that nobody reads."""


@pytest.fixture
def server() -> Iterator[LiveServer]:
    with live_server(byte_llm(text="hello"), ServeSettings(send_s=SEND_S, coalesce_ms=0)) as running:
        for listening in running.server.servers:
            for listener in listening.sockets:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)  # those that it accepts have it, too
        yield running


def connected(server: LiveServer) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    connection.settimeout(LIMIT_S)
    connection.connect(server.address)
    return connection


def num_connections(server: LiveServer) -> int:
    return len(server.server.server_state.connections)


def test_an_answer_that_nobody_reads_ends_with_its_connection(server: LiveServer) -> None:
    with connected(server) as connection:
        body = {"messages": MESSAGES, "max_tokens": 4000, "stream": True, "logprobs": True, "top_logprobs": 20}
        connection.sendall(request_bytes("/v1/chat/completions", body))
        assert eventually(lambda: server.service.llm.stats().output_tokens > 10)
        assert eventually(lambda: num_connections(server) == 0), "it is open still"
        assert eventually(lambda: is_idle(server))
        assert server.service.llm.stats().output_tokens < 4000, "the work went on"
    assert server.chat(max_tokens=2).status_code == 200


def test_what_is_left_when_the_answer_has_ended_does_not_keep_the_connection(server: LiveServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert connection.recv(1) == b"H"
        assert eventually(lambda: num_connections(server) == 0), "it is open still"


def test_a_reader_in_time_gets_all_of_it(server: LiveServer) -> None:
    whole = server.get("/openapi.json").content
    assert len(whole) > 4 * SMALL
    with connected(server) as connection:
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        found = b""
        while piece := connection.recv(512):
            found += piece
    assert found.endswith(whole)


class Clock(asyncio.AbstractEventLoop):
    """A loop whose time is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[tuple[float, asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now_s

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._timers = [(when_s, timer) for when_s, timer in self._timers if timer is not handle]

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, **_: object
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self.now_s + delay, callback, args, self)
        self._timers.append((self.now_s + delay, timer))
        return timer

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for when_s, timer in sorted(self._timers, key=lambda entry: entry[0]):
            if when_s <= self.now_s:
                self._timers.remove((when_s, timer))
                timer._run()


class Pipe(asyncio.Transport):
    """A transport whose reader takes what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = 0
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True


def test_time_counts_from_the_last_byte_that_was_taken() -> None:
    settings = ServeSettings(send_s=10.0, header_s=1e6)
    config = Server(Service(settings, KeyRing({}), model="bytes")).config
    config.load()
    clock, pipe = Clock(), Pipe()
    state = Server(Service(settings, KeyRing({}), model="bytes")).server_state
    connection = connections(settings)(config, state, {}, clock)
    connection.connection_made(pipe)
    pipe.unsent = 1000
    connection.pause_writing()
    for _ in range(5):  # a little of it, now and then
        clock.advance(6.0)
        pipe.unsent -= 1
        clock.advance(4.0)
    assert not pipe.is_aborted
    pipe.unsent = 0
    connection.resume_writing()
    clock.advance(100.0)
    assert not pipe.is_aborted, "nothing waits to be taken"
    pipe.unsent = 5
    connection.pause_writing()
    clock.advance(9.0)
    assert not pipe.is_aborted
    clock.advance(1.0)
    assert pipe.is_aborted
